"""Quest (catalogue row F13): bounds of pages, the choice by them, and what a model reads then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.bf16 import F32, widen
from penstock.base.errors import ConfigError
from penstock.config.selection import SelectionConfig, SelectionOptions, parse_budget, parse_selection
from penstock.core.cache_spec import group_layers
from penstock.core.model_spec import cache_spec
from penstock.core.selection import BOUNDS, PageReads
from penstock.model.emitter import Reading
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.ref.attention.pages import choose_pages, read_bounds, upper_bounds
from penstock.ops.ref.storage import read_kv, write_kv
from penstock.ops.step import Step
from penstock.select.quest import make, page_reads
from tests import specs
from tests.paged import Paged

SIZE, DIM, HEADS = 4, 8, 2


def storage(dtype: str, num_pages: int) -> dict[str, Any]:
    kinds = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16, "int8": np.int8}
    nan = {"bfloat16": 0x7FC0, "int8": -128}.get(dtype, np.nan)
    planes = {name: np.full((num_pages, SIZE, HEADS, DIM), nan, kinds[dtype]) for name in ("k", "v")}
    if dtype == "int8":
        planes |= {name + "_scale": np.full((num_pages, SIZE, HEADS, 1), np.nan, np.float32) for name in ("k", "v")}
    of_bounds = np.float32 if dtype == "int8" else kinds[dtype]
    fill = 0x7FC0 if dtype == "bfloat16" else np.nan
    return planes | {name: np.full((num_pages, 1, HEADS, DIM), fill, of_bounds) for name in BOUNDS}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int8"]),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
)
def test_F13_a_bound_is_never_below_a_true_product(seed: int, sizes: list[int], dtype: str, scale: float) -> None:
    """F13, the property of the method: over random keys, appended in any steps, and any query."""
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    table = rng.permutation(-(-total // SIZE) + 2)[: -(-total // SIZE)].astype(np.int32)
    planes, at = storage(dtype, len(table) + 2), 0
    for n in sizes:
        a, b = (rng.standard_normal((n, HEADS, DIM), dtype=np.float32) * np.float32(scale) for _ in range(2))
        bounds, positions = np.array([0, n], np.int32), np.arange(at, at + n, dtype=np.int32)
        group = GroupPlan(1, SIZE, (table[None],))
        plan = StepPlan(positions, positions, bounds, bounds[1:] + at, np.zeros(0, np.int32), (group,))
        write_kv(Step(plan, [planes]), a, b, 0, 0, ("k", "v"), bounds=BOUNDS)
        at += n
        pages = table[: -(-at // SIZE)]
        keys = read_kv(planes, "k", pages, 0, at)
        low, high = read_bounds(planes, pages)
        for g in range(HEADS):
            q = rng.standard_normal((3, DIM), dtype=np.float32)
            upper = upper_bounds(q, low[:, g], high[:, g])
            products = (keys[:, g].astype(np.float64) @ q.T.astype(np.float64)).max(axis=1)
            for page, bound in enumerate(upper):
                true = products[page * SIZE : (page + 1) * SIZE].max()
                room = 1e-5 * float(np.abs(keys[:, g]).max() * np.abs(q).sum())
                assert bound >= true - room
        for name, least in zip(BOUNDS, (True, False), strict=True):
            held = planes[name][pages, 0]
            held = widen(held) if held.dtype == np.uint16 else held.astype(np.float32)
            for page in range(len(pages)):
                own = keys[page * SIZE : (page + 1) * SIZE]
                np.testing.assert_array_equal(held[page], own.min(axis=0) if least else own.max(axis=0))


def test_F13_the_pages_that_matter_are_found() -> None:
    """F13: recall. Keys alike in a page (as neighbours in a text are) and a query near one of them."""
    rng = np.random.default_rng(1)
    pages, size, dim, found, best = 200, 16, 32, 0, 0
    reads, tries = PageReads(share=0.1, recent=16), 50
    for _ in range(tries):
        centres = rng.standard_normal((pages, 1, dim))
        keys = (centres + 0.3 * rng.standard_normal((pages, size, dim))).astype(np.float32)
        q = (centres[rng.integers(pages), 0] + 0.5 * rng.standard_normal(dim)).astype(np.float32)[None]
        chosen = choose_pages(upper_bounds(q, keys.min(axis=1), keys.max(axis=1)), pages * size, size, reads)
        true = (keys @ q[0]).max(axis=1)
        top = np.argsort(-true)[:10]
        found += len(np.intersect1d(top, chosen))
        best += int(top[0] in chosen)
        assert len(chosen) == 20
    assert best == tries, "the page with the largest product is always read"
    assert found / (10 * tries) > 0.8, f"recall of the ten best is {found / (10 * tries)}; chance finds 0.1"


def test_F13_choice_by_hand() -> None:
    upper = np.array([1, 5, 5, -2, 5, 0, 9, 9], np.float32)
    reads = PageReads(tokens=16, recent=4)
    assert choose_pages(upper, 32, 4, reads).tolist() == [1, 2, 6, 7], "equals go to the lower page; the last is read"
    assert choose_pages(upper[:7], 26, 4, reads).tolist() == [1, 2, 5, 6], "recent tokens span two pages"
    assert choose_pages(upper, 32, 4, PageReads(tokens=4, recent=9)).tolist() == [5, 6, 7], "recent ones always"
    upper[3] = np.nan
    assert choose_pages(upper, 32, 4, reads).tolist() == [1, 3, 6, 7]
    for n in range(1, 200):
        for reads in (PageReads(share=0.25, recent=10), PageReads(tokens=50, recent=1), PageReads()):
            pages = -(-n // 16)
            chosen = choose_pages(np.arange(pages, dtype=np.float32), n, 16, reads)
            assert len(chosen) == reads.num_pages(n, 16) <= pages
            assert chosen[-1] == pages - 1
            wanted = reads.tokens or reads.share * n
            recent = pages - max(0, n - reads.recent) // 16
            assert len(chosen) <= max(-(-int(np.ceil(min(wanted, n))) // 16), recent)


def test_F13_bytes_read_fall_to_the_budget() -> None:
    """F13: pages of keys and values, and the bounds of all, against all pages; in units of a page's bytes."""
    n, size, reads = 16384, 16, PageReads(share=0.125)
    pages = n // size
    bounds = 2 * pages / (2 * size)
    read = reads.num_pages(n, size) + bounds
    assert reads.num_pages(n, size) == 128
    assert pages / read > 5


