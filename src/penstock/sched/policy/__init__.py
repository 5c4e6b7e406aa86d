"""Scheduling policies by name. One file each; add a line here to add one.

A name may carry knobs, the arguments of the policy's constructor: `dynamic:timeout_s=0.05,size=8`.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from penstock.base.errors import ConfigError
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
POLICIES.add("prefill-first", "penstock.sched.policy.prefill_first:PrefillFirst")
POLICIES.add("priority", "penstock.sched.policy.priority:Priority")
POLICIES.add("slo", "penstock.sched.policy.slo:SloAware")
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
        policy: SchedulingPolicy = build(**_knobs(build, kind, given))
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


def _knobs(build: Any, kind: str, given: str) -> dict[str, Any]:
    """`a=1,b=x` as constructor arguments; the type of each is that of its default."""
    known = {p.name: p.default for p in signature(build).parameters.values()}
    knobs: dict[str, Any] = {}
    for item in filter(None, given.split(",")):
        key, _, text = (part.strip() for part in item.partition("="))
        if key not in known:
            choices = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ConfigError(f"scheduling policy {kind!r} has no knob {key!r}; {choices}", field=POLICIES.what)
        try:
            knobs[key] = type(known[key])(text)
        except ValueError:
            want = type(known[key]).__name__
            raise ConfigError(f"knob {key!r} of policy {kind!r} is {text!r}, not {want}", field=POLICIES.what) from None
    return knobs
