"""`bad_words`: token sequences that may not be generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.sampling import TokenRules
from penstock.runner.logits.base import F32, RowProcessor


@dataclass
class _State:
    banned: list[tuple[list[int], int]]
    """(tokens before the last, last token)"""
    output: list[int]


class BadWords(RowProcessor[_State]):
    """Masks (-inf) the last token of a bad sequence when the newest generated tokens are the ones before it.

    Only generated tokens count, as in vLLM: what the prompt says was not generated.
    """

    name = "bad_words"

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> _State | None:
        banned = [(seq[:-1], seq[-1]) for seq in rules.bad_sequences if seq and 0 <= seq[-1] < self.vocab_size]
        return _State(banned, list(output)) if banned else None

    def change(self, row: F32, state: _State) -> None:
        output = state.output
        for before, last in state.banned:
            n = len(before)
            if n <= len(output) and output[len(output) - n :] == before:
                row[last] = -np.inf

    def extend(self, state: _State, token_ids: Sequence[int]) -> None:
        state.output.extend(token_ids)

    def drop(self, state: _State, n: int) -> None:
        assert n <= len(state.output), "rollback reaches into the prompt"
        del state.output[len(state.output) - n :]

    def copy(self, state: _State) -> _State:
        return _State(state.banned, state.output.copy())
