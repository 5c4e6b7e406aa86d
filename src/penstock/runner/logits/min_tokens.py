"""`min_tokens`: no end before that many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.sampling import TokenRules
from penstock.runner.logits.base import F32, Ids, RowProcessor, vocab_ids


@dataclass
class _State:
    stop_ids: Ids
    min_tokens: int
    num_generated: int


class MinTokens(RowProcessor[_State]):
    """Masks (-inf) end-of-sequence and stop ids while fewer than `min_tokens` tokens have been generated.

    A row past its minimum is still followed, because a rollback can bring it back below.
    """

    name = "min_tokens"

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> _State | None:
        stop_ids = vocab_ids(rules.stop_ids, self.vocab_size)
        if rules.min_tokens <= 0 or not stop_ids.size:
            return None
        return _State(stop_ids, rules.min_tokens, len(output))

    def change(self, row: F32, state: _State) -> None:
        if state.num_generated < state.min_tokens:
            row[state.stop_ids] = -np.inf

    def extend(self, state: _State, token_ids: Sequence[int]) -> None:
        state.num_generated += len(token_ids)

    def drop(self, state: _State, n: int) -> None:
        assert n <= state.num_generated, "rollback reaches into the prompt"
        state.num_generated -= n

    def copy(self, state: _State) -> _State:
        return replace(state)
