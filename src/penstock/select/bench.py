"""What a selector is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.config.selection import SelectionConfig
from penstock.core.model_spec import ModelSpec


class SelectionBench(NamedTuple):
    """`is_special` and `is_punctuation`: of a token id, for selectors that look at text; all false without a tokenizer.

    `fingerprint`: of the model's weights, for selectors with a profile of its heads.
    """

    config: SelectionConfig
    spec: ModelSpec
    is_special: Callable[[int], bool]
    is_punctuation: Callable[[int], bool]
    fingerprint: Callable[[], str]
