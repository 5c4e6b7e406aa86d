"""Why things are as they are: decisions at start-up and counters while running."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from penstock.core.batch import StepOutput
from penstock.core.page_ops import DISK


class Decision(msgspec.Struct, frozen=True):
    """A value that Penstock chose, and why. `--explain` prints them."""

    name: str
    value: Any
    why: str


class PoolGrowth(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """How much of the KV memory there is from now on: what the machine said, logged with the intake.

    Attributes:
        num_slabs: slabs of each cache group that have memory behind them.
        is_short: there was too little; until the next one the pools are no larger than this.
        at_rest: nothing runs, and what is free behind the last slab in use was given back.
    """

    num_slabs: list[int]
    is_short: bool = False
    at_rest: bool = False


class StoreNews(msgspec.Struct, frozen=True, kw_only=True, tag=True, gc=False):
    """What a look at the store of blocks outside this process found, logged with the intake.

    Attributes:
        found: blocks that others have written: (path, bytes, an order by last use).
        gone: paths that others have removed.
        evicts: whether this process is the one that makes room there; None: as before.
        tier: which of several it is about (`page_ops.TIER_NAMES`).
        pins: beginnings of paths of blocks that leave after all others, from now on; None: as before.
        kept: paths of blocks that leave after all others for so many seconds from now on, as somebody has asked.
        read: what a trial of reading took: bytes, and seconds.
    """

    found: list[tuple[str, int, int]] = []
    gone: list[str] = []
    evicts: bool | None = None
    tier: int = DISK
    pins: list[str] | None = None
    kept: list[tuple[str, float]] = []
    read: tuple[int, float] | None = None


class Move(Decision, frozen=True, kw_only=True, tag=True, gc=False):
    """A knob of the scheduler gets another value while the engine runs (`sched.controller`), logged with the intake.

    Attributes:
        was: the value before.
    """

    was: Any = None


MachineNews = PoolGrowth | StoreNews | Move
"""What nobody has asked for: what the machine and the store say, and what adaptive mode does about the load."""


@dataclass
class ExpertCounts:
    """Experts that layers asked for, one a step and layer, where they are not all in memory."""

    num_expert_hits: int = 0
    num_expert_late: int = 0
    """On their way when they were asked for; `num_expert_misses`: not even that."""
    num_expert_misses: int = 0
    num_experts_ahead: int = 0
    """Fetched before anybody asked; `num_experts_foreseen`: those of them that were asked for then."""
    num_experts_foreseen: int = 0
    expert_read_bytes: int = 0
    expert_stall_s: float = 0.0
    """Seconds that steps waited for reads."""


EXPERT_COUNTS = tuple(f.name for f in fields(ExpertCounts))
RANK_COUNTS = ("num_exchanges", "num_rank_bytes", "num_wire_bytes", "rank_wait_s")
"""See `StepOutput.ranks`."""


@dataclass
class EngineStats(ExpertCounts):
    """Counters since start. Units: tokens, blocks or steps as named."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_sampled_tokens: int = 0
    num_prefix_queries_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_failed_loads: int = 0
    """Sequences that were computed again because what a tier brought back was not what it had been given."""
    num_kv_growths: int = 0
    """Times that more memory was taken for KV; `num_kv_refusals`: times that there was too little."""
    num_kv_refusals: int = 0
    num_recomputed_tokens: int = 0
    num_offline_tokens: int = 0
    """Of `num_scheduled_tokens`, those of offline work; `num_offline_preemptions`: times that some had to give way."""
    num_offline_preemptions: int = 0
    num_kv_events: int = 0
    """Events of KV blocks for subscribers; `num_dropped_kv_events`: those of them that found the queue full."""
    num_dropped_kv_events: int = 0
    num_forks: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_errors: int = 0
    peak_running: int = 0
    num_late_compilations: int = 0
    """Kernels compiled after the rank was ready, while streams waited."""
    num_chosen_tokens: int = 0
    """Tokens of a layer's kv head that were read because they were chosen; `num_choosable_tokens`: that were there."""
    num_choosable_tokens: int = 0
    num_keys_read: int = 0
    """Tokens of a layer's kv head that attention read; `num_keys_shared`: as many more, had none been shared."""
    num_keys_shared: int = 0
    num_exchanges: int = 0
    """Of the ranks of a model; `num_rank_bytes`: what they gave each other, counted once for each that got it;
    `num_wire_bytes`: that crossed a connection between hosts, with heads of frames."""
    num_rank_bytes: int = 0
    num_wire_bytes: int = 0
    rank_wait_s: float = 0.0
    """Seconds that ranks have waited for each other, of all of them together."""
    num_weight_bytes: int = 0
    """Of weights that were read while steps ran; `weight_wait_s`: seconds for which steps have waited for them."""
    weight_wait_s: float = 0.0
    num_moves: int = 0
    """Times that adaptive mode gave a knob another value."""
    num_weight_swaps: int = 0
    """Other weights taken up; `weight_swap_s`: seconds for which nothing ran meanwhile."""
    weight_swap_s: float = 0.0
    num_grammar_hits: int = 0
    num_grammar_misses: int = 0
    grammar_bytes: int = 0
    num_adapters_wanted: int = 0
    """Times that a row needed an adapter; `num_adapter_hits`: it was in memory; `num_adapters_given_up`: for others;
    `adapter_wait_s`: seconds that steps waited for those that were not."""
    num_adapter_hits: int = 0
    num_adapters_given_up: int = 0
    adapter_wait_s: float = 0.0
    num_drafts: int = 0
    """Rows whose drafts were verified (vLLM's word)."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefill_s: float = 0.0
    """Seconds of steps that prompts owe, and `decode_s` those of decoding (`sched.costs`); together all steps'."""
    decode_s: float = 0.0
    num_spec_steps: int = 0
    """Steps in which somebody had room for drafts; `draft_s`, `spec_step_s`: seconds of their drafters, and in all."""
    draft_s: float = 0.0
    spec_step_s: float = 0.0
    spec_compared_s: float = 0.0
    """Steps with drafts that can be compared with plain ones; `spec_plain_s`: what plain ones would have taken for
    their tokens (`engine.gain`)."""
    spec_plain_s: float = 0.0
    accepted_at: list[int] = field(default_factory=list)
    """accepted_at[d]: how often the draft at depth d + 1 was accepted (a row accepts one at each depth, or none)."""

    def ran(self, result: StepOutput) -> None:
        """A step that has run. Mutates: self."""
        for name, num in zip(RANK_COUNTS, result.ranks, strict=True):
            setattr(self, name, getattr(self, name) + num)
        self.num_keys_read, self.num_keys_shared = (
            self.num_keys_read + result.keys[0], self.num_keys_shared + result.keys[1]
        )  # fmt: skip
        for name, more in zip(EXPERT_COUNTS, result.experts, strict=False):
            setattr(self, name, getattr(self, name) + more)
        if result.adapters is not None:
            self.num_adapters_wanted, self.num_adapter_hits, self.num_adapters_given_up, self.adapter_wait_s = (
                result.adapters
            )
        self.num_late_compilations += result.num_late
        self.num_chosen_tokens += result.chosen[0]
        self.num_choosable_tokens += result.chosen[1]
        self.num_weight_bytes += result.weights[0]
        self.weight_wait_s += result.weights[1]

    def counters(self) -> dict[str, float]:
        """All of them as flat numbers; `accepted_at` as num_accepted_at_0, num_accepted_at_1, ..."""
        flat = {name: float(value) for name, value in vars(self).items() if name != "accepted_at"}
        return flat | {f"num_accepted_at_{d}": float(n) for d, n in enumerate(self.accepted_at)}
