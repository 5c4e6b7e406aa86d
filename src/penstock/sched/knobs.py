"""Settings of the scheduler that may change between two steps, without a restart: read and set by their names.

What a knob may be lies between what it can mean at all and what the engine was started with: memory of the rank is for
`max_num_seqs` sequences and `max_num_batched_tokens` tokens, so a knob never goes beyond these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.sched.drafts.limit import DraftLimit
from penstock.sched.policy import make_policy

if TYPE_CHECKING:
    from penstock.sched.scheduler import Scheduler


class Bounds(NamedTuple):
    """What a number may be, both ends included."""

    least: float
    most: float


class Knobs:
    """Mutates: the scheduler. `set` is called between two steps only, by what is in the log of a run.

    Attributes:
        frozen: nobody but a log moves one, until somebody says otherwise.
        bounds: of the knobs that are numbers.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._policy = scheduler.policy.name
        self.frozen = False
        block, tokens, seqs = scheduler.block_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        self.bounds = {
            "max_num_seqs": Bounds(1, seqs),
            "schedule_conservativeness": Bounds(0.25, 2.0),
        }
        if scheduler.chunked_prefill:  # else a step must hold the longest prompt
            self.bounds["max_num_batched_tokens"] = Bounds(min(block, tokens), tokens)
            if scheduler.long_prefill_token_threshold == 0:  # else windows have memory for pieces of that size alone
                self.bounds["long_prefill_token_threshold"] = Bounds(0, tokens)
        if scheduler.clockwork is not None:
            self.bounds["decode_step_ms"] = Bounds(10.0, 1000 * scheduler.prefill_step_s)
        self._drafts: DraftLimit | None = None

    def limit_drafts(self, most: int) -> None:
        """Whoever drafts makes `most` drafts at most: the knob `num_speculative_tokens`."""
        if self._scheduler.drafts is not None:
            self.bounds["num_speculative_tokens"] = Bounds(0, most)
            self._scheduler.drafts = self._drafts = DraftLimit(self._scheduler.drafts, most)

    @property
    def names(self) -> tuple[str, ...]:
        return ("scheduling_policy", *self.bounds)

    def values(self) -> dict[str, Any]:
        """All of them, as they are."""
        s = self._scheduler
        known: dict[str, Callable[[], Any]] = {
            "scheduling_policy": lambda: self._policy,
            "max_num_batched_tokens": lambda: s.max_num_batched_tokens,
            "long_prefill_token_threshold": lambda: s.long_prefill_token_threshold,
            "max_num_seqs": lambda: s.max_num_seqs,
            "schedule_conservativeness": lambda: s.reserve.conservativeness,
            "decode_step_ms": lambda: round(1000 * s.decode_step_s, 3),
            "num_speculative_tokens": lambda: 0 if self._drafts is None else self._drafts.most,
        }
        return {name: known[name]() for name in self.names}

    def set(self, name: str, value: Any) -> None:
        """A number beyond its bounds becomes the nearest one within. Raises ConfigError for an unknown policy, KeyError
        for an unknown knob."""
        s = self._scheduler
        if name == "scheduling_policy":
            policy, self._policy = make_policy(value), value
            if s.offline is None:
                s.policy = policy
            else:
                s.offline.take(policy)
            s.waiting.sort(key=s.policy.key)
            s.running.sort(key=s.policy.key)
            return
        least, most = self.bounds[name]
        number = min(most, max(least, value))
        if name == "schedule_conservativeness":
            s.reserve.scale(number)
        elif name == "decode_step_ms":
            s.decode_step_s = number / 1000
        elif name == "num_speculative_tokens":
            assert self._drafts is not None, "the knob is there"
            self._drafts.most = int(number)
        else:
            setattr(s, name, int(number))
