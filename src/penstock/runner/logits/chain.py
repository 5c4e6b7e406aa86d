"""All processors of a rank, as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.core.batch import AddedRow, SchedulerOutput
from penstock.core.protocols import LogitsProcessor
from penstock.runner.logits import LOGITS_PROCESSORS, ORDER
from penstock.runner.logits.base import F32

if TYPE_CHECKING:
    from penstock.runner.logits.grammar_cache import GrammarCache


class LogitsChain:
    """Feeds row changes to the processors that follow the row, and applies them in `runner.logits.ORDER`."""

    def __init__(self, vocab_size: int, grammars: GrammarCache | None = None) -> None:
        """`grammars`: what rows with a grammar need besides."""
        needs = {"grammar": (grammars,)}
        self.processors: tuple[LogitsProcessor, ...] = tuple(
            LOGITS_PROCESSORS.get(name)(vocab_size, *needs.get(name, ())) for name in ORDER
        )
        self._followers: dict[int, tuple[LogitsProcessor, ...]] = {}

    def follows(self, seq_id: int) -> bool:
        """Whether any processor may change this row's logits. If not, raw logits are final."""
        return seq_id in self._followers

    def follows_any(self, seq_ids: Iterable[int]) -> bool:
        """`follows` of one of these at least."""
        return bool(self._followers) and not self._followers.keys().isdisjoint(seq_ids)

    def track(self, output: SchedulerOutput) -> None:
        """The row lists of a step, in the order that `core.batch` lays down. Mutates: every processor's state."""
        for fork in output.forked:
            followers = self._followers.get(fork.parent_id)
            if followers is not None:
                for processor in followers:
                    processor.fork(fork.parent_id, fork.child_id)
                self._followers[fork.child_id] = followers
        for seq_id in output.removed:
            for processor in self._followers.pop(seq_id, ()):
                processor.remove(seq_id)
        for added in output.added:
            self._add(added)
        for appended in output.appended:
            for processor in self._followers.get(appended.seq_id, ()):
                processor.rollback(appended.seq_id, appended.rollback)
                processor.advance(appended.seq_id, appended.token_ids)

    def advance(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """As if the row had got these tokens, until `rollback` takes them back. Mutates: its processors."""
        for processor in self._followers.get(seq_id, ()):
            processor.advance(seq_id, token_ids)

    def rollback(self, seq_id: int, n: int) -> None:
        """The newest `n` tokens of `advance` never happened. Mutates: its processors' states."""
        for processor in self._followers.get(seq_id, ()):
            processor.rollback(seq_id, n)

    def apply(self, logits: F32, seq_ids: Sequence[int]) -> None:
        """Mutates `logits` [R, V] in place; row r belongs to `seq_ids[r]`."""
        # An overflow here is one row's own extreme numbers; the sampler sees the infinity and fails that row alone.
        with np.errstate(over="ignore", invalid="ignore"):
            for processor in self.processors:
                processor.apply(logits, seq_ids)

    def exhausted(self, seq_id: int) -> str | None:
        """See the protocol: of the first that knows."""
        for processor in self._followers.get(seq_id, ()):
            why = processor.exhausted(seq_id)
            if why is not None:
                return why
        return None

    def _add(self, op: AddedRow) -> None:
        prompt, output = op.token_ids[: op.prompt_len], op.token_ids[op.prompt_len :]
        followers = tuple(p for p in self.processors if p.add(op.seq_id, op.rules, prompt, output))
        if followers:
            self._followers[op.seq_id] = followers