def test_F13_selector_keeps_everything() -> None:
    config = SelectionConfig("quest", parse_budget("25%"), SelectionOptions(recent=7, dense_layers=1))
    assert page_reads(config) == PageReads(None, 0.25, 7, 1)
    assert page_reads(SelectionConfig("quest", parse_budget("96"), SelectionOptions())) == PageReads(96, 1.0, 32, 2)
    parsed = parse_selection("quest", "25%", '{"dense_layers": 0, "recent": 64}')
    assert parsed is not None
    assert page_reads(parsed) == PageReads(None, 0.25, 64, 0)
    with pytest.raises(ConfigError, match="dense_layers"):
        parse_selection("quest", "25%", '{"dense_layers": -1}')
    quest: Any = make(None)  # type: ignore[arg-type]
    assert (quest.name, quest.drops, quest.watches, quest.per_head) == ("quest", "nothing", "nothing", False)
    assert [kept.tolist() for kept in quest.select(None, [range(3), range(2)])] == [[0, 1, 2], [0, 1]]


def test_F13_pages_have_bounds_of_their_keys() -> None:
    spec, _ = specs.make("llama_gqa")
    for kv_dtype, of_bounds in (("bfloat16", "bfloat16"), ("int8", "float32")):
        (group,) = group_layers([cache_spec(layer, kv_dtype, bounds=True) for layer in spec.layers])
        keys = group.spec.planes[0]
        assert [(p.name, p.heads, p.dim, p.dtype) for p in group.spec.page_planes] == [
            (name, keys.heads, keys.dim, of_bounds) for name in BOUNDS
        ]


