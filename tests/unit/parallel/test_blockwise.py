"""Rows of a step in blocks, layer by layer (catalogue row H07)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.backends.blockwise import BlockwiseProgram
from penstock.base.errors import UnsupportedError
from penstock.core.model_spec import FeedForward, weight_shapes
from penstock.ops.ref import REF
from penstock.ops.ref.attention.full import FULL
from tests import specs
from tests.paged import Paged
from tests.sampled import grid, some
from tests.sequences import alone, difference, mixed, prompt
from tests.unit.parallel.test_sequence import FIT


def blockwise(paged: Paged, rows: int) -> Paged:
    paged.program = BlockwiseProgram(paged.graph, REF, FULL, rows)
    return paged


@pytest.mark.parametrize(("name", "rows"), some(grid(FIT, [1, 5, 16])))
def test_H07_equal_for_every_kind_of_model(name: str, rows: int) -> None:
    paged = blockwise(Paged(*specs.make(name), max_model_len=600), rows)
    got = [{seq: np.array(x) for seq, x in paged.run(work).items()} for work, _ in mixed()]
    assert difference(got, alone(name, mixed())) < 1e-5


def test_H07_peak_of_activations_grows_less_with_the_length() -> None:
    """Bytes for each more token: of the residual and what is read of it, instead of the feed-forward's width."""
    spec, _ = specs.make("llama_mqa")
    layers = tuple(msgspec.structs.replace(layer, ffn=FeedForward(width=256)) for layer in spec.layers)
    spec = msgspec.structs.replace(spec, layers=layers)
    rng = np.random.default_rng(0)
    weights = {n: rng.standard_normal(s).astype(np.float32) / 8 for n, s in weight_shapes(spec).items()}

    def peak(count: int, rows: int) -> tuple[int, Any]:
        paged = Paged(spec, weights, max_model_len=600)
        if rows:
            blockwise(paged, rows)
        tracemalloc.start()
        logits = np.array(paged.run({"a": (prompt(count), [count - 1])})["a"])
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found, logits

    slopes = {}
    for rows in (0, 16):
        (short, _), (long, logits) = peak(192, rows), peak(384, rows)
        slopes[rows] = (long - short) / 192
        assert np.abs(logits - peak(384, 0)[1]).max() < 1e-5
    assert slopes[16] < 0.4 * slopes[0]


def test_what_it_refuses_is_named() -> None:
    with pytest.raises(UnsupportedError, match="layer 0: causal_conv reads other rows"):
        blockwise(Paged(*specs.make("mamba")), 4)
