"""Draft models in a plan: their layers are further cache groups of every sequence, paid from the same pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from penstock.base.errors import CapacityError, ConfigError
from penstock.core.cache_spec import CacheGroup, group_layers, without_windows
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights
from penstock.core.machine import Machine
from penstock.core.model_spec import EntryAttention, ModelSpec, cache_spec
from penstock.plan.memory import gib
from penstock.plan.weights import NO_CODES, StoredFormats


class NamedSpec(NamedTuple):
    """A draft model as the user calls it, what it computes, and what its checkpoint stores as codes."""

    name: str
    spec: ModelSpec
    stored: StoredFormats = NO_CODES


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One draft model. `groups`: indices in `Plan.groups` of those that are its own; `max_len`: positions it runs, so
    that a longer sequence goes on without its drafts. Units: bytes, tokens."""

    name: str
    groups: tuple[int, ...]
    held: HeldWeights
    weight_bytes: int
    max_len: int

    @property
    def dtype(self) -> str:
        """Of its weights that are no codes."""
        return self.held.dtype


def plan_drafts(
    drafts: Sequence[NamedSpec], groups: tuple[CacheGroup, ...], *, held: Sequence[HeldWeights], kv_dtype: str,
    max_model_len: int,
) -> tuple[tuple[CacheGroup, ...], tuple[DraftPlan, ...], list[Decision]]:  # fmt: skip
    """`groups` of the target model with those of its draft models behind them, and why.

    Windows of a draft model keep all their blocks: it catches up with what the prefix cache holds from the beginning.
    Raises ConfigError for a draft model with a recurrent state, which could not take back a rejected draft.
    """
    plans: list[DraftPlan] = []
    decisions: list[Decision] = []
    for i, ((name, spec, _), weights) in enumerate(zip(drafts, held, strict=True)):
        specs = [cache_spec(layer, kv_dtype) for layer in spec.layers]
        if any(s is not None and not s.per_token for s in specs):
            raise ConfigError(
                f"speculative_config: model: {name} has layers with a recurrent state, which cannot take back a "
                "rejected draft; use a draft model of attention layers only",
                field="speculative_config",
            )
        if any(isinstance(layer.mixer, EntryAttention) for layer in spec.layers):
            raise ConfigError(
                f"speculative_config: model: {name} has layers with several caches, which a draft model cannot have; "
                "use one of plain attention layers",
                field="speculative_config",
            )
        first = len(groups)
        own = [CacheGroup(first + g.index, g.spec, g.layers) for g in without_windows(group_layers(specs))]
        groups = (*groups, *own)
        weight_bytes = weights.num_bytes(spec)
        indices, max_len = tuple(g.index for g in own), min(max_model_len, spec.max_position)
        plans.append(DraftPlan(name=name, groups=indices, held=weights, weight_bytes=weight_bytes, max_len=max_len))
        decisions += _decisions(plans[-1], own, max_model_len, "" if len(drafts) == 1 else f"[{i}]")
    return groups, tuple(plans), decisions


def _decisions(plan: DraftPlan, own: Sequence[CacheGroup], max_model_len: int, number: str) -> list[Decision]:
    layers = sum(len(g.layers) for g in own)
    why = (
        f"weights {gib(plan.weight_bytes)} as {plan.dtype}; its {layers} layers are cache group "
        f"{', '.join(map(str, plan.groups))} of every sequence and take {gib(sum(g.slab_bytes(1) for g in own))} per "
        "token, from the same pool"
    )
    out = [Decision(f"draft_model{number}", plan.name, why)]
    if plan.max_len < max_model_len:
        why = "the draft model was made for no more positions; beyond them a sequence goes on without its drafts"
        out.append(Decision(f"draft_max_len{number}", plan.max_len, why))
    return out


def check_draft_weights(weight_bytes: int, plans: Sequence[DraftPlan], machine: Machine) -> int:
    """Bytes of all weights, `weight_bytes` of the target's included.

    Raises CapacityError if those of the draft models do not fit beside them.
    """
    more = sum(plan.weight_bytes for plan in plans)
    if plans and weight_bytes + more > machine.available_bytes:
        names = ", ".join(plan.name for plan in plans)
        raise CapacityError(
            f"speculative_config: model: the weights of {names} take {gib(more)} beside the {gib(weight_bytes)} of the "
            f"model itself, but only {gib(machine.available_bytes)} of memory are available; use a smaller draft model",
            field="speculative_config",
        )
    return weight_bytes + more
