"""Scheduling policies by name. One file each; add a line here to add one."""

from penstock.base.registry import Registry
from penstock.core.protocols import SchedulingPolicy

POLICIES = Registry("scheduling_policy")
POLICIES.add("fcfs", "penstock.sched.policy.fcfs:Fcfs")
POLICIES.add("prefill-first", "penstock.sched.policy.prefill_first:PrefillFirst")
POLICIES.add("static", "penstock.sched.policy.static:Static")


def make_policy(name: str) -> SchedulingPolicy:
    """The policy called `name`. Raises ConfigError naming the choices."""
    policy: SchedulingPolicy = POLICIES.get(name)()
    return policy
