"""C19: a decoder whose upper half reads one cache that its middle makes (YOCO; Sun et al., arXiv 2405.05254)."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.model_spec import FeedForward, Layer, ModelSpec, cache_groups, weight_shapes
from penstock.model.fuse import PASSES, fuse
from penstock.model.graph import SELECTED, Graph, Node
from penstock.ops.native.library import best_library
from tests import specs
from tests.engine.harness import Knobs, real_engine, request, run
from tests.engine.test_rows import storage_bytes
from tests.oracle import NaiveModel
from tests.paged import Paged

OPS = ["ref", *(["native"] if best_library() is not None else [])]
WINDOWS = 2
"""Layers of the lower half; the one behind them makes the cache of the upper half."""


def deep(upper: int) -> ModelSpec:
    """The model of `tests.specs` with so many layers that read the cache, the one that makes it among them."""
    spec = specs.make("yoco")[0]
    layers = (*spec.layers[: WINDOWS + 1], *[spec.layers[WINDOWS + 1]] * (upper - 1))
    return msgspec.structs.replace(spec, layers=layers)


def drawn(spec: ModelSpec) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    shapes = weight_shapes(spec).items()
    return {n: rng.standard_normal(s).astype(np.float32) / np.sqrt(s[-1], dtype=np.float32) for n, s in shapes}


def test_C19_kv_bytes_do_not_depend_on_the_depth_of_the_upper_half() -> None:
    """Of arrays, and by the plan; a usual decoder's grow by a layer's for every layer."""
    knobs = Knobs(block_size=4, num_blocks=32)
    found = {n: storage_bytes(real_engine(deep(n), drawn(deep(n)), knobs)) for n in (1, 4, 9)}
    assert len(set(found.values())) == 1
    tokens = {
        n: sum(g.token_bytes(4) for g in cache_groups(deep(n), "float32") if g.spec.window is None) for n in found
    }
    assert set(tokens.values()) == {2 * 2 * 8 * 4}, "keys and values of two heads of eight, once"
    mixer = deep(1).layers[-1].mixer
    usual = msgspec.structs.replace(
        deep(1), layers=tuple(Layer(mixer=mixer, ffn=FeedForward(width=35)) for _ in range(9))
    )
    assert sum(g.token_bytes(4) for g in cache_groups(usual, "float32")) == 9 * 2 * 2 * 8 * 4


def work(graph: Graph, tokens: int, wanted: int) -> int:
    """FLOPs of a prompt's products and of attention (all of it within the first window), by the program's rows."""
    return sum(_flops(node) * (wanted if node.out is not None and node.out.rows == SELECTED else tokens)
               for node in graph.nodes)  # fmt: skip


def _flops(node: Node) -> int:
    if node.op == "linear":
        return sum(2 * prod(part.weight.shape) for part in node.more["parts"])
    return 4 * node.inputs[0].width if node.op == "attention" else 0


def test_C19_a_prompt_leaves_early() -> None:
    """Of a prompt's tokens all but the last leave where the upper half's keys and values are made: about half of the
    FLOPs are left where both halves have equally many layers, and nothing of the upper half for a chunk that more
    follows."""
    half = 12
    spec = deep(half)
    layers = (*[spec.layers[0]] * half, *(_above(layer, half) for layer in spec.layers[WINDOWS:]))
    spec = msgspec.structs.replace(spec, layers=layers)
    weights = drawn(spec)
    early, late = (Paged(spec, weights).graph.copy() for _ in range(2))
    fuse(early)
    fuse(late, [name for name in PASSES if name != "selection"])
    share = work(early, 1000, 1) / work(late, 1000, 1)
    assert 0.5 < share < 0.56
    head = 2 * spec.vocab_size * spec.hidden_size
    assert work(early, 1000, 0) < 0.56 * (work(late, 1000, 1) - head)
    rows = {(node.layer, node.op): node.out.rows for node in early.nodes if node.out is not None}
    above = {rows[key] for key in rows if key[0] > half}
    assert above == {SELECTED}
    assert rows[half, "attention"] == SELECTED
    assert SELECTED not in {rows[key] for key in rows if 0 <= key[0] < half}


def _above(layer: Layer, source: int) -> Layer:
    mixer = layer.mixer
    return layer if layer.kv_from is None else msgspec.structs.replace(
        layer, mixer=msgspec.structs.replace(mixer, kv_from=source)
    )  # fmt: skip


@pytest.mark.parametrize("ops", OPS)
def test_C19_who_leaves_early_changes_no_token(ops: str) -> None:
    """Prompts at once, in chunks that end anywhere, behind prefix hits, and with logits wanted in their midst: the
    naive model's text, which runs every token through every layer."""
    spec, weights = specs.make("yoco")
    model = NaiveModel(spec, weights)
    prompt = [3 + 7 * i % 50 for i in range(41)]
    want = model.greedy(prompt, 12)
    for knobs in ({}, {"budget": 64}, {"budget": 7, "block_size": 8}, {"prefix_cache": "none", "budget": 3}):
        core = real_engine(spec, weights, Knobs(ops=ops, **knobs))
        for name in "ab":
            got = run(core, [request(prompt, request_id=name, max_tokens=12)])[name]
            assert got.tokens[0] == want
