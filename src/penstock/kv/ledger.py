"""Who lent how many blocks to whom: the debts of sequences to ranks that are not their home.

Two books. The debtors' one says of each sequence how many blocks it has on every rank; the creditors' one says of each
rank how many of its blocks sequences of every other home have. Each entry is made in both, and the audit counts the
tables again: what is lent is what is borrowed, and a sequence that is gone owes nothing.

A block that several sequences share is lent to each of them: it cannot be taken back before all have given it up. What
only the prefix cache has is its rank's own, and nobody's debt.

Source: Lin et al., Infinite-LLM, arXiv 2401.02669, section 5 (rBlocks, the gManager's debt ledger).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class Ledger:
    """For `size` ranks; integers only."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_borrowed = 0
        """Blocks that were borrowed since start, one for each sequence that got one."""
        self._homes: dict[int, int] = {}
        self._held: dict[int, list[int]] = {}
        self._lent = [[0] * size for _ in range(size)]

    def home(self, seq_id: int) -> int:
        """Where a sequence's blocks go as long as there is room."""
        return self._homes[seq_id]

    def enter(self, seq_id: int, home: int, ranks: Iterable[int]) -> None:
        """A sequence has blocks from now on, those that it begins with on `ranks`."""
        assert seq_id not in self._homes, f"sequence {seq_id} stands in the ledger already"
        self._homes[seq_id] = home
        self._held[seq_id] = [0] * self.size
        self.take(seq_id, ranks)

    def take(self, seq_id: int, ranks: Iterable[int]) -> None:
        """It has got a block on each of `ranks`."""
        home, held = self._homes[seq_id], self._held[seq_id]
        for rank in ranks:
            held[rank] += 1
            if rank != home:
                self._lent[rank][home] += 1
                self.num_borrowed += 1

    def give_back(self, seq_id: int, ranks: Iterable[int]) -> None:
        """It has a block less on each of `ranks`."""
        home, held = self._homes[seq_id], self._held[seq_id]
        for rank in ranks:
            held[rank] -= 1
            assert held[rank] >= 0, f"sequence {seq_id} gives back more than it has of rank {rank}"
            if rank != home:
                self._lent[rank][home] -= 1

    def leave(self, seq_id: int) -> None:
        """A sequence gives back all it has; nothing happens if it stands here no more."""
        home = self._homes.pop(seq_id, None)
        if home is None:
            return
        for rank, count in enumerate(self._held.pop(seq_id)):
            if rank != home:
                self._lent[rank][home] -= count

    def lent(self, rank: int) -> int:
        """Blocks of `rank` that sequences of other homes have."""
        return sum(self._lent[rank])

    def borrowed(self, rank: int) -> int:
        """Blocks of other ranks that the sequences of home `rank` have, by the debtors' book."""
        return sum(
            sum(held) - held[rank] for seq_id, held in self._held.items() if self._homes[seq_id] == rank
        )  # fmt: skip

    @property
    def debts(self) -> list[tuple[int, int, int, int]]:
        """(sequence, home, lender, blocks) of everything that is owed, in order of sequences."""
        return [
            (seq_id, home, rank, count)
            for seq_id, home in sorted(self._homes.items())
            for rank, count in enumerate(self._held[seq_id]) if count and rank != home
        ]  # fmt: skip

    def check_invariants(self, tables: Mapping[int, Sequence[int]]) -> None:
        """`tables`: of each sequence that has memory, the rank of each of its blocks.

        Raises AssertionError, with what is wrong, unless both books say what the tables do.
        """
        gone = self._homes.keys() - tables.keys()
        assert not gone, f"sequences {sorted(gone)} own nothing and stand in the ledger"
        missing = tables.keys() - self._homes.keys()
        assert not missing, f"sequences {sorted(missing)} have blocks and do not stand in the ledger"
        owed: Counter[tuple[int, int]] = Counter()
        for seq_id, ranks in tables.items():
            counted = Counter(ranks)
            held = [counted[rank] for rank in range(self.size)]
            assert held == self._held[seq_id], (
                f"sequence {seq_id} has {held} blocks, its book says {self._held[seq_id]}"
            )
            home = self._homes[seq_id]
            owed.update({(rank, home): count for rank, count in counted.items() if rank != home})
        for rank, row in enumerate(self._lent):
            for home, count in enumerate(row):
                due = owed[rank, home]
                assert count == due, f"rank {rank} has lent {count} blocks to rank {home}, which owes {due}"
        lent, borrowed = sum(map(self.lent, range(self.size))), sum(map(self.borrowed, range(self.size)))
        assert lent == borrowed, f"{lent} blocks are lent, {borrowed} are borrowed"
