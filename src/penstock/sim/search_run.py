"""A search on a device: what fits at each tensor degree, and the found point replayed on the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError, InputError
from penstock.config import EngineConfig, from_kwargs
from penstock.core.model_spec import Attention, ModelSpec
from penstock.core.protocols import StepTimer
from penstock.core.replica_roles import DECODE, PREFILL
from penstock.plan.calibrated import CalibratedTimer, Calibration
from penstock.plan.devices import Device
from penstock.plan.resolve import Plan
from penstock.plan.simulated import device_plan
from penstock.sim.build import build_sim
from penstock.sim.calibrated import config_for, plan_for
from penstock.sim.disaggregated import STORE, Cluster, EngineLink, EnginePool
from penstock.sim.driver import SimLimits, simulate
from penstock.sim.result import SimResult
from penstock.sim.search import (
    PLACED,
    POLICIES,
    Lengths,
    Point,
    Schedules,
    Searchable,
    Searched,
    TensorTimer,
    all_at_once,
    evenly,
    parallel,
    search,
)  # fmt: skip
from penstock.sim.search_placed import HandoverLink, PlacedSchedules, layouts
from penstock.sim.service import SimulatedService
from penstock.sim.workload import Workload

MOST_SEQS = 512
CHUNK = 16
QUANTILE = 0.99


@dataclass(frozen=True)
class SearchTarget:
    """What is searched for. `settings`: of the engine, by name, but for those that the search decides. `devices`: how
    many there are; engines of d of them each share the requests. `link_bytes_per_s`: of an engine, to where others read
    keys and values, for the schedule `placed`; `schedules`: of `search.POLICIES`."""

    spec: ModelSpec
    model: str
    settings: Mapping[str, Any]
    device: Device | Calibration
    devices: int = 1
    degrees: Sequence[int] = (1,)
    link_bytes_per_s: float = EngineLink.bytes_per_s
    schedules: Sequence[str] = tuple(POLICIES)

    def plan(self, degree: int, more: Mapping[str, object]) -> tuple[EngineConfig, Plan]:
        """Raises ConfigError, CapacityError."""
        if isinstance(self.device, Calibration):
            config = config_for(self.device, {**self.settings, **more})
            return config, plan_for(self.device, config)
        config = from_kwargs({}, **(dict(self.settings) | dict(more) | {"model": self.model}))
        return device_plan(config, self.spec, parallel(self.device, degree))

    def timer(self, degree: int, plan: Plan) -> StepTimer:
        if isinstance(self.device, Calibration):
            return CalibratedTimer(self.device.curve, self.device.copy_bytes_per_s)
        return TensorTimer(self.spec, self.device, degree, dtype=plan.dtype, kv_dtype=plan.kv_dtype)


def find(target: SearchTarget, workload: Workload, latency_s: float, *, most_seqs: int = MOST_SEQS) -> Searched:
    """Raises ConfigError for degrees that the devices or the model cannot have, InputError if nothing can meet the
    latency, and CapacityError if the model does not fit."""
    _check(target)
    lengths = Lengths.of(workload, QUANTILE)
    of_degree: dict[int, Schedules] = {}
    most_chunk = CHUNK
    for degree in target.degrees:
        _, plan = target.plan(degree, {})
        # Nobody is put out for want of memory: a preemption is in no formula.
        room = min(most_seqs, plan.kv_capacity_tokens // lengths.longest)
        if room < 1:
            raise InputError(
                f"a request of {lengths.longest} tokens does not fit the pool of {plan.kv_capacity_tokens}; shorten it",
                param="trace",
            )
        of_degree[degree] = Schedules(
            lengths, target.timer(degree, plan), degree=degree, engines=target.devices // degree, most_seqs=room
        )
        of_degree[degree].schedules = [name for name in target.schedules if name != PLACED]
        most_chunk = max(most_chunk, plan.max_num_batched_tokens)
        block_size = plan.block_size
        token_bytes = sum(group.token_bytes(block_size) for group in plan.own_groups)
    every: list[Searchable] = list(of_degree.values())
    if PLACED in target.schedules:
        link = HandoverLink(token_bytes, target.link_bytes_per_s, block_size)
        every += [
            PlacedSchedules(of_degree[pd].shared_by(prompts), of_degree[td].shared_by(tokens), link)
            for prompts, pd, tokens, td in layouts(target.devices, target.degrees)
        ]
    if not any(one.schedules for one in every):
        raise ConfigError(
            f"schedules: placed needs engines for prompts and for tokens, and degrees of {target.degrees} leave "
            f"room for one on {target.devices} devices; use smaller degrees or more devices",
            field="schedules",
        )
    found = search(every, latency_s, max_chunk=most_chunk, step=CHUNK)
    if found.best is None:
        raise InputError(
            f"no setting answers requests of these lengths within {latency_s:g} s; the fastest takes "
            f"{found.fastest_s:.3g} s, so allow more or use a faster device",
            param="latency",
        )
    return found


def _check(target: SearchTarget) -> None:
    if PLACED in target.schedules and isinstance(target.device, Calibration):
        raise ConfigError(
            "schedules: placed needs several devices, and step times are of one machine", field="schedules"
        )
    if target.schedules == (PLACED,) and target.devices < 2:
        raise ConfigError("schedules: placed needs at least 2 --devices, one for prompts", field="schedules")
    heads = [layer.mixer.num_heads for layer in target.spec.layers if isinstance(layer.mixer, Attention)]
    for degree in target.degrees:
        if isinstance(target.device, Calibration) and degree != 1:
            raise ConfigError("degrees: step times of one machine say nothing of several; use 1", field="degrees")
        if degree > target.devices or target.devices % degree:
            raise ConfigError(
                f"degrees: {degree} does not divide {target.devices} devices; use a divisor, or other --devices",
                field="degrees",
            )
        if any(n % degree for n in heads):
            raise ConfigError(
                f"degrees: {degree} does not divide the {heads[0]} attention heads of this model; leave it out",
                field="degrees",
            )


def replay(target: SearchTarget, point: Point, workload: Workload, *, truncate: bool = False) -> SimResult:
    """One engine's share of the requests, all of them there from the start, through the simulator. Where prompts and
    tokens have devices of their own: all of them, at even distances, as many a second as the point promises."""
    if point.prompt_engines:
        return _replay_placed(target, point, workload, truncate)
    config, plan = target.plan(point.degree, point.settings)
    clock = VirtualClock()
    core = build_sim(config, target.spec, plan, target.timer(point.degree, plan), clock, depth=config.execution.depth)
    limits = SimLimits(plan.max_model_len, plan.kv_capacity_tokens, target.spec.vocab_size, truncate=truncate)
    return simulate(core, clock, all_at_once(workload), limits, label=f"{point.schedule}, {point.num_seqs} sequences")


def _replay_placed(target: SearchTarget, point: Point, workload: Workload, truncate: bool) -> SimResult:
    assert not isinstance(target.device, Calibration), "`_check` has seen to it"
    pools = []
    for role, size, degree, settings in (
        (PREFILL, point.prompt_engines, point.prompt_degree, point.prompt_settings),
        (DECODE, point.engines, point.degree, point.settings | {"kv_load_policy": "wait"}),
    ):
        config, plan = target.plan(degree, settings | {"kv_offload": STORE})
        service = SimulatedService(role, target.spec, config, plan, target.device, degree=degree)
        pools.append(EnginePool(role, service, size))
    cluster = Cluster(tuple(pools), link=EngineLink(target.link_bytes_per_s))
    return cluster.run(evenly(workload, point.requests_per_s), truncate=truncate).result


def rate_of(target: SearchTarget, point: Point, result: SimResult) -> float:
    """Requests/s of all devices in a replay."""
    shares = 1 if point.prompt_engines else target.devices // point.degree
    return len(result.requests) / result.span_s * shares


def latency_of(result: SimResult, quantile: float = QUANTILE) -> float:
    """Seconds from the first step that works on a request to its last token, of which this share takes at most so
    many."""
    spans = result.requests.finish_s - result.requests.scheduled_s
    return float(np.quantile(spans, quantile, method="higher"))
