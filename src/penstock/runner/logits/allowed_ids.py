"""`allowed_token_ids`: nothing else may be generated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.sampling import TokenRules
from penstock.runner.logits.base import F32, Ids, RowProcessor, vocab_ids


class AllowedIds(RowProcessor[Ids]):
    """Masks (-inf) every token that is not allowed. The state is the allowed ids, which never change."""

    name = "allowed_ids"

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> Ids | None:
        return None if rules.allowed_ids is None else vocab_ids(rules.allowed_ids, self.vocab_size)

    def change(self, row: F32, state: Ids) -> None:
        kept = row[state]
        row.fill(-np.inf)
        row[state] = kept
