"""Early exits as a measurement: what a threshold does, on the model that comes with the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
torch = pytest.importorskip("torch")


def test_D42_mean_layers_fall_and_agreement_falls_with_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never leaving is the whole model; leaving at once is the first exit; in between both fall together."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.quality.exits import at_threshold, read
    from tokenizers import Tokenizer

    from train.export import read_weights
    from train.interpreter import SpecModule
    from train.recipes import RECIPES

    folder, spec = ROOT / "src" / "penstock" / "bundled" / "nano", RECIPES["nano"]
    model = SpecModule(spec, 512)
    model.load(read_weights(folder, spec))
    text = "Once upon a time there was a little girl who lived near the sea. One day she went to the shore. " * 12
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    stops = [2, 4, len(spec.layers)]
    found = read(model, ids, stops, 128)
    rows = [at_threshold(found, stops, t) for t in (0.0, 0.2, 0.5, 0.9, 1.01)]
    layers = [r["layers_per_token"] for r in rows]
    assert layers == sorted(layers)
    assert layers[0] == 2
    assert layers[-1] == len(spec.layers)
    assert rows[-1]["agreement"] == 1.0
    assert rows[0]["agreement"] < rows[1]["agreement"] <= rows[2]["agreement"]
    assert sys.modules["torch"] is torch


def test_D42_layers_and_agreement_are_those_of_a_loop_over_tokens() -> None:
    """On made-up confidences: who leaves where, and whether what it says there is what the whole model says."""
    from benchmarks.quality.exits import Read, at_threshold

    made = torch.Generator().manual_seed(3)
    stops = [1, 3, 4, 9]
    confidence = torch.rand((4, 500), generator=made)
    same = torch.rand((4, 500), generator=made) < torch.tensor([0.3, 0.6, 0.8, 1.1])[:, None]
    found = Read(confidence, same, torch.rand((4, 500), generator=made))
    for threshold in (0.0, 0.1, 0.5, 0.9, 1.01):
        layers, agreed, bits = [], [], []
        for t in range(500):
            at = next((i for i in range(4) if confidence[i, t] >= threshold), 3)
            layers.append(stops[at])
            agreed.append(float(same[at, t]))
            bits.append(float(found.bits[at, t]))
        row = at_threshold(found, stops, threshold)
        assert row["layers_per_token"] == pytest.approx(sum(layers) / 500)
        assert row["agreement"] == pytest.approx(sum(agreed) / 500)
        assert row["perplexity"] == pytest.approx(2 ** (sum(bits) / 500), rel=1e-4)
        assert [row[f"exit_{s}"] for s in stops] == pytest.approx([layers.count(s) / 500 for s in stops])


def test_D42_what_an_exit_says_is_what_the_first_layers_alone_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a model that has no further layers, computed without torch from the shipped weights."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import msgspec
    import numpy as np
    from benchmarks.quality.exits import read

    from penstock.core.model_spec import weight_shapes
    from tests.oracle import NaiveModel
    from train.export import read_weights
    from train.interpreter import SpecModule
    from train.recipes import RECIPES

    folder, spec = ROOT / "src" / "penstock" / "bundled" / "nano", RECIPES["nano"]
    weights = read_weights(folder, spec)
    model = SpecModule(spec, 64)
    model.load(weights)
    ids = [3 + i * 37 % 900 for i in range(33)]
    stops = [2, 4, len(spec.layers)]
    found = read(model, ids, stops, 32)
    naive = []
    for stop in stops:
        part = msgspec.structs.replace(spec, layers=spec.layers[:stop])
        logits = NaiveModel(part, {n: np.asarray(weights[n]) for n in weight_shapes(part)}).logits(ids[:32])
        chances = np.exp(logits - logits.max(1, keepdims=True))
        naive.append(chances / chances.sum(1, keepdims=True))
    for i, chances in enumerate(naive):
        np.testing.assert_allclose(found.confidence[i], chances.max(1), rtol=2e-3)
        assert (found.same[i].numpy() == (chances.argmax(1) == naive[-1].argmax(1))).mean() > 0.95
        bits = -np.log2(chances[np.arange(32), ids[1:]])
        np.testing.assert_allclose(found.bits[i], bits, rtol=2e-3, atol=2e-3)
