"""Early exits as a measurement: what a threshold does, on the model that comes with the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
