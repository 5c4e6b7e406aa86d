"""Presets on one workload, in turns: how soon one request is answered, how much goes through, what those feel who come
one by one, and the same tokens.

In each round every preset's engine is made anew, one at a time, in an order that is drawn; what is compared is medians
over rounds, and ratios to the default settings of the same round with their intervals.
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

from penstock.base.errors import EngineError, PenstockError
from penstock.bench.arrivals import arrival_times
from penstock.bench.offline import local_maker
from penstock.config.engine import EngineConfig
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams, TokenRules
from penstock.launch.llm import LLM
from penstock.measure.intervals import ratio_interval

DEFAULT = "default"
FIGURES = (
    ("ttft_s", "first token alone, ms", 1e3, 0),
    ("tpot_s", "per token alone, ms", 1e3, 1),
    ("tokens_per_s", "tokens/s together", 1.0, 1),
    ("mean_latency_s", "mean latency together, s", 1.0, 2),
    ("late_ttft_s", "first token over time, ms", 1e3, 0),
    ("late_per_token_s", "latency per token over time, ms", 1e3, 0),
)
"""Field of `PresetFigures`, its name in a table, what it is multiplied by there, and digits."""
OVER_TIME = ("late_ttft_s", "late_per_token_s")
_SHARE = 0.5
"""Of a prompt: what all prompts begin with, as an application's instructions."""


@dataclass(frozen=True)
class PresetWork:
    """`requests` with prompts of about `input_len` tokens that begin alike, and outputs of lognormal lengths about
    `output_len`, all at once. A request alone, of these lengths, is timed before. With a `rate`, in requests a second,
    so many others like them come behind, one by one (a Poisson process)."""

    requests: int = 16
    input_len: int = 128
    output_len: int = 48
    seed: int = 0
    rate: float | None = None

    def draw(self, llm: LLM) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
        """The first of each is the one that is asked alone; the last half of the others, with a rate, comes later."""
        rng, maker = np.random.default_rng(self.seed), local_maker(llm)
        head = list(maker.draw(rng, int(self.input_len * _SHARE)))
        room = llm.engine.limits.max_model_len
        prompts: list[dict[str, Any]] = []
        params: list[SamplingParams] = []
        for number in range(self.requests * (1 if self.rate is None else 2) + 1):
            inputs = self.input_len if number == 0 else int(self.input_len * rng.uniform(0.75, 1.25))
            outputs = self.output_len if number == 0 else int(self.output_len * rng.lognormal(-0.125, 0.5))
            outputs = min(max(outputs, 2), room - inputs - 1)
            prompts.append({"prompt_token_ids": head + list(maker.draw(rng, inputs - len(head)))})
            params.append(SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True))
        return prompts, params


_Late = tuple[float, float, list[int]]
"""Of a request that came over time: seconds to its first token and to its last, and its tokens."""


@dataclass
class PresetFigures:
    """Of one preset, a number per round. Units: seconds; tokens a second."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    mean_latency_s: list[float] = field(default_factory=list)
    """From the moment at which all requests come to a request's last token."""
    late_ttft_s: list[float] = field(default_factory=list)
    late_per_token_s: list[float] = field(default_factory=list)
    """Means over requests that come one by one: to the first token; to the last, for each token (Orca's normalized
    latency)."""
    same_tokens: bool = True
    error: str | None = None

    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {"same_tokens": self.same_tokens, "error": self.error}
        for name, *_ in FIGURES:
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
        together = slice(1, work.requests + 1)
        began_s = time.perf_counter()
        outputs = llm.generate(prompts[together], params[together])
        took_s = time.perf_counter() - began_s
        tokens = [list(output.outputs[0].token_ids) for output in [alone, *outputs]]
        into.ttft_s.append(ttft_s)
        into.tpot_s.append(tpot_s)
        into.tokens_per_s.append(sum(map(len, tokens[1:])) / took_s)
        ends = [o.metrics.finished_s - o.metrics.arrival_s for o in outputs if o.metrics.finished_s is not None]
        into.mean_latency_s.append(sum(ends) / len(ends))
        if work.rate is not None:
            due = arrival_times(work.requests, work.rate, seed=work.seed)
            later = slice(work.requests + 1, None)
            asked = [
                (p["prompt_token_ids"], one.max_tokens or 1)
                for p, one in zip(prompts[later], params[later], strict=True)
            ]
            late = _over_time(llm, asked, [float(at_s) for at_s in due])
            into.late_ttft_s.append(sum(first_s for first_s, _, _ in late) / len(late))
            into.late_per_token_s.append(sum(last_s / len(said) for _, last_s, said in late) / len(late))
            tokens += [said for _, _, said in late]
        return tokens
    finally:
        del llm
        gc.collect()


def _over_time(llm: LLM, asked: Sequence[tuple[list[int], int]], due: list[float]) -> list[_Late]:
    """Requests (prompt, tokens) come when they are due: seconds from now, ascending. Returns what became of each."""
    core, clock = llm.engine.core, llm.engine.clock
    began_s, came = clock.now(), 0
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    said: dict[str, list[int]] = {}
    while came < len(asked) or core.has_work:
        while came < len(asked) and began_s + due[came] <= clock.now():
            prompt, length = asked[came]
            name = f"late-{came}"
            arrived[name], said[name], came = began_s + due[came], [], came + 1
            core.add(Request(
                request_id=name, prompt_token_ids=prompt, rules=TokenRules(temperature=0.0), max_tokens=length,
                arrival_s=arrived[name],
            ))  # fmt: skip
        outputs = core.step() if core.has_work else []
        now_s = clock.now()
        for out in outputs:
            if out.error is not None:
                raise EngineError(out.error)
            if out.token_ids:
                first.setdefault(out.request_id, now_s)
                last[out.request_id] = now_s
                said[out.request_id] += out.token_ids
        waits = [began_s + due[came]] if came < len(asked) else []
        if core.has_work:  # then only for a policy that holds requests back
            waits = [core.scheduler.wake_s, *waits] if core.scheduler.wake_s is not None else []
        if waits:
            clock.wait_until(min(waits))
    return [(first[name] - arrived[name], last[name] - arrived[name], said[name]) for name in arrived]


def rows(
    found: Mapping[str, PresetFigures],
    features: Mapping[str, Mapping[str, str]] | None = None,
    columns: Sequence[str] = (),
) -> Iterator[list[str]]:
    """Lines of a table: name, what it switches on, medians, ratios to the first preset's (geometric means); and with
    `features`, their intervals of 95 %."""
    base = next(iter(found.values()))
    timed = [figure for figure in FIGURES if getattr(base, figure[0])]
    for name, one in found.items():
        switched = [] if features is None else [features[name][column] for column in columns]
        if one.error is not None:
            yield [name, *switched, *["-"] * len(timed), one.error]
            continue
        cells = []
        for which, _, scale, digits in timed:
            values, beside = getattr(one, which), getattr(base, which)
            gain, interval = ratio_interval(values, beside)
            told = f"{median(values) * scale:.{digits}f}; {1 + gain:.2f}"
            if features is not None and interval is not None and one is not base:
                told += f" ({1 + interval[0]:.2f} to {1 + interval[1]:.2f})"
            cells.append(told)
        yield [name, *switched, *cells, "yes" if one.same_tokens else "NO"]
