"""Models whose operations run on the kernels, in the interpreter: tables, planes and places as a runner makes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'penstock[gpu]'")

import torch

from penstock.backends.gpu.backend import TorchBackend
from penstock.backends.gpu.kernels import latent_decode, products
from penstock.base.bf16 import narrow
from penstock.core.model_spec import weight_shapes
from penstock.ops.tree import tree_mask
from tests import specs
from tests.paged import Paged
from tests.stored import random_stored

CPU = torch.device("cpu")
IDS = [3 + i * 7 % 50 for i in range(24)]
STEPS: tuple[dict[str, Any], ...] = (
    {"a": (IDS, [len(IDS) - 1]), "b": (IDS[:16], [15])}, {"a": ([5], [0]), "b": (IDS[16:19], [0, 2])},
    {"b": ([9], [0]), "c": (IDS[:3], [2])}, {"a": ([6], [0])},
)  # fmt: skip


def counts(driver: Paged) -> Counter[str]:
    """Calls of operations by kernels and by torch."""
    program: Any = driver.program
    found: Counter[str] = program.kernel_counts
    return found


def drivers_of(
    spec: Any, weights: Any, *, invariant: bool = False, num_slabs: int = 40, **how: Any
) -> tuple[Paged, Paged]:
    """The reference, and the kernels. b has a table with a page of unrelated slabs per layer."""
    plain, own = (Paged(spec, weights, num_slabs=num_slabs, **how) for _ in range(2))
    own.on(TorchBackend(CPU, kernels=True, invariant=invariant))
    for driver in (plain, own):
        driver.make_ragged("b")
    return plain, own


def test_a_latent_of_many_heads_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its planes come to the kernel as one tensor that is keys and values."""
    spec, _ = specs.make("latent")
    mixer = msgspec.structs.replace(spec.layers[0].mixer, num_heads=16, kv_rank=64)  # type: ignore[type-var]
    spec = msgspec.structs.replace(spec, layers=(msgspec.structs.replace(spec.layers[0], mixer=mixer),))
    draw = np.random.default_rng(3)
    weights = {
        name: (draw.standard_normal(shape) / np.sqrt(shape[-1]) + (len(shape) == 1)).astype(np.float32)
        for name, shape in weight_shapes(spec).items()
    }
    calls: list[Any] = []
    real = latent_decode.split_latent
    monkeypatch.setattr(latent_decode, "split_latent", lambda *args: calls.append(real(*args)))
    plain, own = drivers_of(spec, weights, kv_dtype="bfloat16", block_size=16)
    for step in STEPS:
        want, got = plain.run(step), own.run(step)
        for seq in step:
            np.testing.assert_allclose(got[seq], want[seq], atol=3e-2 * float(np.abs(want[seq]).max()))
    assert calls


