"""InfiniGen's rehearsals on nano (row B18): a layer's attention is known one layer before, from parts of keys.

benchmarks/quality/infinigen.py measures the same on more, and on larger models.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest

from penstock.backends.reference import BlasBackend
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.eval.rehearsal import Fetched, RehearsingScorer
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, ProgramScorer, load

FIRST, LENGTH = 400, 496


@cache
def bench() -> tuple[LoadedModel, tuple[int, ...], RehearsingScorer]:
    model = load(from_kwargs(model="nano", ops="ref", max_model_len=1024))
    assert model.tokenizer is not None
    ids = tuple(model.tokenizer.encode(SAMPLE))
    scorer = RehearsingScorer(model, first=FIRST)
    scorer.learn(ids[LENGTH : LENGTH + 512])
    return model, ids[:LENGTH], scorer


def read(reach: float, rank: float) -> tuple[np.ndarray, Fetched]:
    _, ids, scorer = bench()
    scorer.reach, scorer.rank = reach, rank
    counted = Fetched()
    scorer.count(counted)
    return scorer.logits(ids), counted


def test_B18_what_is_fetched_is_counted_and_with_all_of_it_nothing_differs() -> None:
    model, ids, _ = bench()
    logits, f = read(math.inf, 0.3)
    np.testing.assert_allclose(logits, ProgramScorer(model, BlasBackend()).logits(ids), rtol=1e-4, atol=1e-4)
    assert f.recall == pytest.approx(1)
    tokens = sum(range(FIRST + 1, LENGTH + 1))
    assert f.num_bytes == f.all_bytes == (len(model.spec.layers) - 1) * 3 * tokens * 2 * 32 * 2, "of 3 kv heads of 32"
    assert f.rehearsed_bytes == f.all_bytes // 2 * 10 // 32, "ten of the 32 components of keys"


def test_B18_a_fifth_of_keys_and_values_holds_nine_tenths_of_what_attention_would_choose() -> None:
    before, f = read(3.75, 0.8)
    assert 0.05 < f.share < 0.2
    assert f.recall >= 0.9
    assert not np.array_equal(before, read(math.inf, 0.8)[0]), "what was not fetched is not read"


def test_B18_turned_keys_say_more_in_few_components_than_they_do_as_they_are() -> None:
    """The skewing: at equal components more is found with less fetched."""
    _, _, scorer = bench()
    layers = scorer._stage._layers
    turned = read(3.5, 0.3)[1]
    kept = [layer.turns for layer in layers]
    try:
        for layer in layers:
            assert layer.turns is not None
            layer.turns = np.broadcast_to(np.eye(32, dtype=np.float32), layer.turns.shape)
        plain = read(3.5, 0.3)[1]
    finally:
        for layer, turns in zip(layers, kept, strict=True):
            layer.turns = turns
    assert turned.recall > plain.recall + 0.01
    assert turned.share < 0.7 * plain.share


def test_models_that_attend_otherwise_are_refused() -> None:
    model = load(from_kwargs(model="nano", ops="ref"))
    layer = model.spec.layers[1]
    windowed = msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, window=8))
    spec = msgspec.structs.replace(model.spec, layers=(model.spec.layers[0], windowed, *model.spec.layers[2:]))
    with pytest.raises(ConfigError, match=r"rehears.*layer 1"):
        RehearsingScorer(replace(model, spec=spec))
