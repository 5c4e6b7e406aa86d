"""The plan as one rank of a pipeline has it."""

from __future__ import annotations

import msgspec

from penstock.plan.resolve import Plan
from penstock.plan.stages import stage_groups


def rank_plan(plan: Plan, rank: int, per_stage: int) -> Plan:
    """The plan of one rank, of `per_stage` in each stage: groups with the layers that it has. Draft models run whole on
    every rank."""
    if not plan.stages:
        return plan
    stage, num_own = rank // per_stage, len(plan.own_groups)
    own = stage_groups(plan.groups[:num_own], range(plan.stages[stage], plan.stages[stage + 1]))
    return msgspec.structs.replace(plan, groups=(*own, *plan.groups[num_own:]))
