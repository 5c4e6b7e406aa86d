"""What the processors share: a state per followed row, and row-by-row work, so that company can never matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.core.sampling import TokenRules

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
State = TypeVar("State")


def vocab_ids(ids: Iterable[int], vocab_size: int) -> Ids:
    """Distinct ids that are in the vocabulary, ascending. The others can never be generated, so no rule needs them."""
    return np.array(sorted({i for i in ids if 0 <= i < vocab_size}), np.int64)


class RowProcessor(Generic[State]):
    """A LogitsProcessor with one `State` per followed row. Subclasses write `begin`, `change` and, if the state
    follows the tokens, `extend`, `drop` and `copy`.

    Calls about rows that are not followed do nothing.
    """

    name = ""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._states: dict[int, State] = {}

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> State | None:
        """State of a row with these tokens; None if the rules never change a logit."""
        raise NotImplementedError

    def change(self, row: F32, state: State) -> None:
        """Mutates one row of logits [V]."""
        raise NotImplementedError

    def extend(self, state: State, token_ids: Sequence[int]) -> None:
        """The row grew by `token_ids`. Mutates: state."""

    def drop(self, state: State, n: int) -> None:
        """The newest n generated tokens never happened. Mutates: state."""

    def copy(self, state: State) -> State:
        """An independent copy; a state that never changes may be shared."""
        return state

    def add(self, seq_id: int, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> bool:
        assert seq_id not in self._states, f"sequence {seq_id} is followed already"
        state = self.begin(rules, prompt, output)
        if state is None:
            return False
        self._states[seq_id] = state
        return True

    def apply(self, logits: F32, seq_ids: Sequence[int]) -> None:
        """Mutates `logits` [R, V]: row r belongs to `seq_ids[r]`."""
        if not self._states:
            return
        for row, seq_id in zip(logits, seq_ids, strict=True):
            state = self._states.get(seq_id)
            if state is not None:
                self.change(row, state)

    def advance(self, seq_id: int, token_ids: Sequence[int]) -> None:
        state = self._states.get(seq_id)
        if state is not None:
            self.extend(state, token_ids)

    def rollback(self, seq_id: int, n: int) -> None:
        state = self._states.get(seq_id)
        if state is not None and n > 0:
            self.drop(state, n)

    def fork(self, parent_id: int, child_id: int) -> None:
        state = self._states.get(parent_id)
        if state is not None:
            assert child_id not in self._states, f"sequence {child_id} is followed already"
            self._states[child_id] = self.copy(state)

    def remove(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)

    def exhausted(self, seq_id: int) -> str | None:
        return None
