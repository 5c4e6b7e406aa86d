"""`frequency_penalty` and `presence_penalty`: generated tokens become less likely (OpenAI's two parameters)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.sampling import TokenRules
from penstock.runner.logits.base import F32, RowProcessor
from penstock.runner.logits.token_counts import TokenCounts


class _State(NamedTuple):
    counts: TokenCounts
    frequency: np.float32
    presence: np.float32


class CountPenalties(RowProcessor[_State]):
    """Subtracts frequency * count, then presence, from the logits of generated tokens. The prompt does not count."""

    name = "count_penalties"

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> _State | None:
        if rules.frequency_penalty == 0.0 and rules.presence_penalty == 0.0:
            return None
        counts = TokenCounts((), output)
        return _State(counts, np.float32(rules.frequency_penalty), np.float32(rules.presence_penalty))

    def change(self, row: F32, state: _State) -> None:
        ids, counts = state.counts.seen()
        values = row[ids]
        values -= state.frequency * counts
        values -= state.presence
        row[ids] = values

    def extend(self, state: _State, token_ids: Sequence[int]) -> None:
        state.counts.extend(token_ids)

    def drop(self, state: _State, n: int) -> None:
        state.counts.drop(n)

    def copy(self, state: _State) -> _State:
        return state._replace(counts=state.counts.copy())
