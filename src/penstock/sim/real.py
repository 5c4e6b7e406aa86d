"""The same workloads through the real engine, on the machine's clock.

What a simulation says of a policy is worth what happens here: the loop, the metrics and the prompts are those of
`sim.driver`; only the executor computes and time passes by itself.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.base.clock import MonotonicClock
from penstock.config import EngineConfig, from_kwargs
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.launch.build import Engine, start
from penstock.sim.driver import Progress, Sample, SimLimits, simulate
from penstock.sim.result import SimResult
from penstock.sim.workload import Workload

WARM_TOKENS = 512
"""Of the request that is run before anything is measured: pages are touched, kernels are in the caches."""


@contextmanager
def real_engine(config: EngineConfig) -> Iterator[Engine]:
    """An engine as `LLM` has it, warm and empty. Raises as `launch.build.start`."""
    engine = start(config)
    try:
        warm_up(engine)
        gc.collect()
        gc.freeze()  # as in an engine's process: collections need not look at what stays
        yield engine
    finally:
        gc.unfreeze()
        engine.core.executor.close()
        engine.hold.close()


def warm_up(engine: Engine) -> None:
    """Run a request of the engine's own and forget it."""
    longest = min(engine.plan.max_model_len, engine.plan.kv_capacity_tokens)
    num_prompt = max(1, min(WARM_TOKENS, longest - 2))
    core = engine.core
    prompt = [(7 * k + 1) % engine.spec.vocab_size for k in range(num_prompt)]
    request = Request(
        request_id="warm-up", prompt_token_ids=prompt, rules=TokenRules(temperature=0.0), max_tokens=2,
        arrival_s=engine.clock.now(), namespace=b"warm-up",
    )  # fmt: skip
    core.add(request)
    while core.has_work:
        core.step()
        if core.scheduler.wake_s is not None:
            engine.clock.wait_until(core.scheduler.wake_s)
    core.kv.reset_prefix_cache()


def limits_of(engine: Engine, *, truncate: bool = False) -> SimLimits:
    """What a request may ask this engine for."""
    plan = engine.plan
    return SimLimits(plan.max_model_len, plan.kv_capacity_tokens, engine.spec.vocab_size, truncate=truncate)


def run_on(
    engine: Engine,
    workload: Workload,
    *,
    label: str = "",
    truncate: bool = False,
    samples: list[Sample] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SimResult:
    """Run a workload through a real engine that is idle; arrivals are waited for. Arguments as in `simulate`."""
    limits = limits_of(engine, truncate=truncate)
    result = simulate(
        engine.core, MonotonicClock(), workload, limits, label=label, real=True, samples=samples, progress=progress
    )
    return replace(result, decisions=engine.decisions)


def run_real(
    model: str,
    settings: Mapping[str, Any],
    workload: Workload,
    *,
    label: str = "",
    truncate: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> SimResult:
    """Load `model` with `settings` (as `LLM` takes them) and run the workload; `SimResult.tokens` has its tokens.

    Raises InputError for broken workloads, and as `LLM` for the model and its settings.
    """
    with real_engine(from_kwargs(os.environ, model=model, **settings)) as engine:
        return run_on(engine, workload, label=label, truncate=truncate, progress=progress)
