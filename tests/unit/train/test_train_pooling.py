"""Key and value heads pooled for uptraining (C03)."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from penstock.core.model_spec import Layer, ModelSpec, weight_shapes
from penstock.eval.sample import SAMPLE
from penstock.launch.bundled import bundled_model
from tests.oracle import NaiveModel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train.export import read_weights
from train.interpreter import SpecModule
from train.pool_heads import F32, pooled
from train.recipes import RECIPES
from train.train import optimisers, rate

ROW = 128


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


def test_C03_a_pooled_head_is_the_mean_of_its_group_of_neighbours() -> None:
    """Six heads become three: 0 and 1, 2 and 3, 4 and 5, as query heads share them."""
    source = RECIPES["nano"]
    many, few = (
        msgspec.structs.replace(source, layers=tuple(_kv(layer, heads) for layer in source.layers)) for heads in (6, 3)
    )
    rng = np.random.default_rng(1)
    weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in weight_shapes(many).items()}
    for name in ("layers.0.k", "layers.5.v"):
        heads = weights[name].reshape(6, 32, -1)
        want = np.stack([(heads[2 * g] + heads[2 * g + 1]) / 2 for g in range(3)]).reshape(96, -1)
        np.testing.assert_allclose(pooled(weights, many, few)[name], want, atol=1e-6)


def test_other_shapes_are_refused() -> None:
    source = RECIPES["nano"]
    weights = {n: np.zeros(s, np.float32) for n, s in weight_shapes(source).items()}
    with pytest.raises(ValueError, match=r"divides|differ"):
        pooled(weights, source, RECIPES["nano-mla"])


def _kv(layer: Layer, heads: int) -> Layer:
    return msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, num_kv_heads=heads))  # type: ignore[type-var]


def uptrained(spec: ModelSpec, weights: dict[str, F32], steps: int, ids: torch.Tensor) -> SpecModule:
    """`steps` of 8 rows of `ids` [T], the same for all."""
    model = SpecModule(spec, ROW)
    model.load(weights)
    optims = optimisers(model, 0.01)
    base = [group["lr"] for o in optims for group in o.param_groups]
    draw = torch.Generator().manual_seed(0)
    for step in range(steps):
        starts = torch.randint(0, len(ids) - ROW - 1, (8,), generator=draw)
        rows = torch.stack([ids[at : at + ROW + 1] for at in starts])
        for group, lr in zip((g for o in optims for g in o.param_groups), base, strict=True):
            group["lr"] = lr * rate(step / steps, 0.6)
        F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
        for optimiser in optims:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
    return model


def test_C03_a_converted_model_recovers_nine_tenths_of_the_gap_after_a_short_uptraining() -> None:
    """pico's three key-value heads become one, and a dozen steps follow. The gap is that to the better of pico and pico
    trained on for as long; held-out text. The figures for real prose are those of benchmarks/quality/gqa.py."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    source, folder = RECIPES["pico"], bundled_model("pico")
    assert folder is not None
    target = msgspec.structs.replace(source, layers=tuple(_kv(layer, 1) for layer in source.layers))
    weights = read_weights(folder, source)
    fewer = pooled(weights, source, target)
    assert fewer["layers.0.k"].shape[0] * 3 == weights["layers.0.k"].shape[0]
    ids = torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SAMPLE).ids)
    seen, held = ids[: len(ids) * 3 // 4], ids[len(ids) * 3 // 4 :]
    rows = held[: len(held) // (ROW + 1) * (ROW + 1)].view(-1, ROW + 1)

    def perplexity(spec: ModelSpec, start: dict[str, F32], steps: int) -> float:
        model = uptrained(spec, start, steps, seen)
        with torch.no_grad():
            return math.exp(F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()))

    try:
        best = min(perplexity(source, weights, n) for n in (0, 12))
        just_pooled, after = (perplexity(target, fewer, n) for n in (0, 12))
    finally:
        torch.set_num_threads(before)
    assert just_pooled > 2 * best, "there is a gap to speak of"
    assert (just_pooled - after) / (just_pooled - best) >= 0.9
