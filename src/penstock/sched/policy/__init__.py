"""Scheduling policies by name. One file each; add a line here to add one.

A name may carry knobs, the arguments of the policy's constructor: `dynamic:timeout_s=0.05,size=8`.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.errors import ConfigError
from penstock.base.knobs import knobs
from penstock.base.registry import Registry
from penstock.core.protocols import SchedulingPolicy

POLICIES: Registry[Callable[..., SchedulingPolicy], None] = Registry("scheduling_policy")
POLICIES.add("batchllm", "penstock.sched.policy.batchllm:BatchLLM")
POLICIES.add("andes", "penstock.sched.policy.andes:Andes")
POLICIES.add("cache-aware", "penstock.sched.policy.cache_aware:CacheAware")
POLICIES.add("dynamic", "penstock.sched.policy.dynamic:Dynamic")
POLICIES.add("fair", "penstock.sched.policy.fair:Fair")
POLICIES.add("fastserve", "penstock.sched.policy.fastserve:FastServe")
POLICIES.add("fcfs", "penstock.sched.policy.fcfs:Fcfs")
POLICIES.add("lamps", "penstock.sched.policy.lamps:Lamps")
POLICIES.add("length-aware", "penstock.sched.policy.length_aware:LengthAware")
POLICIES.add("multi-bin", "penstock.sched.policy.multi_bin:MultiBin")
POLICIES.add("prefill-first", "penstock.sched.policy.prefill_first:PrefillFirst")
POLICIES.add("priority", "penstock.sched.policy.priority:Priority")
POLICIES.add("slo", "penstock.sched.policy.slo:SloAware")
POLICIES.add("s3", "penstock.sched.policy.s3:S3")
POLICIES.add("splitfuse", "penstock.sched.policy.splitfuse:SplitFuse")
POLICIES.add("static", "penstock.sched.policy.static:Static")
_QUESTIONS = [*SchedulingPolicy.__annotations__, *(name for name in vars(SchedulingPolicy) if name[0] != "_")]
"""What every policy answers."""


def make_policy(name: str) -> SchedulingPolicy:
    """The policy called `name`, or `name:knob=value,knob=value`.

    Raises ConfigError, naming the choices, for an unknown policy or knob and for a value that makes no sense, and for
    one that cannot be made or does not answer what the protocol asks.
    """
    kind, _, given = name.partition(":")
    build = POLICIES.get(kind)
    try:
        policy: SchedulingPolicy = build(**knobs(build, f"scheduling policy {kind!r}", POLICIES.what, given))
    except TypeError as error:
        raise ConfigError(f"scheduling policy {kind!r} cannot be made: {error}", field=POLICIES.what) from error
    if lacking := [name for name in _QUESTIONS if not hasattr(policy, name)]:
        raise ConfigError(
            f"scheduling policy {kind!r} has no {', '.join(lacking)}; write them, or inherit from "
            "penstock.sched.policy.fcfs.Fcfs",
            field=POLICIES.what,
        )
    return policy


def make_offline_policy(name: str) -> SchedulingPolicy:
    """The same for offline work (`sched.offline`). Raises ConfigError about `offline_policy`."""
    try:
        return make_policy(name)
    except ConfigError as error:
        raise ConfigError(f"offline_policy: {error}", field="offline_policy") from None
