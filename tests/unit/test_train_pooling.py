"""Key and value heads pooled for uptraining (C03)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.core.model_spec import weight_shapes
from tests.oracle import NaiveModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from train.pool_heads import pooled
from train.recipes import RECIPES


def test_pooling_heads_that_are_alike_changes_nothing() -> None:
    """C03: with equal key and value heads, multi-query attention over their mean is the same function."""
    source, target = RECIPES["nano"], RECIPES["nano-mqa"]
    rng = np.random.default_rng(0)
    weights = {n: (0.1 * rng.standard_normal(s)).astype(np.float32) for n, s in weight_shapes(source).items()}
    for name in weights:
        if name.endswith((".k", ".v")):
            weights[name] = np.tile(weights[name][:32], (3, 1))
    ids = rng.integers(0, source.vocab_size, 12).tolist()
    want = NaiveModel(source, weights).logits(ids)
    got = NaiveModel(target, pooled(weights, source, target)).logits(ids)
    np.testing.assert_allclose(got, want, atol=1e-3)
    assert want.std() > 0.1


def test_other_shapes_are_refused() -> None:
    source = RECIPES["nano"]
    weights = {n: np.zeros(s, np.float32) for n, s in weight_shapes(source).items()}
    with pytest.raises(ValueError, match=r"divides|differ"):
        pooled(weights, source, RECIPES["nano-mla"])
