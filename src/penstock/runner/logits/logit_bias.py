"""`logit_bias`: numbers added to chosen logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.sampling import TokenRules
from penstock.runner.logits.base import F32, Ids, RowProcessor, vocab_ids


class _State(NamedTuple):
    ids: Ids
    bias: F32


class LogitBias(RowProcessor[_State]):
    """Adds in float32. A masked token stays masked whatever its bias."""

    name = "logit_bias"

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> _State | None:
        ids = vocab_ids(rules.logit_bias, self.vocab_size)
        if not ids.size:
            return None
        return _State(ids, np.array([rules.logit_bias[i] for i in ids.tolist()], np.float32))

    def change(self, row: F32, state: _State) -> None:
        row[state.ids] += state.bias
