"""Tokens that rows were promised: chosen in a step before, and run before the scheduler has heard of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from penstock.core.batch import Appended, SchedulerOutput, StepOutput
from penstock.runner.logits.chain import LogitsChain
from penstock.runner.rows import RowStore

_STAND_IN = (0,)


class Promises:
    """Makes a step's promised tokens known on the rank, and what the scheduler then says of them no news.

    Raises nothing: a promised token that commit tells another one is our own bug (AssertionError).
    """

    def __init__(self, rows: RowStore, chain: LogitsChain) -> None:
        self._rows, self._chain = rows, chain
        self._chosen: dict[int, list[int]] = {}
        """Sequence -> what a step has chosen for it that its row does not have yet."""
        self._early: dict[int, int] = {}
        """Sequence -> a token that it has here, and of which the scheduler has not told yet."""
        self.late: list[int] = []
        """Rows that `keep` gave a stand-in for a token."""

    def follow(self, other: Promises) -> None:
        """The rows are those of another rank, which has told them of these tokens."""
        self._chosen, self._early = other._chosen, other._early

    def settled(self, result: StepOutput) -> None:
        """The step that ran last yielded this."""
        for sampled in result.sampled:
            self._chosen[sampled.seq_id] = sampled.token_ids

    def heard(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step without what is known here already. Before its rows change."""
        if not self._early and not self._chosen:
            return output
        for seq_id in output.removed:
            self._early.pop(seq_id, None)
            self._chosen.pop(seq_id, None)
        news: list[Appended] = []
        for told in output.appended:
            token = self._early.pop(told.seq_id, None)
            if token is not None:
                assert (told.token_ids[0], told.rollback) == (token, 0), f"{told}: it was promised token {token}"
                told = Appended(told.seq_id, told.token_ids[1:])
            if told.token_ids or told.rollback:
                self._chosen.pop(told.seq_id, None)
                news.append(told)
        return msgspec.structs.replace(output, appended=news)

    def keep(self, output: SchedulerOutput, lying: Mapping[int, int] | None = None) -> SchedulerOutput:
        """The step with promised tokens in their rows, and without rows that got none. Once its rows have changed.

        `lying`: if the step before has not been read, the sequences for which it chooses a token.
        Mutates: rows, processors.
        """
        promised = [job.seq_id for job in output.scheduled if job.start == self._rows[job.seq_id].num_tokens]
        if not promised:
            return output
        if lying:
            self.late = [seq_id for seq_id in promised if seq_id in lying]
            for seq_id in self.late:
                self._rows[seq_id].append(_STAND_IN, 0)
            promised = [seq_id for seq_id in promised if seq_id not in lying]
        void = self._take(promised)
        if not void:
            return output
        return msgspec.structs.replace(output, scheduled=[job for job in output.scheduled if job.seq_id not in void])

    def read(self, late: Sequence[int]) -> set[int]:
        """The step that these rows wait for is settled: their tokens, in place of the stand-ins. Returns those that got
        none, and are as they were. Mutates: rows, processors."""
        for seq_id in late:
            self._rows[seq_id].append((), 1)
        return self._take(late)

    def _take(self, seq_ids: Sequence[int]) -> set[int]:
        void: set[int] = set()
        for seq_id in seq_ids:
            tokens = self._chosen.pop(seq_id, None)
            if tokens is None or len(tokens) != 1:
                void.add(seq_id)
                continue
            self._rows[seq_id].append(tokens, 0)
            self._chain.advance(seq_id, tokens)
            self._early[seq_id] = tokens[0]
        return void
