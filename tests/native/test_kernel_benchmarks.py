"""What the kernels' benchmarks stand on: fixed tiles, page orders and unfused programs give what the others give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks import common
from benchmarks.engines import Maker, Run, request
from benchmarks.micro.kernels import attention, fusion, products
from benchmarks.models import Model, spec_of, weights_of

from penstock.model.fuse import PASSES
from tests.native.running import ISAS, each_isa, pool, pytestmark_native

pytestmark = pytestmark_native
BEST = ISAS[-1] if ISAS else "none"


@each_isa
@pytest.mark.parametrize("fmt", products.FORMATS)
def test_calls_of_a_fixed_number_of_rows_give_the_same_bits(
    fmt: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C54: what the choice of a kernel is measured against."""
    monkeypatch.setattr(products, "SLICE_BYTES", 1 << 17)
    w, x = products.matrix(256, 300), products.rows_of(7, 256)
    m = products.packed(pool(isa, 1), fmt, w)
    chosen = products.Product(pool(isa, 1), m, x)
    chosen()
    assert products.error_of(chosen.result(), x, w) <= products.ERRORS[fmt]
    for tile in (1, 2, 3, 7, 8):
        fixed = products.Tiled(pool(isa, 1), m, x, tile)
        fixed()
        assert np.array_equal(fixed.result(), chosen.result()), tile


def test_a_wrong_product_is_seen() -> None:
    w, x = products.matrix(64, 64), products.rows_of(3, 64)
    assert products.error_of(np.zeros((3, 64), np.float32), x, w) > 0.5


@pytest.mark.parametrize("dtype", attention.DTYPES)
def test_orders_of_pages_hold_the_same_numbers(dtype: str) -> None:
    kernels = pool(BEST, 1)
    calls = [
        attention.Call(kernels, (4, 2, 32), [37, 90], 2, dtype=dtype, order=order, block=16)
        for order in attention.ORDERS
    ]
    for call in calls:
        call()
        call.check(call.result(), dtype)
        call.check(call.reference(), "reference", 1e-5)
        call.check(call.matmuls(), "products", 1e-5)
        assert np.array_equal(call.result(), calls[0].result())
    assert len({call.planes["k"].shape for call in calls}) == 2
    with pytest.raises(AssertionError, match="wrong by"):
        calls[0].check(calls[0].result() * np.float32(2), "twice")


@each_isa
def test_every_choice_of_passes_computes_the_same(isa: str) -> None:
    """C59: equal logits, and fewer operations with every pass."""
    spec = spec_of("tiny", layers=2, vocab=256)
    weights = weights_of(spec)
    ids = np.random.default_rng(0).integers(0, 256, 24).tolist()
    found, counts = {}, {}
    for name, passes in {
        **fusion.VARIANTS,
        **{f"without {p}": tuple(q for q in PASSES if q != p) for p in PASSES},
    }.items():
        model = Model(spec, weights, pool(isa, 1), max_len=64, max_tokens=16, passes=passes)
        found[name], counts[name] = model.prefill(ids).copy(), len(model.forward.describe())
    for name, logits in found.items():
        assert np.abs(logits - found["none"]).max() <= 1e-5 * np.abs(found["none"]).max(), name
    by_variant = [counts[name] for name in fusion.VARIANTS]
    assert by_variant == sorted(by_variant, reverse=True)
    assert counts["none"] - counts["all"] >= 2 * 8, "eight operations of a layer at least are saved"


def test_batches_and_pieces_of_a_model() -> None:
    """`Model.step` for several sequences, and its cache, against one text in one go; bytes are those of the arrays."""
    spec = spec_of("tiny", layers=2, vocab=256)
    model = Model(spec, weights_of(spec, "bfloat16"), pool(BEST, 1), max_len=64, max_seqs=2, max_tokens=64)
    texts = [list(range(3, 30)), list(range(60, 100))]
    alone = [model.prefill(text).copy() for text in texts]
    model.step([text[:11] for text in texts], [0, 0])
    both = model.step([text[11:] for text in texts], [11, 11])
    assert np.array_equal(both, alone)
    assert model.kv_bytes(10) == 10 * 2 * 2 * 2 * 16 * 4  # tokens, layers, k and v, kv heads, dimension, bytes
    assert model.weight_bytes == sum(m.num_bytes for m in model.forward.matrices.values())


def test_engines_share_a_program_and_write_the_same() -> None:
    spec = spec_of("tiny", layers=2, vocab=256)
    maker = Maker(spec, weights_of(spec, "bfloat16"), pool(BEST, 1), dtype="bfloat16", max_len=128)
    load = [request(str(i), list(range(5 + i, 20 + 3 * i)), 3 + i) for i in range(5)]
    settings = {"max_num_seqs": 2, "num_gpu_blocks_override": 64, "enable_prefix_caching": False}
    runs = [Run(maker.engine(scheduling_policy=p, **settings)).serve(load) for p in ("fcfs", "static:size=2")]
    assert runs[0].tokens == runs[1].tokens
    assert {name: len(of) for name, of in runs[0].tokens.items()} == {r.request_id: r.max_tokens for r in load}
    assert runs[0].num_tokens == sum(made for _, made in runs[0].steps)
    assert all(t > 0 for t in runs[0].ttft_s)
    assert runs[0].summary()["requests"] == 5


def test_turns_and_figures(tmp_path: Path) -> None:
    order: list[str] = []

    def work(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    samples = common.take_turns({name: work(name) for name in "abc"}, 3, least_s=0.0)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert all(len(of) == 3 for of in samples.values())
    assert common.ratios([2.0, 6.0], [1.0, 2.0]) == {"of_low": 2.0, "low": 2.0, "median": 2.5, "high": 3.0}
    common.save(str(tmp_path / "new" / "x.json"), {"about": common.about(threads=1)})
    assert json.loads((tmp_path / "new" / "x.json").read_text())["about"]["threads"] == 1
