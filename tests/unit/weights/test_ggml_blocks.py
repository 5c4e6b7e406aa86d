"""Every block type of ggml: values are its own library's bit for bit, and what is stored says the same."""

from __future__ import annotations

import base64
import hashlib
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends import BACKENDS
from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.held_weights import HeldWeights
from penstock.core.matrix_format import NONE, parse_scheme
from penstock.core.weight_map import Cut
from penstock.families.blocks import block_ref
from penstock.families.checkpoint import Codes
from penstock.families.registry import open_model, read_model
from penstock.formats.ggml import GGML_FORMATS
from penstock.formats.gguf import read_gguf
from penstock.formats.tensor_ref import BLOCKS, TensorRef
from penstock.ops.ref.product import linear
from penstock.ops.stored import StoredMatrix, alike, as_numbers
from penstock.plan.weights import hold_weights
from penstock.weights import load as loading
from penstock.weights.load import load_weights
from penstock.weights.stored import STORED_FORMATS
from penstock.weights.stored.ggml import matrix as matrix_module
from penstock.weights.stored.ggml.grid_points import grid
from penstock.weights.stored.ggml.matrix import BlockMatrix, decoded_blocks
from tests.blocks import (
    HALVES,
    WITHOUT_ORACLE,
    floats_set,
    golden,
    golden_blocks,
    oracle,
    random_blocks,
    write_blocks,
)
from tests.ggml import tensor_entry
from tests.unit.formats.test_formats import refusal

KINDS = list(GGML_FORMATS)
GRIDS = [kind for kind in KINDS if GGML_FORMATS[kind].code == "grid"]


def bits(x: Any) -> Any:
    return np.ascontiguousarray(x).view(np.uint32)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_library(kind: str) -> None:
    """Every bit of every byte is drawn; only what is not finite is left out."""
    blocks = random_blocks(kind, 700, np.random.default_rng(KINDS.index(kind)))
    want = oracle(kind, blocks)
    assert len(np.unique(want)) > 100
    np.testing.assert_array_equal(bits(decoded_blocks(kind, blocks)), bits(want))


@pytest.mark.parametrize("kind", KINDS)
def test_L15_values_are_those_of_ggmls_c_code(kind: str) -> None:
    """Made by tools/oracles/ggml_decode.py."""
    blocks, made = golden_blocks(kind), golden()[kind]
    got = decoded_blocks(kind, blocks)
    assert hashlib.sha256(got.tobytes()).hexdigest() == made["sha256"]
    assert ("values" in made) == (kind in WITHOUT_ORACLE)
    if kind in WITHOUT_ORACLE:
        want = np.frombuffer(base64.b64decode(made["values"]), np.float32)
        np.testing.assert_array_equal(bits(got.reshape(-1)), bits(want))
        np.testing.assert_array_equal(bits(oracle(kind, blocks).reshape(-1)), bits(want), err_msg="the tests' oracle")


def made(kind: str, n: int, per: int, rows: Any = None, scale: float | None = None) -> tuple[BlockMatrix, Any]:
    """A matrix [n, per blocks], or these rows of it, and its values."""
    numbers, _ = BLOCKS[kind]
    blocks = random_blocks(kind, n * per, np.random.default_rng(n), scale)
    values = oracle(kind, blocks).reshape(n, per * numbers)
    values = values if rows is None else values[rows]
    return matrix_of(kind, blocks.reshape(-1), values.shape, rows), values


def matrix_of(kind: str, data: Any, shape: tuple[int, int], rows: Any = None) -> BlockMatrix:
    codes = Codes(kind.lower(), GGML_FORMATS[kind])
    found = STORED_FORMATS.get(codes.layout)(codes, {"codes": data}, shape, np.dtype(np.float32), rows)
    assert isinstance(found, BlockMatrix)
    return found


