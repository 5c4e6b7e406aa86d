"""What a rank remembers of each sequence: tokens, rules and block tables. Changed only by a SchedulerOutput's lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from penstock.core.batch import AddedRow, Appended, Fork, ScheduledRow, SchedulerOutput, TableUpdate
from penstock.core.cache_spec import CacheGroup
from penstock.core.sampling import TokenRules
from penstock.ops.plan import I32
from penstock.runner.placed import PlacedTable
from penstock.runner.tables import RowTable


class Row:
    """One sequence on the rank. `tokens` is [num_tokens] and `tables` has one entry per cache group."""

    __slots__ = ("_buffer", "greedy", "known", "num_tokens", "prompt_len", "rules", "sample_index", "tables")

    def __init__(
        self, tokens: I32, prompt_len: int, rules: TokenRules, sample_index: int, tables: tuple[RowTable, ...]
    ) -> None:
        self.num_tokens = len(tokens)
        # Room for some answers at once: most rows grow by a token per step.
        self._buffer: I32 = np.empty(self.num_tokens + 64, np.int32)
        self._buffer[: self.num_tokens] = tokens
        self.known = self._buffer.data
        """The tokens and what room there is behind them: single ones are read and written faster here than in numpy."""
        self.prompt_len = prompt_len
        self.rules = rules
        self.greedy = rules.greedy and rules.num_logprobs < 0
        """Of its logits only the largest is wanted, once no processor changes them."""
        self.sample_index = sample_index
        self.tables = tables

    @property
    def tokens(self) -> I32:
        """Known tokens [num_tokens]: a view, valid until the next append."""
        return self._buffer[: self.num_tokens]

    @property
    def shift(self) -> int:
        """Tokens that every line of the row has dropped, where all drop the same."""
        gone = self.tables[0].dropped
        return 0 if gone is None else int(gone[0])

    def append(self, token_ids: Sequence[int], rollback: int) -> None:
        """Drop the newest `rollback` tokens, then add `token_ids`. Mutates: self."""
        kept = self.num_tokens - rollback
        if len(token_ids) == 1 and not rollback and kept < len(self.known):  # nearly always
            self.known[kept] = token_ids[0]
            self.num_tokens = kept + 1
            return
        assert self.prompt_len <= kept <= self.num_tokens, f"rollback of {rollback} reaches into the prompt"
        end = kept + len(token_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[:kept] = self._buffer[:kept]
            self._buffer = grown
            self.known = grown.data
        self._buffer[kept:end] = token_ids
        self.num_tokens = end


class RowStore:
    """All rows of a rank, by sequence id.

    An unknown id, a token outside the vocabulary or a block outside its pool is our own bug, hence an AssertionError:
    what users write has been checked long before.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], num_slabs: Sequence[int], block_size: int, vocab_size: int, rank: int = 0
    ) -> None:
        """`rank`: its number, where blocks lie on one of several (`runner.placed`)."""
        self.groups = groups
        self.num_slabs = tuple(num_slabs)
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._rank = rank
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._rows

    def __getitem__(self, seq_id: int) -> Row:
        assert seq_id in self._rows, f"sequence {seq_id} is not on this rank"
        return self._rows[seq_id]

    def entered(self) -> list[AddedRow]:
        """All of them, as if they entered now."""
        return [
            AddedRow(seq_id, row.sample_index, row.tokens.tolist(), row.prompt_len, row.rules)
            for seq_id, row in self._rows.items()
        ]

    def apply(self, output: SchedulerOutput) -> None:
        """The row lists of a step, in the order that `core.batch` lays down. Mutates: self."""
        for fork in output.forked:
            self.fork(fork)
        for seq_id in output.removed:
            self.remove(seq_id)
        for added in output.added:
            self.add(added)
        for appended in output.appended:
            self.append(appended)
        self.update_tables(output.tables)

    def fork(self, op: Fork) -> None:
        """The child copies tokens and rules. Its tables start empty: sharing blocks is the scheduler's decision."""
        parent = self[op.parent_id]
        self._insert(op.child_id, parent.tokens, parent.prompt_len, parent.rules, op.sample_index)

    def remove(self, seq_id: int) -> None:
        assert seq_id in self._rows, f"sequence {seq_id} is not on this rank"
        del self._rows[seq_id]

    def add(self, op: AddedRow) -> None:
        assert 0 < op.prompt_len <= len(op.token_ids), f"sequence {op.seq_id}: prompt of {op.prompt_len} tokens"
        self._check_tokens(op.seq_id, op.token_ids)
        self._insert(op.seq_id, np.asarray(op.token_ids, np.int32), op.prompt_len, op.rules, op.sample_index)

    def append(self, op: Appended) -> None:
        self._check_tokens(op.seq_id, op.token_ids)
        self[op.seq_id].append(op.token_ids, op.rollback)

    def update_tables(self, updates: Iterable[TableUpdate]) -> None:
        touched: list[RowTable] = []
        for op in updates:
            assert 0 <= op.group < len(self.groups), f"{op}: no such cache group"
            table = self[op.seq_id].tables[op.group]
            table.update(op.start, op.ids, op.layer, op.dropped)
            touched.append(table)
        for table in touched:
            table.settle()

    def num_blocks(self, group: int, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens; a slot group's state is one block whatever the length."""
        if not self.groups[group].spec.per_token:
            return 1
        return -(-num_tokens // self.block_size)

    def check_writes(self, scheduled: Iterable[ScheduledRow]) -> None:
        """No page that a scheduled row is about to write is in use by any other row, and whatever it may look at is
        there (else AssertionError).

        Costs a walk over every table: for tests.
        """
        for g, group in enumerate(self.groups):
            if not group.layers:  # they are on other stages
                continue
            owner: dict[int, int] = {}
            for job in scheduled:
                end = self.num_blocks(g, job.start + job.num_tokens + job.num_drafts)
                table = self[job.seq_id].tables[g]
                if table.dropped is not None:
                    for page in self._written(table, job):
                        other = owner.setdefault(page, job.seq_id)
                        assert other == job.seq_id, (
                            f"group {g}: sequences {other} and {job.seq_id} both write page {page}"
                        )
                    continue
                seen = table.pages(group.spec.first_block(job.start, self.block_size), end)
                assert seen.min() >= 0, f"group {g}: sequence {job.seq_id} would look at blocks that are gone"
                first = job.start // self.block_size if group.spec.per_token else 0
                for page in table.pages(first, end).tolist():
                    other = owner.setdefault(page, job.seq_id)
                    assert other == job.seq_id, f"group {g}: sequences {other} and {job.seq_id} both write page {page}"
            for seq_id, row in self._rows.items():
                table = row.tables[g]
                for page in self._used(table, self.num_blocks(g, row.num_tokens), row.num_tokens):
                    writer = owner.get(page, seq_id)  # nobody writes negative ones
                    assert writer == seq_id, f"group {g}: sequence {writer} writes page {page} of sequence {seq_id}"

    def _written(self, table: RowTable, job: ScheduledRow) -> list[int]:
        """Pages that a row writes whose lines have dropped tokens."""
        assert table.dropped is not None
        pages: list[int] = []
        for line, dropped in enumerate(table.dropped.tolist()):
            first, end = job.start - dropped, job.start + job.num_tokens - dropped
            pages += table.pages_of(line, first // self.block_size, -(-end // self.block_size)).tolist()
        return pages

    def _used(self, table: RowTable, num_blocks: int, num_tokens: int) -> list[int]:
        if table.dropped is None:
            pages: list[int] = table.pages(0, min(num_blocks, table.num_blocks)).tolist()
            return pages
        used: list[int] = []
        for line, dropped in enumerate(table.dropped.tolist()):
            end = min(-(-(num_tokens - dropped) // self.block_size), table.line_blocks(line))
            used += table.pages_of(line, 0, end).tolist()
        return used

    def _insert(self, seq_id: int, tokens: I32, prompt_len: int, rules: TokenRules, sample_index: int) -> None:
        assert seq_id not in self._rows, f"sequence {seq_id} is on this rank already"
        tables = tuple(
            PlacedTable(g.pages_per_slab, n, self._rank % g.spec.ranks, g.spec.ranks) if g.spec.whole
            else RowTable(g.pages_per_slab, n, window=g.spec.window is not None)
            for g, n in zip(self.groups, self.num_slabs, strict=True)
        )  # fmt: skip
        self._rows[seq_id] = Row(tokens, prompt_len, rules, sample_index, tables)

    def _check_tokens(self, seq_id: int, token_ids: Sequence[int]) -> None:
        if len(token_ids) == 1:
            assert 0 <= token_ids[0] < self.vocab_size, f"sequence {seq_id}: token {token_ids[0]} outside [0, V)"
        elif token_ids:
            low, high = min(token_ids), max(token_ids)
            assert 0 <= low <= high < self.vocab_size, f"sequence {seq_id}: tokens {low}...{high} outside [0, V)"
