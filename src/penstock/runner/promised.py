"""Tokens that rows were promised: chosen in the step before, and run before the scheduler has heard of them."""

from __future__ import annotations

import msgspec

from penstock.core.batch import Appended, SchedulerOutput, StepOutput
from penstock.runner.logits.chain import LogitsChain
from penstock.runner.rows import RowStore


class Promises:
    """Makes a step's promised tokens known on the rank, and what the scheduler then says of them no news.

    Raises nothing: a promised token that commit tells another one is our own bug (AssertionError).
    """

    def __init__(self, rows: RowStore, chain: LogitsChain) -> None:
        self._rows, self._chain = rows, chain
        self._newest: StepOutput | None = None
        self._early: dict[int, int] = {}
        """Sequence -> a token that it has here, and of which the scheduler has not told yet."""

    def settled(self, result: StepOutput) -> None:
        """The step that ran last yielded this."""
        self._newest = result

    def heard(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step without what is known here already. Before its rows change."""
        if not self._early:
            return output
        for seq_id in output.removed:
            self._early.pop(seq_id, None)
        news: list[Appended] = []
        for told in output.appended:
            token = self._early.pop(told.seq_id, None)
            if token is not None:
                assert (told.token_ids[0], told.rollback) == (token, 0), f"{told}: it was promised token {token}"
                told = Appended(told.seq_id, told.token_ids[1:])
            if told.token_ids or told.rollback:
                news.append(told)
        return msgspec.structs.replace(output, appended=news)

    def keep(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step with promised tokens in their rows, and without rows that got none. Once its rows have changed.

        Mutates: rows, processors.
        """
        promised = [job for job in output.scheduled if job.start == self._rows[job.seq_id].num_tokens]
        if not promised:
            return output
        newest = self._newest
        chosen = {s.seq_id: s.token_ids for s in newest.sampled} if newest is not None else {}
        void: set[int] = set()
        for job in promised:
            tokens = chosen.get(job.seq_id)
            if tokens is None or len(tokens) != 1:
                void.add(job.seq_id)
                continue
            self._rows[job.seq_id].append(tokens, 0)
            self._chain.advance(job.seq_id, tokens)
            self._early[job.seq_id] = tokens[0]
        if not void:
            return output
        return msgspec.structs.replace(output, scheduled=[job for job in output.scheduled if job.seq_id not in void])
