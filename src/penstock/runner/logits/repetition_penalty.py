"""`repetition_penalty`: tokens of prompt and output become less likely.

Source: Keskar et al., "CTRL: A Conditional Transformer Language Model", 2019, section 4.1; the two signs as in vLLM and
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.sampling import TokenRules
from penstock.runner.logits.base import F32, RowProcessor
from penstock.runner.logits.token_counts import TokenCounts


class _State(NamedTuple):
    counts: TokenCounts
    penalty: np.float32


class RepetitionPenalty(RowProcessor[_State]):
    """Divides positive logits of tokens seen in prompt or output by the penalty and multiplies the others."""

    name = "repetition_penalty"

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> _State | None:
        if rules.repetition_penalty == 1.0:
            return None
        return _State(TokenCounts(prompt, output), np.float32(rules.repetition_penalty))

    def change(self, row: F32, state: _State) -> None:
        ids, _ = state.counts.seen()
        values = row[ids]
        row[ids] = np.where(values > 0, values / state.penalty, values * state.penalty)

    def extend(self, state: _State, token_ids: Sequence[int]) -> None:
        state.counts.extend(token_ids)

    def drop(self, state: _State, n: int) -> None:
        state.counts.drop(n)

    def copy(self, state: _State) -> _State:
        return state._replace(counts=state.counts.copy())