@pytest.mark.parametrize(
    ("name", "kv_dtype", "block_size", "by_kernels", "by_torch"),
    [
        ("llama_gqa", "float32", 16, {"rms_norm", "add_rms_norm", "rope_write", "activate_gated"}, {"linear"}),
        ("windowed", "float32", 32, {"rms_norm", "add_rms_norm", "rope_write", "activate_gated"}, {"linear"}),
        ("latent", "float32", 16, {"rms_norm", "add_rms_norm", "activate_gated"}, {"linear"}),
        ("scores", "float32", 16, {"rms_norm", "add_rms_norm", "activate_gated"}, {"linear", "layer_norm"}),
        ("llama_mqa", "int8", 16, {"rms_norm", "add_rms_norm", "rope_write", "activate_gated"}, {"linear"}),
        ("layernorm", "bfloat16", 64, {"layer_norm", "add_layer_norm", "rope_write"}, {"linear"}),
        ("llama_gqa", "int4", 16, {"rms_norm", "add_rms_norm", "activate_gated"}, {"linear", "rope_write"}),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_reference(
    name: str, kv_dtype: str, block_size: int, by_kernels: set[str], by_torch: set[str]
) -> None:
    """A prompt, one in chunks, single tokens in company, and one whose layers share a table of slabs."""
    spec, weights = specs.make(name)
    plain, own = drivers_of(spec, weights, kv_dtype=kv_dtype, block_size=block_size)
    for step in STEPS:
        want, got = plain.run(step), own.run(step)
        for seq in step:
            size = float(np.abs(want[seq]).max())
            np.testing.assert_allclose(got[seq], want[seq], atol=(2e-5 if kv_dtype == "float32" else 3e-2) * size)
    if kv_dtype == "float32":
        _planes_are_alike(plain, own)
    found = counts(own)
    assert set(found) == {"embed", *by_kernels, *(f"torch {op}" for op in by_torch)}
    assert found["rope_write"] in (0, len(STEPS) * len(spec.layers))
    program: Any = own.program
    attention = program.attention.counts
    if kv_dtype == "int4":
        assert attention["torch"] == len(STEPS) * len(spec.layers), "codes of half a byte"
    else:
        assert attention["tokens"] > 0
        assert attention["rows"] > 0
        assert attention["torch"] == 0, "all by kernels"


def _planes_are_alike(plain: Paged, own: Paged) -> None:
    """Keys and values are where the tables say, and nowhere else: what nobody wrote is NaN still."""
    for want, got in zip(plain.planes, own.planes, strict=True):
        for name, array in want.items():
            np.testing.assert_allclose(np.asarray(got[name]), array, atol=2e-5 * float(np.nanmax(np.abs(array))))


SHORT: tuple[dict[str, Any], ...] = ({"a": (IDS[:6], [5])}, {"a": ([5], [0])})


@pytest.mark.parametrize("name", [
    "latent", "indexed", "narrow_values", "inner_norms", "key_bias", "mamba2", "rwkv6", "gated", "entries", "experts",
    "parallel", "sandwich", "shared_kv", "blocks", "yoco", "streams", "gated_lru", "shared",
])  # fmt: skip
def test_every_kind_of_layer(name: str) -> None:
    """Fused and joined as kernels have it, a prompt and decode steps say what the reference says."""
    spec, weights = specs.make(name)
    plain, own = drivers_of(spec, weights, block_size=16)
    for step in SHORT:
        want, got = plain.run(step), own.run(step)
        for seq in step:
            np.testing.assert_allclose(got[seq], want[seq], atol=2e-4 * float(np.abs(want[seq]).max()))


@pytest.mark.parametrize("name", ["llama_gqa", "llama_biased", "inner_norms", "parallel", "blocks"])
def test_rows_of_16_bits_where_nobody_needs_more(name: str) -> None:
    """With weights of 16 bits, what is stored between operations is, too: most logits differ by a few roundings."""
    spec, weights = specs.make(name)
    short = {key: narrow(w) if w.ndim == 2 else w for key, w in weights.items()}
    plain, own = drivers_of(spec, short, block_size=16, kv_dtype="bfloat16")
    narrowed = [call for call in own.program.code if call.named.get("narrow")]
    assert narrowed, "nothing is"
    for step in SHORT:
        want, got = plain.run(step), own.run(step)
        for seq in step:
            apart = np.abs(got[seq] - want[seq]) / np.abs(want[seq]).max()
            assert 0 < np.median(apart) < 3e-2


def test_stored_weights_go_through_the_products() -> None:
    """Weights of 32 inputs in blocks; the others of the model are floats."""
    spec, weights = specs.make("llama_gqa")
    held = {key: random_stored("Q4_K", *w.shape) if key.endswith((".q", ".k", ".v", ".o", ".gate", ".up")) else w
            for key, w in weights.items()}  # fmt: skip
    plain, own = drivers_of(spec, held, block_size=16)
    step = {"a": (IDS[:5], [4]), "b": (IDS[:2], [1])}
    want, got = plain.run(step), own.run(step)
    for seq in step:
        np.testing.assert_allclose(got[seq], want[seq], atol=3e-2 * float(np.abs(want[seq]).max()))
    # q, k and v are one product, and so are gate and up.
    assert counts(own)["product_int4"] == 3 * len(spec.layers)
    assert counts(own)["torch linear"] == len(spec.layers) + 1, "down and the head"


@pytest.fixture
def products_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies tiles by BLAS, in which a sum depends on its column's place in the tile."""
    multiply = np.matmul

    def in_float64(a: Any, b: Any, dtype: Any = np.float32) -> Any:
        return multiply(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", in_float64)


@pytest.mark.usefixtures("products_of_a_device")
def test_with_batch_invariant_a_row_has_its_bits_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of any size, in any company: products have one order, prompts are read token by token."""
    spec, weights = specs.make("llama_gqa")
    held = {key: random_stored("Q8_0", *w.shape) if key.endswith((".q", ".k", ".v", ".gate", ".up")) else w
            for key, w in weights.items()}  # fmt: skip
    _, own = drivers_of(spec, held, invariant=True, block_size=16)
    widths: list[int | None] = []
    product = products.product_int8

    def seen(*args: Any, **how: Any) -> Any:
        widths.append(how["columns"])
        return product(*args, **how)

    monkeypatch.setattr(products, "product_int8", seen)
    whole = own.run({"x": (IDS[:18], range(18))})["x"]
    np.testing.assert_array_equal(own.run({"y": ([9, 8], [0]), "b": (IDS[:16], range(16))})["b"], whole[:16])
    for i in (16, 17):
        np.testing.assert_array_equal(own.run({"y": ([4], [0]), "b": (IDS[i : i + 1], [0])})["b"][0], whole[i])
    found = counts(own)
    assert found["product_fixed"] > 0
    assert not found["torch linear"]
    assert found["product_int8"] == len(widths) > 0
    assert set(widths) == {64}, "tiles of other widths have bits of their own on a device"
    program: Any = own.program
    assert program.attention.counts["rows"] == 0


def test_a_tree_of_drafts_is_written_to_its_slots() -> None:
    """Nodes share positions, so they are turned by the same angles, and each has a place of its own."""
    spec, weights = specs.make("llama_gqa")
    bits, depths = tree_mask([-1, 0, 0, 1, 2])
    found = []
    for driver in drivers_of(spec, weights, block_size=16):
        driver.run({"a": (IDS[:14], [13])})
        run = driver.program.run

        def as_tree(plan: Any, planes: Any, run: Any = run) -> Any:
            return run(replace(plan, mask=bits, positions=plan.positions[0] + depths.astype(np.int32)), planes)

        driver.program.run = as_tree
        found.append(driver.run({"a": (IDS[14:19], range(5))})["a"])
    np.testing.assert_allclose(found[1], found[0], atol=2e-5 * float(np.abs(found[0]).max()))