IDS = tuple(int(x) for x in np.random.default_rng(2).integers(3, 60, 64))


def quest(reads: PageReads | None, attention: str = "ref", **more: Any) -> Paged:
    spec, weights = specs.make("llama_gqa")
    return Paged(spec, weights, reading=Reading(pages=reads), attention=attention, **more)


@pytest.mark.parametrize("attention", ["ref", "ref-online"])
def test_F13_laws_of_a_model(attention: str) -> None:
    """F13: exact at a full budget; less is read by tokens alone in their step; company, pages and cuts of the prompt
    change nothing.
    """
    sizes = (40, 1)
    spec, weights = specs.make("llama_gqa")
    plain = Paged(spec, weights, attention=attention).chunked("a", IDS, sizes)
    np.testing.assert_array_equal(quest(PageReads(), attention).chunked("a", IDS, sizes), plain)
    all_dense = PageReads(share=0.25, recent=4, dense_layers=len(spec.layers))
    np.testing.assert_array_equal(quest(all_dense, attention).chunked("a", IDS, sizes), plain)
    reads = PageReads(share=0.25, recent=4, dense_layers=0)
    want = quest(reads, attention).chunked("a", IDS, sizes)
    np.testing.assert_array_equal(want[:40], plain[:40])
    assert np.abs(want[40:] - plain[40:]).max() > 1e-3
    other = quest(reads, attention, seed=5)
    parts: list[F32] = [other.run({"b": (IDS[:9], [0]), "a": (IDS[:17], range(17))})["a"]]
    parts.append(other.run({"a": (IDS[17:40], range(23)), "c": (IDS[:30], [0])})["a"])
    parts += [other.run({"c": ([i], [0]), "a": ([i], [0]), "b": ([i], [0])})["a"] for i in IDS[40:]]
    np.testing.assert_array_equal(np.concatenate(parts), want)


def test_F13_C10_layers_that_share_keys_choose_where_the_one_that_keeps_them_does() -> None:
    """Pages of a dense layer have no bounds for those that read its keys; elsewhere each layer chooses for itself."""
    spec, weights = specs.make("shared_kv")
    plain = Paged(spec, weights).chunked("a", IDS, (40, 1))
    for dense, choosing in ((1, {2, 3}), (0, {0, 1, 2, 3}), (3, set())):
        full = Paged(spec, weights, reading=Reading(pages=PageReads(dense_layers=dense)))
        nodes = [node for node in full.graph.nodes if node.op == "attention"]
        assert {node.layer for node in nodes if "pages" in node.named} == choosing
        np.testing.assert_array_equal(full.chunked("a", IDS, (40, 1)), plain)
    some = Paged(spec, weights, reading=Reading(pages=PageReads(share=0.25, recent=4, dense_layers=0)))
    assert np.abs(some.chunked("a", IDS, (40, 1))[40:] - plain[40:]).max() > 1e-3


@pytest.mark.parametrize("attention", ["ref", "ref-online"])
def test_F13_tokens_behind_their_prompt_choose_however_they_come(attention: str) -> None:
    """F13: where the plan says from which position on, no cut of the text changes a bit."""
    reads, whole = PageReads(share=0.25, recent=4, dense_layers=0), None
    for n, sizes in enumerate([(40, 1), (1,), (64,), (17, 23, 3, 1, 9), (39, 1, 24)]):
        paged = quest(reads, attention, seed=n)
        paged.choose_from["a"] = 40
        got = paged.chunked("a", IDS, sizes)
        whole = got if whole is None else whole
        np.testing.assert_array_equal(got, whole)
    assert whole is not None
    np.testing.assert_array_equal(whole, quest(reads, attention).chunked("a", IDS, (40, 1)))
