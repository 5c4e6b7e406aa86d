"""Presets on one workload, in turns: how soon one request is answered, how much goes through, and the same tokens.

In each round every preset's engine is made anew, one at a time, in an order that is drawn; what is compared is medians
over rounds, each beside the default settings of the same round.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from penstock.base.errors import PenstockError
from penstock.bench.offline import local_maker
from penstock.config.engine import EngineConfig
from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM

DEFAULT = "default"
_SHARE = 0.5
"""Of a prompt: what all prompts begin with, as an application's instructions."""


@dataclass(frozen=True)
class PresetWork:
    """`requests` with prompts of about `input_len` tokens that begin alike, and outputs of lognormal lengths about
    `output_len`. A request alone, of these lengths, is timed before."""

    requests: int = 16
    input_len: int = 128
    output_len: int = 48
    seed: int = 0

    def draw(self, llm: LLM) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
        """The first of each is the one that is asked alone."""
        rng, maker = np.random.default_rng(self.seed), local_maker(llm)
        head = list(maker.draw(rng, int(self.input_len * _SHARE)))
        room = llm.engine.limits.max_model_len
        prompts: list[dict[str, Any]] = []
        params: list[SamplingParams] = []
        for number in range(self.requests + 1):
            inputs = self.input_len if number == 0 else int(self.input_len * rng.uniform(0.75, 1.25))
            outputs = self.output_len if number == 0 else int(self.output_len * rng.lognormal(-0.125, 0.5))
            outputs = min(max(outputs, 2), room - inputs - 1)
            prompts.append({"prompt_token_ids": head + list(maker.draw(rng, inputs - len(head)))})
            params.append(SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True))
        return prompts, params


@dataclass
class PresetFigures:
    """Of one preset, a number per round. Units: seconds; tokens a second."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    mean_latency_s: list[float] = field(default_factory=list)
    """From the moment at which all requests come to a request's last token."""
    same_tokens: bool = True
    error: str | None = None

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {"same_tokens": self.same_tokens, "error": self.error}
        for name in ("ttft_s", "tpot_s", "tokens_per_s", "mean_latency_s"):
            values = getattr(self, name)
            if values:
                out[name] = {"median": median(values), "min": min(values), "max": max(values), "rounds": values}
        return out


def measure(
    configs: Mapping[str, EngineConfig], work: PresetWork, rounds: int, on_one: Callable[[], None] = lambda: None
) -> dict[str, PresetFigures]:
    """By preset. One that cannot run says why, and the others go on. Tokens are compared with those of the first, whose
    errors are raised."""
    found = {name: PresetFigures() for name in configs}
    first = next(iter(configs))
    wanted: list[list[int]] = []
    for number in range(rounds):
        names = list(configs)
        random.Random(work.seed + number).shuffle(names)
        if number == 0:
            names.sort(key=lambda name: name != first)  # whose tokens the others' are compared with
        for name in names:
            one = found[name]
            try:
                if one.error is None:
                    tokens = _one(configs[name], work, one)
                    wanted = wanted or tokens
                    one.same_tokens &= tokens == wanted
            except PenstockError as error:
                if name == first:
                    raise
                one.error = str(error)
            on_one()
    return found


def _one(config: EngineConfig, work: PresetWork, into: PresetFigures) -> list[list[int]]:
    llm = LLM.from_config(config)
    try:
        prompts, params = work.draw(llm)
        warm = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1] * 8}], warm)
        (alone,) = llm.generate(prompts[:1], params[:1])
        ttft_s, tpot_s = alone.metrics.ttft_s, alone.metrics.tpot_s(len(alone.outputs[0].token_ids))
        assert ttft_s is not None
        assert tpot_s is not None
        began_s = time.perf_counter()
        outputs = llm.generate(prompts[1:], params[1:])
        took_s = time.perf_counter() - began_s
        tokens = [list(output.outputs[0].token_ids) for output in [alone, *outputs]]
        into.ttft_s.append(ttft_s)
        into.tpot_s.append(tpot_s)
        into.tokens_per_s.append(sum(map(len, tokens[1:])) / took_s)
        ends = [o.metrics.finished_s - o.metrics.arrival_s for o in outputs if o.metrics.finished_s is not None]
        into.mean_latency_s.append(sum(ends) / len(ends))
        return tokens
    finally:
        del llm
        gc.collect()


def rows(
    found: Mapping[str, PresetFigures],
    features: Mapping[str, Mapping[str, str]] | None = None,
    columns: Sequence[str] = (),
) -> Iterator[list[str]]:
    """Lines of a table: name, what it switches on, medians, ratios to the first preset's; and with `features`, from
    where to where they go."""
    base = next(iter(found.values()))
    for name, one in found.items():
        switched = [] if features is None else [features[name][column] for column in columns]
        if one.error is not None:
            yield [name, *switched, *["-"] * 4, one.error]
            continue
        cells = []
        for which, scale, digits in (
            ("ttft_s", 1e3, 0), ("tpot_s", 1e3, 1), ("tokens_per_s", 1.0, 1), ("mean_latency_s", 1.0, 2),
        ):  # fmt: skip
            values, beside = getattr(one, which), getattr(base, which)
            ratio = median([a / b for a, b in zip(values, beside, strict=True)])
            ends = f" ({min(values) * scale:.{digits}f} to {max(values) * scale:.{digits}f})"
            cells.append(f"{median(values) * scale:.{digits}f}{'' if features is None else ends}; {ratio:.2f}")
        yield [name, *switched, *cells, "yes" if one.same_tokens else "NO"]
