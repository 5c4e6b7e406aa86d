"""What a drafter is made with: its settings, and what it may use of its rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config import SpeculativeConfig
from penstock.core.cache_spec import CacheGroup
from penstock.core.model_spec import ModelSpec
from penstock.model.forward import Forward
from penstock.runner.rows import RowStore
from penstock.runner.sampler import Sampler
from penstock.runner.storage import Storage


class DraftModel(NamedTuple):
    """A model that drafts. `groups` are its own among the rank's; it runs positions 0 ... max_len-1 and knows tokens
    0 ... vocab_size-1. `spec` and `weights`, by logical name: for who has more to do with it than to run it."""

    name: str
    forward: Forward
    groups: Sequence[CacheGroup]
    max_len: int
    vocab_size: int
    spec: ModelSpec | None = None
    weights: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Target:
    """The model whose tokens are drafted, for drafters that are a part of it or hang on it.

    Attributes:
        forward: what verifies. Its results live in its own arena: a drafter may run it between steps only.
        part: layers -> the model without all others, over the same weights and the same cache groups.
        embeddings: token ids [P] -> their rows of its embedding table, float32 [P, E], without any scale.
        fingerprint: of its weights (`weights.load.fingerprint`): what was trained on another model does not fit.
    """

    spec: ModelSpec
    forward: Forward
    part: Callable[[Collection[int]], Forward]
    embeddings: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32]]
    fingerprint: Callable[[], str]


@dataclass(frozen=True, kw_only=True)
class DraftBench:
    """A registered drafter is a function `make(bench) -> Drafter`. Raises: ConfigError for settings that do not fit.

    Attributes:
        vocab_size: of the model whose tokens are drafted.
        rows, storage: the rank's, to be read; a drafter with a cache writes the pages of its own groups in `storage`.
        sampler: the rank's, with the processors' states behind the newest known token of every row while it proposes.
        models: draft models, in the order of `config.model`.
        encode: text -> token ids of the model; None if it has no tokenizer.
        target: the model whose tokens are drafted; None if it is none (tests, simulators).
    """

    config: SpeculativeConfig
    vocab_size: int
    rows: RowStore
    storage: Storage
    sampler: Sampler | None = None
    models: Sequence[DraftModel] = ()
    encode: Callable[[str], list[int]] | None = None
    target: Target | None = None
