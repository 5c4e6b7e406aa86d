"""Orders of prompts by their shared beginnings, and who would compute the same block twice."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from penstock.core.sequence import Sequence, Status

MAX_STALE = 64
"""Sequences that no longer wait are skipped over; more than so many are taken out."""


def kinship(seq: Sequence) -> tuple[bytes, str]:
    """Blocks are shared among requests with the same of these only."""
    return (seq.request.namespace, seq.request.taint)


class DepthFirst:
    """Keeps waiting sequences in depth-first order of the radix tree of their tokens.

    Sorting by tokens *is* that order: all that share a beginning stand together. Sorted when somebody joins, O(n log n)
    comparisons; other steps cost one look at every waiting sequence.
    """

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self._in_line: set[int] = set()

    def walk(self, waiting: Seq[Sequence]) -> Iterator[Sequence]:
        """All of `waiting` that may run, in order."""
        stale = 0
        for seq in self._line:
            if seq.status is Status.WAITING:
                break
            stale += 1
        joined = [seq for seq in waiting if seq.seq_id not in self._in_line]
        if joined or stale > MAX_STALE:
            self._line = [seq for seq in self._line if seq.status is Status.WAITING] + joined
            self._in_line = {seq.seq_id for seq in self._line}
            if joined:
                self._line.sort(key=lambda s: (*kinship(s), s.token_ids.tobytes(), s.arrival, s.index))
        return (seq for seq in self._line if seq.status is Status.WAITING and not seq.held)


class NextBlocks:
    """Blocks that are being computed or about to be: each is known by all tokens up to its end."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._taken: set[tuple[bytes, str, bytes]] = set()

    def _path(self, seq: Sequence, start: int) -> tuple[bytes, str, bytes]:
        return (*kinship(seq), seq.token_ids[: start + self._block_size].tobytes())

    def add(self, seq: Sequence, start: int) -> None:
        """`seq` computes its block from token `start` on, unless that one is not full or enters no cache."""
        if start + self._block_size <= _limit(seq, seq.num_known):
            self._taken.add(self._path(seq, start))

    def follows(self, seq: Sequence, start: int) -> bool:
        """Whether somebody else computes the block from `start` on, and `seq` could take it from the cache then."""
        if not self._taken or not seq.request.reads_cache:
            return False
        # At least one known token is left to be computed.
        return start + self._block_size <= _limit(seq, seq.num_known - 1) and self._path(seq, start) in self._taken


def _limit(seq: Sequence, num_tokens: int) -> int:
    return num_tokens if seq.taint_start is None else min(num_tokens, seq.taint_start)
