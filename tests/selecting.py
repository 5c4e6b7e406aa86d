"""For tests of KV selectors: lines with attention that is known, selectors from their names, and nano's real maps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config import from_kwargs
from penstock.config.selection import SelectionConfig, SelectionOptions, parse_budget
from penstock.core.model_spec import ModelSpec
from penstock.core.selection import KVLine, KVSelector, Selecting
from penstock.eval.maps import LayerMap, MapReader
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, load
from penstock.select import KV_SELECTORS
from penstock.select.bench import SelectionBench
from penstock.weights.load import fingerprint

F32 = npt.NDArray[np.float32]
LAYERS, HEADS, GROUP = 6, 3, 2
"""nano's, and those of the lines made here."""


@cache
def nano() -> LoadedModel:
    return load(from_kwargs(model="nano", ops="ref"))


@cache
def nano_mark() -> str:
    return fingerprint(nano().weights)


def config_of(name: str, budget: str = "25%", **given: Any) -> SelectionConfig:
    return SelectionConfig(name, parse_budget(budget), SelectionOptions(**given))


def selector(config: SelectionConfig, spec: ModelSpec | None = None, mark: str | None = None) -> KVSelector:
    """Of nano. Tokens below 3 are special, multiples of 7 punctuation."""
    bench = SelectionBench(
        config, spec or nano().spec, lambda i: i < 3, lambda i: i % 7 == 0, lambda: mark or nano_mark()
    )
    made: KVSelector = KV_SELECTORS.get(config.method)(bench)
    return made


def at(num_tokens: int, budget: int, prompt_len: int | None = None, tokens: Sequence[int] | None = None) -> Selecting:
    ids = np.array(tokens if tokens is not None else [5] * num_tokens, np.int32)
    return Selecting(num_tokens, num_tokens if prompt_len is None else prompt_len, budget, ids)


def line(
    positions: Sequence[int], seen: npt.ArrayLike | None = None, layer: int = 0, head: int = 0, **stats: Any
) -> KVLine:
    """`seen`: the last tokens' attention [w, n] or [n], the same for both query heads."""
    out = KVLine(layer, head, np.array(positions, np.int32), {n: np.array(x, np.float32) for n, x in stats.items()})
    if seen is not None:
        rows = np.atleast_2d(np.array(seen, np.float32))
        out.recent = lambda: np.repeat(rows[:, None], GROUP, axis=1)
    return out


BARE = {"sinks": 0, "recent": 1}
"""Next to nothing that stays whatever its score."""


def kept(name: str, n: int, budget: int, lines: list[KVLine], **given: Any) -> list[list[int]]:
    """Positions, not slots."""
    made = selector(config_of(name, **given))
    found = made.select(at(n, budget), lines)
    return [one.positions[slots].tolist() for one, slots in zip(lines, found, strict=True)]


def causal(rng: np.random.Generator, positions: npt.NDArray[np.int32], first: int, count: int, heads: int) -> F32:
    """Random attention [count, heads, n] of tokens first ... over slots: rows sum to 1, with zeros behind, or to 0
    where nothing is left to see."""
    rows = rng.random(size=(count, heads, len(positions))) ** 8
    own = np.arange(first, first + count)[:, None, None]
    rows = np.where(positions[None, None] <= own, rows, 0)
    return (rows / np.maximum(rows.sum(axis=-1, keepdims=True), 1e-12)).astype(np.float32)


class Reading(NamedTuple):
    ids: list[int]
    maps: list[LayerMap]


@cache
def nano_reading(num_tokens: int = 448) -> Reading:
    """The package's own sample, read by nano."""
    tokenizer = nano().tokenizer
    assert tokenizer is not None
    ids = [nano().spec.bos_token_id or 0, *tokenizer.encode_inner(SAMPLE)][:num_tokens]
    return Reading(ids, MapReader(nano()).read(ids)[1])
