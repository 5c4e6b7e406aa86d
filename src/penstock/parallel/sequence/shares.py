"""Which rank computes which token of a step, and which one keeps its keys and values.

Shape letters: T new tokens of a sequence in a step, G kv heads, D components.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.base.bf16 import F32
from penstock.base.errors import CapacityError
from penstock.ops.plan import I32

Layout = Callable[[int, int, int], I32]
"""(first position, T, number of ranks) -> whose each new token is [T], as places in the list of ranks."""


def contiguous(first: int, count: int, size: int) -> I32:
    """Runs of neighbours (Li et al., arXiv 2105.13120, section 3)."""
    return (np.arange(count) * size // count).astype(np.int32) if count >= size else striped(first, count, size)


def striped(first: int, count: int, size: int) -> I32:
    """In turns (Brandon et al., arXiv 2311.09431, section 3): every rank has early and late tokens."""
    return ((first + np.arange(count)) % size).astype(np.int32)


def zigzag(first: int, count: int, size: int) -> I32:
    """Two runs a rank, the i-th from the front and from the back (Yang et al., arXiv 2411.01783, section 3.5.1)."""
    if count < 2 * size:
        return striped(first, count, size)
    run = (np.arange(count) * 2 * size // count).astype(np.int32)
    return np.minimum(run, 2 * size - 1 - run)


LAYOUTS: dict[str, Layout] = {"contiguous": contiguous, "striped": striped, "zigzag": zigzag}


@dataclass(frozen=True)
class SeqShare:
    """One sequence in one step. Of every rank, ascending positions: `held`, cached before; `rows`, that it computes;
    `kept`, of the new ones, that it will have cached. All ranks know all of it, so positions are never sent."""

    seq: Any
    held: tuple[I32, ...]
    rows: tuple[I32, ...]
    kept: tuple[I32, ...]
    end: int

    def block(self, rank: int) -> I32:
        """Positions of the keys that a rank can give in this step: those it had, and those it makes."""
        return np.concatenate([self.held[rank], self.rows[rank]])


class Holders:
    """Who keeps the tokens of every sequence: the same on all ranks, without a word between them."""

    def __init__(self, size: int, capacity: int | None, by_heads: bool) -> None:
        """`capacity`: tokens that a rank has room for, of all heads. `by_heads`: each rank keeps every token of its
        part of the heads."""
        self._size, self._capacity, self._by_heads = size, capacity, by_heads
        self._held: dict[Any, tuple[I32, ...]] = {}

    def ranks(self, seq: Any) -> list[int]:
        """Those that keep something of a sequence."""
        return [rank for rank, held in enumerate(self._of(seq)) if len(held)]

    def num_tokens(self, seq: Any) -> int:
        held = self._of(seq)
        return len(held[self.ranks(seq)[0]]) if self._by_heads and self.ranks(seq) else sum(map(len, held))

    def share(self, seq: Any, count: int, computing: Sequence[int], keeping: Sequence[int], layout: Layout) -> SeqShare:
        """`count` new tokens, computed by some ranks and kept by some. With the same ranks for both, whoever computes
        a token keeps it."""
        first, held = self.num_tokens(seq), self._of(seq)
        at = np.arange(first, first + count, dtype=np.int32)

        def of(ranks: Sequence[int]) -> tuple[I32, ...]:
            whose = np.array(ranks, np.int32)[layout(first, count, len(ranks))]
            return tuple(at[whose == rank] for rank in range(self._size))

        rows = of(computing)
        if self._by_heads:
            all_of_it = tuple(at if rank in computing else at[:0] for rank in range(self._size))
            return SeqShare(seq, held, rows, all_of_it, first + count)
        return SeqShare(seq, held, rows, rows if list(keeping) == list(computing) else of(keeping), first + count)

    def check_room(self, shares: Sequence[SeqShare]) -> None:
        """Raises CapacityError if a rank has no room for what the step gives it to keep."""
        if self._capacity is None:
            return
        for rank in range(self._size):
            held = sum(len(ranks[rank]) for ranks in self._held.values()) + sum(len(s.kept[rank]) for s in shares)
            parts = max(1, sum(1 for kept in shares[0].kept if len(kept))) if self._by_heads and shares else 1
            if -(-held // parts) > self._capacity:
                raise CapacityError(
                    f"rank {rank} would keep {-(-held // parts)} tokens and has room for {self._capacity}; use more "
                    "ranks or shorter texts", field="capacity",
                )  # fmt: skip

    def keep(self, shares: Sequence[SeqShare]) -> None:
        """The step is done. Mutates: self."""
        for share in shares:
            pairs = zip(share.held, share.kept, strict=True)
            self._held[share.seq] = tuple(np.concatenate(pair) for pair in pairs)

    def forget(self, seq: Any) -> None:
        self._held.pop(seq, None)

    def _of(self, seq: Any) -> tuple[I32, ...]:
        return self._held.get(seq, (np.zeros(0, np.int32),) * self._size)


class HeldKv:
    """Keys and values that one rank keeps, in the order of positions.

    Attributes:
        peak_bytes: the most that it has kept at any time.
    """

    def __init__(self) -> None:
        self._planes: dict[Any, dict[tuple[int, int], tuple[F32, F32]]] = {}
        self.peak_bytes = 0

    def of(self, seq: Any, where: tuple[int, int], like: tuple[F32, F32]) -> tuple[F32, F32]:
        """Both planes [n, G, D] of a layer; of a sequence that has nothing, none of tokens as `like`."""
        return self._planes.get(seq, {}).get(where, (like[0][:0], like[1][:0]))

    def add(self, seq: Any, where: tuple[int, int], new: tuple[F32, F32]) -> None:
        """Mutates: self."""
        a, b = self.of(seq, where, new)
        self._planes.setdefault(seq, {})[where] = (np.concatenate([a, new[0]]), np.concatenate([b, new[1]]))
        self.peak_bytes = max(self.peak_bytes, self.num_bytes())

    def num_bytes(self, seq: Any = None) -> int:
        """Of a sequence, or of all."""
        chosen = self._planes.values() if seq is None else [self._planes.get(seq, {})]
        return sum(plane.nbytes for planes in chosen for pair in planes.values() for plane in pair)

    def forget(self, seq: Any) -> None:
        self._planes.pop(seq, None)
