"""How often a row has seen each token, with undo: the state of the penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.runner.logits.base import F32, Ids


class TokenCounts:
    """Counts of distinct tokens, as arrays, so that a penalty is a few vector operations however long the row is.

    `fixed` tokens (the prompt) are counted but can never be dropped.
    """

    __slots__ = ("_counts", "_history", "_ids", "_size", "_slots")

    def __init__(self, fixed: Sequence[int], output: Sequence[int]) -> None:
        ids, counts = np.unique(np.asarray(fixed, np.int64), return_counts=True)
        self._size = len(ids)
        self._ids: Ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts: Ids = np.concatenate([counts.astype(np.int64), np.zeros(64, np.int64)])
        self._slots: dict[int, int] = {token: slot for slot, token in enumerate(ids.tolist())}
        self._history: list[int] = []
        self.extend(output)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Mutates: self."""
        for token in token_ids:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._new_slot(token)
            self._counts[slot] += 1
            self._history.append(token)

    def drop(self, n: int) -> None:
        """Uncount the newest `n` tokens. A token may stay behind with count 0. Mutates: self."""
        assert n <= len(self._history), "rollback reaches into the prompt"
        for _ in range(n):
            self._counts[self._slots[self._history.pop()]] -= 1

    def copy(self) -> TokenCounts:
        twin = TokenCounts.__new__(TokenCounts)
        twin._size = self._size
        twin._ids = self._ids.copy()
        twin._counts = self._counts.copy()
        twin._slots = self._slots.copy()
        twin._history = self._history.copy()
        return twin

    def seen(self) -> tuple[Ids, F32]:
        """Distinct tokens with a count above 0, and their counts. Shapes: [U], [U]."""
        counts = self._counts[: self._size]
        present = counts > 0
        return self._ids[: self._size][present], counts[present].astype(np.float32)

    def _new_slot(self, token: int) -> int:
        if self._size == len(self._ids):
            room = np.zeros(self._size, np.int64)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room])
        slot = self._size
        self._ids[slot] = token
        self._slots[token] = slot
        self._size += 1
        return slot
