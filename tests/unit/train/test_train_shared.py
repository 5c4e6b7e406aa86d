"""Layers that share keys and values, trained (C10, C13, C19): a small form of `benchmarks/quality/cla.py`, whose
figures for real prose are in `benchmarks/results/cla.json`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from penstock.core.model_spec import ModelSpec
from penstock.eval.sample import SAMPLE
from penstock.launch.bundled import bundled_model

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from benchmarks.quality.cla import CONVERSIONS, Weights, as_large, converted, fresh, kv_bytes, model, weights_of, yoco

from tests.unit.train.test_train_pooling import ROW, uptrained

STEPS = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    folder = bundled_model("pico")
    assert folder is not None
    return torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(SAMPLE).ids)


def trained(spec: ModelSpec, weights: Weights, steps: int, ids: torch.Tensor) -> tuple[Weights, float]:
    """The weights after so many steps on three quarters of a text, and the perplexity of the last."""
    cut = len(ids) * 3 // 4
    made = uptrained(spec, weights, steps, ids[:cut])
    rows = ids[cut:][: (len(ids) - cut) // (ROW + 1) * (ROW + 1)].view(-1, ROW + 1)
    with torch.no_grad():
        loss = F.cross_entropy(made(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    return weights_of(made), math.exp(loss)


@pytest.fixture(scope="module")
def plain(ids: torch.Tensor) -> tuple[Weights, float]:
    return trained(model(), fresh(model(), 7), STEPS, ids)


@pytest.mark.parametrize(("spec", "share", "most"), [
    (as_large(lambda widths: model(share=2, widths=widths)), 2, 1.02), (as_large(yoco), 6, 1.15),
])  # fmt: skip
def test_C10_C19_a_twin_of_as_many_parameters_reads_as_well(
    spec: ModelSpec, share: int, most: float, plain: tuple[Weights, float], ids: torch.Tensor
) -> None:
    """Trained on the same rows in the same order, with a half and a sixth of the bytes that grow with the text. Of so
    few steps the second's perplexity is a tenth worse; after 400 it is not (the benchmark)."""
    assert spec.num_params == model().num_params
    assert kv_bytes(spec) * share == kv_bytes(model())
    untrained = trained(spec, fresh(spec, 7), 0, ids)[1]
    after = trained(spec, fresh(spec, 7), STEPS, ids)[1]
    assert after < 0.3 * untrained
    assert after < most * plain[1]


def test_C13_what_fewer_bytes_cost_a_model_that_goes_over_to_them(
    plain: tuple[Weights, float], ids: torch.Tensor
) -> None:
    """A grouped-query model becomes multi-query, CLA2 and MLKV by means of heads and of layers, and trains on for some
    steps: the curve of perplexity over bytes, with all of them on it."""
    curve = {}
    for name, kv_heads, share in CONVERSIONS:
        spec, weights = model(kv_heads, share), converted(plain[0], kv_heads, share)
        just, after = (trained(spec, weights, steps, ids)[1] for steps in (0, 4))
        curve[name] = (kv_bytes(spec), just, after)
    assert {name: curve["gqa"][0] // found[0] for name, found in curve.items()} == {
        "gqa": 1, "mqa": 3, "cla2": 2, "mlkv": 6, "mlkv3": 9
    }  # fmt: skip
    for name in ("mqa", "cla2", "mlkv", "mlkv3"):
        _, just, after = curve[name]
        assert after < just
