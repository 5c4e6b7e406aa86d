"""H23: a model cut into spans of layers has the bits of the model in one piece, wherever it is cut."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend
from penstock.base.errors import UnsupportedError
from penstock.core.cache_spec import without_windows
from penstock.core.model_spec import cache_groups
from penstock.model.builder import build
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.program import Pool
from penstock.parallel.spans import back_of, front_of, span_of
from penstock.plan.stages import stage_groups
from penstock.swarm.model import step_plan
from tests.native.running import ISAS, pytestmark_native
from tests.native.test_model import NATIVE, weights_as
from tests.paged import Paged, _planes

pytestmark = pytestmark_native
BLOCK, SLABS = 4, 30
CANNOT = {"yoco", "shared_kv", "streams", "indexed", "rwkv7", "entries", "fixed_experts", "shared"}
"""Whose layers read more of each other than the residual stream, or go by token ids."""


class Cut:
    """A model as servers and a client run it: front, spans between `ends`, back."""

    def __init__(self, spec: Any, weights: Any, ends: list[int], threads: int) -> None:
        groups = without_windows(cache_groups(spec, "float32"))
        graph = build(spec, dict(weights), groups, max_model_len=300)
        backend = NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), threads, spin_us=5))
        self.front = backend.compile(front_of(graph), (), max_tokens=64)
        self.back = backend.compile(back_of(graph), (), max_tokens=64)
        self.spans = []
        for first, last in pairwise(ends):
            own = stage_groups(groups, range(first, last))
            made = backend.compile(span_of(graph, groups, first, last, range(first, last)), own, max_tokens=64)
            planes = [_planes(g, SLABS, BLOCK) for g in own]
            for plane in planes:
                for array in plane.values():
                    array[:] = 0
            self.spans.append((made, own, planes))
        self.at = 0

    def run(self, ids: list[int]) -> Any:
        """Logits [T, V] of the next tokens."""
        start, tokens = self.at, np.array(ids, np.int32)
        self.at += len(ids)
        rows = self.front.run_span(step_plan(tokens, start, (), (), 1, all_rows=True), (), None)
        for made, own, planes in self.spans:
            tables = tuple(blocks(-(-self.at // BLOCK) if g.spec.per_token else 1) for g in own)
            rows = made.run_span(
                step_plan(np.zeros_like(tokens), start, tables, own, BLOCK, all_rows=True), planes, rows
            )
        return self.back.run_span(step_plan(np.zeros_like(tokens), start, (), (), 1, all_rows=True), (), rows)


def blocks(count: int) -> Any:
    """Of a sequence: scattered, and the same ones at every length."""
    return (np.arange(count, dtype=np.int32)[None] * 7) % SLABS


@pytest.mark.parametrize("name", sorted(CANNOT))
def test_a_model_that_cannot_be_cut_is_refused_by_what_it_reads(name: str) -> None:
    spec, weights = weights_as(name, "float32")
    with pytest.raises(UnsupportedError, match=r"cannot be cut there|has both, or neither|go by token ids as well"):
        Cut(spec, weights, list(range(len(spec.layers) + 1)), 1)


@pytest.mark.parametrize("name", [name for name in NATIVE if name not in CANNOT])
def test_H23_spans_have_the_bits_of_the_whole_model(name: str) -> None:
    spec, weights = weights_as(name, "float32")
    rng = random.Random(f"spans-{name}")
    layers = len(spec.layers)
    ends = sorted({0, layers, *(rng.randrange(layers + 1) for _ in range(3)), 1})
    cut = Cut(spec, weights, ends, rng.choice([1, 2]))
    backend = NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), 1, spin_us=5))
    whole = Paged(spec, weights).on(backend)
    ids = [rng.randrange(3, spec.vocab_size) for _ in range(40)]
    at = 0
    while at < len(ids):
        some = ids[at : at + rng.choice([1, 1, 3, 9])]
        at += len(some)
        assert np.array_equal(cut.run(some), np.array(whole.one_go("a", some))), f"tokens before {at}"
