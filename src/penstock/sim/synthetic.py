"""Workloads from a formula: `synthetic:poisson?rate=2&prompt=512&output=128`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from urllib.parse import parse_qsl

import numpy as np

from penstock.base.errors import InputError
from penstock.sim.arrivals import make, numbers, seeded
from penstock.sim.workload import MAX_TOKENS, TimedRequest, Workload

PREFIX = "synthetic:"
DEFAULTS: dict[str, float] = {
    "requests": 1000, "prompt": 512, "output": 128, "prompt_cv": 0, "output_cv": 0, "shared": 0, "groups": 1,
    "tenants": 1, "prompt_zipf": 0, "output_zipf": 0,
}  # fmt: skip
"""requests: how many. prompt, output: mean tokens. *_cv: variation of log-normal lengths (sd / mean), 0 is constant.
*_zipf: the exponent of lengths that follow Zipf's law; `prompt` and `output` are then the longest. 0: they do not.
shared: tokens that begin each prompt and are common to one of `groups`. tenants: so many labels, in turn."""
PRESETS: dict[str, tuple[str, dict[str, float]]] = {
    "burstgpt": ("gamma", {"cv": 2**0.5, "prompt": 1023, "output": 1023, "prompt_zipf": 1.1, "output_zipf": 1.1}),
}
"""By name: an arrival process, and numbers that hold unless others are given. burstgpt: bursts and lengths as the
generator of Wang et al., arXiv 2401.17644, has them by default (Gamma gaps of shape 0.5, Zipf 1.1 below 1,024)."""
_MAX_REQUESTS = 10**9
_MAX_ZIPF_TOKENS = 2**20
_CHUNK = 1024


def synthetic(text: str, seed: int = 0) -> Workload:
    """The workload that `text` describes: an arrival process or a preset, then its numbers and those of DEFAULTS.

    Raises InputError naming the number that is unknown or out of range.
    """
    name, _, query = text.removeprefix(PREFIX).partition("?")
    told = given = numbers(iter(parse_qsl(query, keep_blank_values=True)), "synthetic")
    title = name
    if name in PRESETS:
        name, preset = PRESETS[name]
        given = preset | given
    own = DEFAULTS | {key: value for key, value in given.items() if key in DEFAULTS}
    process = make(name, {key: value for key, value in given.items() if key not in DEFAULTS})
    _check(own)
    times = seeded(process, seed)

    def source() -> Iterator[TimedRequest]:
        rng = np.random.default_rng([seed, 0xB])
        prompts, outputs = (
            _lengths(rng, own["prompt"], own["prompt_cv"], own["prompt_zipf"]),
            _lengths(rng, own["output"], own["output_cv"], own["output_zipf"]),
        )
        groups, tenants = int(own["groups"]), int(own["tenants"])
        for number, arrival_s in zip(range(int(own["requests"])), times(), strict=False):
            yield TimedRequest(
                arrival_s,
                max(next(prompts), int(own["shared"]) + 1),
                next(outputs),
                tenant=f"tenant-{number % tenants}" if tenants > 1 else "",
                blocks=(number % groups,) if own["shared"] else (),
            )

    numbers_text = ", ".join(f"{key} {value:g}" for key, value in told.items())
    return Workload(
        f"synthetic {title}",
        f"{title} arrivals; {numbers_text}; seed {seed}",
        source,
        block_tokens=int(own["shared"]) or 512,
        num_requests=int(own["requests"]),
    )


def _check(own: dict[str, float]) -> None:
    for name, low, high in (
        ("requests", 1, _MAX_REQUESTS), ("prompt", 1, MAX_TOKENS), ("output", 1, MAX_TOKENS), ("prompt_cv", 0, 100),
        ("output_cv", 0, 100), ("shared", 0, MAX_TOKENS), ("groups", 1, _MAX_REQUESTS), ("tenants", 1, 10**6),
        ("prompt_zipf", 0, 100), ("output_zipf", 0, 100),
    ):  # fmt: skip
        broken = name.endswith(("cv", "zipf"))
        if not (low <= own[name] <= high and (broken or own[name] == int(own[name]))):
            kind = "a number" if broken else "a whole number"
            raise InputError(f"synthetic: {name} must be {kind} from {low} to {high}, not {own[name]:g}", param=name)
    for name in ("prompt", "output"):
        if own[f"{name}_zipf"] and (own[f"{name}_cv"] or own[name] > _MAX_ZIPF_TOKENS):
            raise InputError(f"synthetic: {name}_zipf needs {name}_cv 0 and {name} of at most {_MAX_ZIPF_TOKENS}",
                             param=f"{name}_zipf")  # fmt: skip


def _lengths(rng: np.random.Generator, mean: float, cv: float, zipf: float) -> Iterator[int]:
    """Log-normal lengths of at least 1 with this mean and coefficient of variation (before rounding), or, with an
    exponent `zipf`, k with a chance in proportion to k to the power of -zipf, from 1 to `mean`.
    """
    if cv == 0 and zipf == 0:
        while True:
            yield int(mean)
    own = np.random.default_rng(rng.integers(2**63))  # so that prompts and outputs do not depend on each other's use
    if zipf:
        chances = np.cumsum(np.arange(1, int(mean) + 1, dtype=np.float64) ** -zipf)
        while True:
            yield from (np.searchsorted(chances, own.random(_CHUNK) * chances[-1], side="right") + 1).tolist()
    sigma = math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean) - sigma * sigma / 2
    while True:
        drawn = np.clip(np.rint(own.lognormal(mu, sigma, _CHUNK)), 1, MAX_TOKENS)
        yield from drawn.astype(np.int64).tolist()
