"""Steps of the real engine, designed to show what a step costs: the data behind `plan.calibrated`.

Rounds of requests, each with its own number of them, lengths and limits of a step (drawn evenly over their logarithms),
run through the engine that serves; every step gives a sample of its shape and the seconds from one step's end to the
next one's, so the host's time between steps is in it. Source of the idea: Vidur, arXiv 2405.05465, section 4.2
(profile each operation over the shapes that a scheduler makes).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.base.clock import MonotonicClock
from penstock.config import EngineConfig
from penstock.launch.build import Engine
from penstock.measure.stolen import StolenTime
from penstock.sim.driver import Sample
from penstock.sim.real import run_on
from penstock.sim.workload import TimedRequest, from_list

MIN_CHUNK = 16
HELD_OUT = 4
"""Every so many-th round is not fitted to but predicted."""
LEAST_ROUNDS = 8
_PATIENCE = 3
"""Times the seconds asked for, in which rounds that were disturbed are left out."""
ROUND_TOKENS = 3072
"""Of all requests of a round, at least: many short ones or a few long ones."""


@dataclass(frozen=True)
class Round:
    """Requests that are all there, at most `num_seqs` of which run, in steps of at most `budget` tokens."""

    requests: tuple[TimedRequest, ...]
    num_seqs: int
    budget: int

    @property
    def num_tokens(self) -> int:
        return sum(r.num_prompt + r.num_output for r in self.requests)


def draw_round(
    rng: np.random.Generator, *, max_num_seqs: int, max_tokens: int, longest: int, pool: int
) -> Round:  # fmt: skip
    """`longest`: tokens of a request; `pool`: of all that run together; `max_tokens`: of a step."""
    longest = max(4, min(longest, pool))
    room = max(ROUND_TOKENS, 2 * longest)  # two of the longest: one decodes while the other's prompt is read
    num_seqs = _between(rng, 1, max_num_seqs)
    budget = max(num_seqs, _between(rng, min(MIN_CHUNK, max_tokens), max_tokens))
    top = min(longest - 2, max(2, min(pool // num_seqs, room // (num_seqs + 1)) - 2))
    scale = _between(rng, 2, top)
    requests = []
    # One more than run at once: somebody's prompt is read while others decode.
    for _ in range(num_seqs + 1):
        num_prompt = int(np.clip(round(scale * float(rng.uniform(0.5, 1.5))), 1, top))
        num_output = int(np.clip(_between(rng, 4, 24), 1, longest - num_prompt))
        requests.append(TimedRequest(0.0, num_prompt, num_output))
    return Round(tuple(requests), num_seqs, budget)


def _between(rng: np.random.Generator, low: int, high: int) -> int:
    """Evenly over the logarithm."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(max(low, high))))))


def plain(config: EngineConfig) -> EngineConfig:
    """Under the policy that goes by order alone: others may hold on to what they know of the limits of a step, which
    change with every round."""
    return replace(config, scheduler=replace(config.scheduler, scheduling_policy="fcfs"))


def collect(
    engine: Engine, *, seconds: float, longest: int, seed: int = 0,
    progress: Callable[[float, int], None] | None = None, most_stolen: float = 1.0,
) -> tuple[list[Sample], list[Sample]]:  # fmt: skip
    """(samples to fit to, samples to check with). At least LEAST_ROUNDS rounds, and as many as begin in `seconds`.

    `longest`: tokens of the longest request. `most_stolen`: rounds in which the machine's host took away more of the
    processors' time are left out, while there is time for others. `progress` hears of the share of the time and the
    number of steps. The engine is `plain`. Mutates it; it is as it was in the end.
    """
    rng = np.random.default_rng([seed, 0xCA1])
    clock, core, plan = MonotonicClock(), engine.core, engine.plan
    scheduler = core.scheduler
    limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    began_s, number = clock.now(), 0
    fitted: list[Sample] = []
    held: list[Sample] = []
    try:
        while number < LEAST_ROUNDS or clock.now() - began_s < seconds:
            drawn = draw_round(
                rng, max_num_seqs=plan.max_num_seqs, max_tokens=plan.max_num_batched_tokens,
                longest=min(longest, plan.max_model_len), pool=plan.kv_capacity_tokens,
            )  # fmt: skip
            scheduler.max_num_seqs, scheduler.max_num_batched_tokens = drawn.num_seqs, drawn.budget
            samples = held if number % HELD_OUT == HELD_OUT - 1 else fitted
            watch, before = StolenTime(), len(samples)
            run_on(engine, from_list(f"round {number}", drawn.requests), samples=samples)
            core.kv.reset_prefix_cache()  # the next round's prompts begin alike
            if watch.share() > most_stolen and clock.now() - began_s < _PATIENCE * seconds:
                del samples[before:]
                continue
            number += 1
            if progress is not None:
                share = max((clock.now() - began_s) / seconds, number / LEAST_ROUNDS * (seconds <= 0))
                progress(min(1.0, share), len(fitted) + len(held))
    finally:
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = limits
    return fitted, held