@pytest.mark.parametrize("rows", [None, np.array([5, 0, 3, 3, 8])], ids=["all", "some"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_gives_its_parts_by_rows(kind: str, rows: Any) -> None:
    """What the format says of codes, scales and zeros, computed another way, is what the values are."""
    w, values = made(kind, 9, 3, rows)
    n, k = w.shape
    np.testing.assert_array_equal(bits(w.values()), bits(values))
    np.testing.assert_array_equal(bits(w.values(1, 4)), bits(values[1:4]))
    np.testing.assert_array_equal(bits(w.take(np.array([3, 0, 3], np.int32))), bits(values[[3, 0, 3]]))
    whole, part = w.codes(0, n), w.codes(1, 3)
    np.testing.assert_array_equal(part, whole[1:3])
    assert w.fault() is None
    if kind in GRIDS:
        assert (whole.dtype, whole.shape) == (np.uint8, (n, 3, BLOCKS[kind][1]))
        np.testing.assert_array_equal(bits(decoded_blocks(kind, whole.reshape(n * 3, -1)).reshape(n, k)), bits(values))
        assert (w.scales(0, n), w.zeros(0, n)) == ((), ())
        return
    f = w.format
    assert (whole.dtype, whole.shape) == (np.int8 if f.code == "int" else np.uint8, (n, k))
    low, high = (-128, 127) if f.code == "int" else (0, 2**f.bits - 1)
    assert low <= whole.min() < whole.max() <= high
    sums = []
    for levels, parts, cut in ((f.scales, w.scales(0, n), w.scales(1, 3)), (f.zeros, w.zeros(0, n), w.zeros(1, 3))):
        assert len(levels) == len(parts)
        total = np.ones((n, k)) if levels else np.zeros((n, k))
        for level, found, some in zip(levels, parts, cut, strict=True):
            assert found.shape == (n, -(-k // level.columns))
            np.testing.assert_array_equal(some, found[1:3])
            total = total * as_numbers(level.dtype, found).astype(float).repeat(level.columns, axis=1)
        sums.append(total)
    tables: dict[str, Any] = {"table": np.array(f.table), "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])}
    units = whole.astype(float) - f.offset
    if f.code == "e2m1":
        units = tables["e2m1"][whole & 7] * np.where(whole > 7, -1, 1)
    elif f.code == "table":
        units = tables["table"][whole]
    np.testing.assert_array_equal((units * sums[0] - sums[1]).astype(np.float32), values)


@pytest.mark.parametrize("kind", KINDS)
def test_the_format_has_the_bytes_of_the_block(kind: str) -> None:
    numbers, size = BLOCKS[kind]
    counted = GGML_FORMATS[kind].num_bytes((6, 4 * numbers)), GGML_FORMATS[kind].bytes_each * numbers
    sums = 32 if kind == "Q8_K" else 0  # of its codes, which nobody needs
    assert counted == (24 * (size - sums), size - sums)
    w, _ = made(kind, 6, 4)
    assert (w.nbytes, [a.nbytes for a in w.arrays]) == (counted[0], [24 * size])


@pytest.mark.parametrize("kind", KINDS)
def test_long_runs_of_rows_are_those_of_short_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, values = made(kind, 10, 2)
    want = w.codes(0, 10)
    monkeypatch.setattr(matrix_module, "_CHUNK_BLOCKS", 7)
    got = w.codes(0, 10)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    assert w.fault() is None
    np.testing.assert_array_equal(bits(w.values()), bits(values))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_a_value_that_is_not_finite(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of any bytes at all, one at a time, and of one bad block among many."""
    blocks = np.random.default_rng(3).integers(0, 256, (400, BLOCKS[kind][1]), np.uint8)
    if kind == "MXFP4":
        blocks[:60, 0] = 248 + np.arange(60) % 8
    if kind == "Q8_K":
        blocks[:60, :4] = (
            (np.array([0x7E000000], "<u4") + np.arange(60)[:, None] * 0x90000).astype("<u4").view(np.uint8)
        )
    if HALVES[kind]:
        blocks[0, HALVES[kind][-1] + 1] |= 0x7C
    if kind == "IQ1_M":
        blocks[0, 55] |= 0xF0
        blocks[0, 53] |= 0xC0
    seen = set()
    for block in blocks:
        w = matrix_of(kind, block, (1, BLOCKS[kind][0]))
        with np.errstate(all="ignore"):
            finite = bool(np.isfinite(w.values()).all())
            if kind != "NVFP4":  # no file has a scale with a sign, which ggml overlooks
                assert finite == np.isfinite(oracle(kind, block[None])).all() or block[0] == 255
        assert w.fault() == (None if finite else "holds NaN or infinity")
        seen.add(finite)
    assert seen == {True, False}
    monkeypatch.setattr(matrix_module, "_CHUNK_BLOCKS", 7)
    many = random_blocks(kind, 30, np.random.default_rng(0), 0.5)
    for bad in (0, 29):
        data = many.copy()
        floats_set(kind, data[bad : bad + 1], np.nan)
        assert matrix_of(kind, data, (10, 3 * BLOCKS[kind][0])).fault()
        rows = np.array([4, 5])
        spared = matrix_of(kind, data, (2, 3 * BLOCKS[kind][0]), rows)
        assert spared.fault() is None, "rows that are no part of it"


def test_a_scale_of_nvfp4_has_no_sign() -> None:
    """Unsigned by definition; what ggml makes of the bit, nothing, is no reason to guess."""
    block = random_blocks("NVFP4", 1, np.random.default_rng(0), 1.0)
    for scale in range(256):
        block[:, 2] = scale
        w = matrix_of("NVFP4", block, (1, 64))
        assert (w.fault() is None) == (scale < 127), scale


def test_grids_have_as_many_points_as_indices() -> None:
    sizes = {"IQ1_S": 2048, "IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024, "IQ3_XXS": 256, "IQ3_S": 512}
    for kind, size in sizes.items():
        assert grid(kind).shape == (size, 4 if kind.startswith("IQ3") else 8)


# --- whole files


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Q2_0"])  # which the package does not know
def test_a_file_of_blocks_is_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_CHUNK", 3000)
    values = write_blocks(tmp_path / "m.gguf", {"": kind})
    checkpoint = open_model(tmp_path)
    assert checkpoint.stored == read_model(tmp_path).stored
    assert set(checkpoint.stored.values()) == {GGML_FORMATS[kind]}
    assert len(checkpoint.stored) == 9
    assert checkpoint.spec.dtype == "bfloat16"
    done: list[tuple[int, int]] = []
    decoded = load_weights(checkpoint, checkpoint.spec, "float32", lambda *at: done.append(at))
    assert done[-1][0] == done[-1][1]
    held = load_weights(checkpoint, checkpoint.spec, HeldWeights("float32", checkpoint.stored))
    names = {"layers.0.down": "blk.0.ffn_down", "layers.0.k": "blk.0.attn_k", "embed": "token_embd"}
    for logical, name in names.items():
        kept = held[logical]
        assert isinstance(kept, StoredMatrix)
        assert kept.arrays[0].base is not None, "a view of the file"
        for got in (decoded[logical], kept.values()):
            np.testing.assert_array_equal(bits(got), bits(values[name]), err_msg=logical)
    ids = np.array([3, 39, 0, 3], np.int32)
    np.testing.assert_array_equal(held["embed"].take(ids), values["token_embd"][ids])
    rows = np.random.default_rng(0).standard_normal((3, 512), dtype=np.float32)
    np.testing.assert_array_equal(linear(rows, held["layers.0.down"]), linear(rows, decoded["layers.0.down"]))


def test_experts_stay_blocks_of_their_stacks(tmp_path: Path) -> None:
    values = write_blocks(tmp_path / "m.gguf", {"": "Q4_K", "down": "Q6_K", "up": "IQ2_S"}, experts=3)
    checkpoint = open_model(tmp_path)
    held = load_weights(checkpoint, checkpoint.spec, HeldWeights("float32", checkpoint.stored))
    decoded = load_weights(checkpoint, checkpoint.spec, "float32")
    for part in ("gate", "up", "down"):
        for n in range(3):
            name = f"layers.0.experts.{n}.{part}"
            kept = held[name]
            assert isinstance(kept, StoredMatrix)
            assert kept.arrays[0].nbytes == kept.nbytes, "this expert's bytes"
            want = values[f"blk.0.ffn_{part}_exps"][n]
            np.testing.assert_array_equal(kept.values(), want)
            np.testing.assert_array_equal(decoded[name], want)
    assert not alike(held["layers.0.experts.0.gate"], held["layers.0.experts.0.up"])


@pytest.mark.parametrize("experts", [0, 3])
def test_a_matrix_of_nvfp4_may_have_a_scale_beside_it(tmp_path: Path, experts: int) -> None:
    values = write_blocks(tmp_path / "m.gguf", {"": "NVFP4"}, experts=experts, factor=0.3)
    c = open_model(tmp_path)
    held = load_weights(c, c.spec, HeldWeights("float32", c.stored))
    decoded = load_weights(c, c.spec, "float32")
    names = {"layers.0.q": values["blk.0.attn_q"], "lm_head": values["output"]}
    names |= {f"layers.0.experts.{n}.down": values["blk.0.ffn_down_exps"][n] for n in range(experts)}
    for name, want in names.items():
        kept = held[name]
        assert isinstance(kept, StoredMatrix)
        assert [s.shape[1] for s in kept.scales(0, 5)] == [kept.shape[1] // 16, 1]
        assert (kept.nbytes, len(kept.arrays)) == (kept.arrays[0].nbytes + 4, 2)
        np.testing.assert_array_equal(bits(kept.values()), bits(want), err_msg=name)
        np.testing.assert_array_equal(bits(kept.values(2, 7)), bits(want[2:7]), err_msg=name)
        np.testing.assert_array_equal(bits(decoded[name]), bits(want), err_msg=name)


@pytest.mark.parametrize(("kind", "factor", "says", "kind_of_error"), [
    ("NVFP4", np.ones(2, np.float32), "(2,)", ModelError), ("NVFP4", np.ones(1, np.float16), "F16", ModelError),
    ("NVFP4", np.ones((1, 1), np.float32), "(1, 1)", ModelError),
    ("Q4_K", np.ones(1, np.float32), "does not have", UnsupportedError),
])  # fmt: skip
def test_a_scale_that_does_not_belong_there_is_refused(
    tmp_path: Path, kind: str, factor: Any, says: str, kind_of_error: type[ModelError]
) -> None:
    write_blocks(tmp_path / "m.gguf", {"": kind}, further={"blk.0.attn_q.scale": factor})
    refusal(lambda: open_model(tmp_path), "'blk.0.attn_q.scale'", says, kind=kind_of_error)


@pytest.mark.parametrize("factor", [np.nan, np.inf, -np.inf, 1e38])
def test_a_scale_beside_a_matrix_is_a_number(tmp_path: Path, factor: float) -> None:
    write_blocks(tmp_path / "m.gguf", {"": "NVFP4"}, further={"blk.0.attn_q.scale": np.array([factor], np.float32)})
    c = open_model(tmp_path)
    for held in (HeldWeights("bfloat16"), HeldWeights("bfloat16", c.stored)):
        refusal(lambda h=held: load_weights(c, c.spec, h), "'blk.0.attn_q.weight'", f"{factor:.3g}")


@pytest.mark.parametrize(("cut", "shape", "rows"), [
    (None, (12, 256), slice(None)), (Cut("x", (12, 256), ((4, 9),)), (5, 256), slice(4, 9)),
    (Cut("x", (12, 256), ((0, 12, 3), (0, 256))), (4, 256), slice(0, 12, 3)),
    (Cut("x", (12, 256), view=(2, 3, 2, 256), axes=(0, 2, 1, 3)), (12, 256), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]),
    (Cut("x", (3, 4, 256), (1,)), (4, 256), slice(4, 8)),
    (Cut("x", (3, 4, 256), (2, (1, 3))), (2, 256), slice(9, 11)),
])  # fmt: skip
def test_choices_of_rows_stay_blocks(tmp_path: Path, cut: Cut | None, shape: tuple[int, int], rows: Any) -> None:
    ref = referred(tmp_path, cut, shape)
    assert ref.codes is not None
    source, values = read_part(tmp_path, ref, shape)
    np.testing.assert_array_equal(source.values(), values[rows])


@pytest.mark.parametrize(("cut", "shape"), [
    (Cut("x", (12, 256), axes=(1, 0)), (256, 12)), (Cut("x", (12, 256), ((0, 12), (0, 128))), (12, 128)),
    (Cut("x", (12, 256), view=(24, 128)), (24, 128)), (Cut("x", (3, 4, 256), (1,), axes=(1, 0)), (256, 4)),
    (Cut("x", (12, 256), view=(12, 256, 1)), (12, 256, 1)), (Cut("x", (13, 256), ((0, 4),)), (4, 256)),
    (Cut("x", (12, 256), (3,)), (256,)), (Cut("x", (12, 256), ((0, 6),)), (12, 128)),
    (Cut("x", (256, 256), axes=(1, 0)), (256, 256)), (Cut("x", (3, 4, 256), ((0, 2),)), (8, 256)),
])  # fmt: skip
def test_other_parts_are_decoded(tmp_path: Path, cut: Cut, shape: tuple[int, ...]) -> None:
    ref = referred(tmp_path, cut, shape)
    assert ref.codes is None
    if cut.shape == ref.tensor.shape:  # not what is refused for its shape
        factor = TensorRef(tmp_path / "x", "x.scale", "F32", cut.shape[:-2] or (1,), 0, 12)
        refusal(lambda: block_ref(ref.tensor, cut, shape, factor), "'x'", "no rows", kind=UnsupportedError)


def referred(folder: Path, cut: Cut | None, shape: tuple[int, ...]) -> Any:
    """The reference to a part of rows of one block each, whose bytes are in a file."""
    stored = (12, 256) if cut is None or cut.shape[0] == 13 else cut.shape
    blocks = random_blocks("Q4_K", prod(stored) // 256, np.random.default_rng(2))
    (folder / "x").write_bytes(blocks.tobytes())
    return block_ref(TensorRef(folder / "x", "x", "Q4_K", stored, 0, blocks.nbytes), cut, shape)


def read_part(folder: Path, ref: Any, shape: tuple[int, int]) -> tuple[StoredMatrix, Any]:
    found = loading._codes({folder / "x": loading._map(folder / "x")}, ref, shape, "float32")
    blocks = np.frombuffer((folder / "x").read_bytes(), np.uint8).reshape(12, -1)
    return found, oracle("Q4_K", blocks)


def test_what_is_held_of_blocks(tmp_path: Path) -> None:
    """The blocks' codes, whoever computes, and of the table, too; a scheme keeps those that are its own."""
    write_blocks(tmp_path / "m.gguf", {"": "Q4_K", "down": "Q4_0"})
    c = open_model(tmp_path)

    def held(backend: str, scheme: str = "none", dtype: str = "bfloat16") -> Any:
        traits = BACKENDS.traits(backend)
        return hold_weights(c.spec, dtype, parse_scheme(scheme), c.stored, traits=traits, exact=True)

    for backend in ("ref", "native"):
        assert held(backend).of("layers.0.q") == held(backend).of("embed") == GGML_FORMATS["Q4_K"]
        assert held(backend).of("layers.0.down") == GGML_FORMATS["Q4_0"]
    scheme = parse_scheme("int4-w4a8:32")
    assert held("native", scheme.name).of("layers.0.q") == scheme.format
    assert held("native", scheme.name).of("layers.0.down") == GGML_FORMATS["Q4_0"]


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0", "MXFP4", "NVFP4", "IQ1_M", "Q8_K"])
def test_a_scale_that_is_no_number_is_named(tmp_path: Path, kind: str) -> None:
    write_blocks(tmp_path / "m.gguf", {"": kind})
    c = open_model(tmp_path)
    tensor = c.weights["layers.0.up"].tensor
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    size = BLOCKS[kind][1]
    at = tensor.offset + (prod(tensor.shape) // BLOCKS[kind][0] - 1) * size
    block = np.frombuffer(bytes(data[at : at + size]), np.uint8).reshape(1, size).copy()
    floats_set(kind, block, np.nan)
    data[at : at + size] = block.tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    broken = open_model(tmp_path)
    for held in (HeldWeights("bfloat16"), HeldWeights("bfloat16", broken.stored)):
        refusal(lambda h=held: load_weights(broken, broken.spec, h), "'blk.0.ffn_up.weight'", "m.gguf", "NaN")


@pytest.mark.parametrize(("type_id", "rows", "says"), [
    (12, 128, "Q4_K codes 256 together"), (40, 32, "NVFP4 codes 64 together"), (41, 64, "Q1_0 codes 128 together"),
    (139, 256, "type 139, which Penstock does not know; quantise the model again"), (43, 256, "type 43"),
])  # fmt: skip
def test_rows_of_no_whole_blocks_and_unknown_types_are_named(
    tmp_path: Path, type_id: int, rows: int, says: str
) -> None:  # fmt: skip
    entry = tensor_entry("x", (2, rows), type_id, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry
    (tmp_path / "m.gguf").write_bytes(head + bytes(4096))
    refusal(lambda: read_gguf(tmp_path / "m.gguf"), "'x'", "m.gguf", says,
            kind=UnsupportedError if "type" in says else ModelError)  # fmt: skip


def test_a_file_that_ends_in_a_block_is_refused(tmp_path: Path) -> None:
    write_blocks(tmp_path / "m.gguf", {"": "IQ4_XS"})
    data = (tmp_path / "m.gguf").read_bytes()
    c = open_model(tmp_path)
    end = max(ref.tensor.offset + ref.tensor.nbytes for ref in c.weights.values())
    (tmp_path / "m.gguf").write_bytes(data[: end - 1])
    refusal(lambda: open_model(tmp_path), "m.gguf", "1 bytes after the file", kind=ModelError)
    # Shorter since its header was read.
    refusal(lambda: load_weights(c, c.spec, HeldWeights("float32", c.stored)), "m.gguf", "shorter")
    assert hold_weights(c.spec, "float32", NONE, c.stored, traits=BACKENDS.traits("ref"), exact=True).matrices
