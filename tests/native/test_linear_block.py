"""Products with codes as files have them: panels, rows in blocks, and rows that do not know each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.errors import EngineError
from penstock.ops.native.abi import Act, Code, Kind, Scale, Zero
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import Segments
from penstock.ops.native.program import NativeOp
from tests.native.blocks import Blocks, Key, random_blocks
from tests.native.running import ISAS, THREADS, each_isa, each_threads, execute, plan_of, within

FORMATS: dict[str, Key] = {
    "int8": (Code.U8, 0, Scale.F32, Zero.NONE, 128),
    "q8_0": (Code.U8, 32, Scale.F16, Zero.NONE, 128),
    "gptq8": (Code.U8, 128, Scale.F16, Zero.U8, 0),
    "channel8": (Code.U8, 0, Scale.BF16, Zero.U8, 0),
    "q8_k": (Code.U8, 256, Scale.F32, Zero.NONE, 128),
    "q6_k": (Code.U6, 16, Scale.I8_F16, Zero.NONE, 32),
    "q5_k": (Code.U5, 32, Scale.U8_F16, Zero.U8_F16, 0),
    "q5_0": (Code.U5, 32, Scale.F16, Zero.NONE, 16),
    "q4_k": (Code.U4, 32, Scale.U8_F16, Zero.U8_F16, 0),
    "q4_0": (Code.U4, 32, Scale.F16, Zero.NONE, 8),
    "q4_1": (Code.U4, 32, Scale.F16, Zero.F16, 0),
    "gptq4": (Code.U4, 128, Scale.F16, Zero.U8, 0),
    "hqq4": (Code.U4, 64, Scale.F16, Zero.F16_CODES, 0),
    "hqq4_bf16": (Code.U4, 64, Scale.BF16, Zero.BF16_CODES, 0),
    "row4": (Code.U4, 0, Scale.F16, Zero.F16, 0),
    "q3_k": (Code.U3, 16, Scale.I8_F16, Zero.NONE, 4),
    "gptq3": (Code.U3, 64, Scale.F16, Zero.U8, 0),
    "q2_k": (Code.U2, 16, Scale.U8_F16, Zero.U8_F16, 0),
    "tq2_0": (Code.U2, 256, Scale.F16, Zero.NONE, 1),
    "iq4_xs": (Code.T4, 32, Scale.I8_F16, Zero.NONE, 0),
    "mxfp4": (Code.T4, 32, Scale.E8M0, Zero.NONE, 0),
    "nvfp4": (Code.T4, 16, Scale.E4M3, Zero.NONE, 0),
    "nf4": (Code.F4, 64, Scale.F32, Zero.NONE, 0),
    "fp8_block": (Code.E4M3, 128, Scale.F32, Zero.NONE, 0),
    "fp8_channel": (Code.E4M3, 0, Scale.BF16, Zero.NONE, 0),
    "mxfp8": (Code.E4M3, 32, Scale.E8M0, Zero.NONE, 0),
}
each_format = pytest.mark.parametrize("name", FORMATS)
INTEGER = [n for n, key in FORMATS.items() if key[0] not in (Code.F4, Code.E4M3)]


def library(isa: str) -> Any:
    return open_library(libraries()[isa])


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def columns(key: Key, longer: bool = False) -> int:
    """Inputs that fill neither units nor chunks, if the format may have so many."""
    supers = key[2] in (Scale.U8_F16, Scale.I8_F16)
    return (512 if longer else 256) if supers else 600 if longer else 203


def linear(isa: str, x: F32, matrix: Blocks, threads: int = 1) -> F32:
    def make(numbers: list[int], out: int) -> NativeOp:
        return NativeOp(Kind.LINEAR, (numbers[0],), out, (0, 0, 0), (0.0, 1.0, 0.0), (matrix,))

    return execute(isa, threads, [x], matrix.num_rows, make)


def rows_in_blocks(x: F32, block: int) -> tuple[npt.NDArray[np.int64], F32]:
    """Rows [T, K] as values of 8 bits, [T, blocks, block], and the scales of the blocks, as the header says."""
    padded = np.zeros((len(x), -(-x.shape[1] // block) * block), np.float32)
    padded[:, : x.shape[1]] = x
    parts = padded.reshape(len(x), -1, block)
    most = np.abs(parts).max(axis=2, keepdims=True)
    lift = np.where(most < 2.0**-64, np.float32(2.0**64), np.float32(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.rint(parts * lift * (np.float32(127) / (most * lift)))
    return np.where(most > 0, values, 0).astype(np.int64), (most / np.float32(127))[..., 0]


@each_isa
@each_format
def test_values_are_those_of_a_reader(isa: str, name: str) -> None:
    key = FORMATS[name]
    m = random_blocks(1, 70, columns(key), key, factor=0.5).pack(library(isa))
    np.testing.assert_array_equal(m.values(library(isa)), m.exact())


@each_isa
@pytest.mark.parametrize("name", INTEGER)
@pytest.mark.parametrize("longer", [False, True])
def test_integer_products(isa: str, name: str, longer: bool) -> None:
    key = FORMATS[name]
    k = columns(key, longer)
    x = normal(2, 9, k)
    x[3] = 0
    m = random_blocks(3, 70, k, key, factor=0.75).pack(library(isa))
    block = key[1] if key[1] in (64, 128) else 32
    values, units = rows_in_blocks(x, block)
    seen = (values * units[..., None].astype(np.float64)).reshape(9, -1)[:, :k]
    exact = m.exact().astype(np.float64)
    # Codes and what zeros take from them are summed apart.
    sizes = np.abs(m.integers().astype(np.float64)) * np.repeat(np.abs(m.units()), key[1] or k, axis=1)[:, :k]
    bound = (np.abs(seen) @ (2 * sizes + np.abs(exact)).T) * 2.0**-24 * (3 * k / (16 if key[1] == 16 else 32) + 4)
    within(linear(isa, x, m), seen @ exact.T, bound)


@each_isa
@each_threads
@pytest.mark.parametrize("name", ["q6_k", "q4_k", "gptq4"])
@pytest.mark.sampled(6)
def test_rows_that_stay_near_are_the_same_alone(isa: str, threads: int, name: str) -> None:
    """So long that several blocks of rows meet all panels, one block after the other, and the last one is shorter."""
    k, num_rows = 8192, 200
    x = normal(71, num_rows, k)
    m = random_blocks(72, 70, k, FORMATS[name]).pack(library(isa))
    together = linear(isa, x, m, threads)
    some = [0, 71, 72, 100, 143, 144, 199]
    np.testing.assert_array_equal(together[some], np.concatenate([linear(isa, x[i : i + 1], m) for i in some]))
    assert len(np.unique(together[:, 0])) == num_rows


@each_isa
@each_format
@pytest.mark.parametrize("act", [Act.F32, Act.BF16], ids=["f32", "bf16"])
def test_C89_E01_weight_only(isa: str, name: str, act: Act) -> None:
    key = FORMATS[name]
    k = columns(key)
    x = normal(4, 9, k)
    m = random_blocks(5, 70, k, key, act=act, factor=0.75).pack(library(isa))
    seen = (widen(narrow(x)) if act == Act.BF16 else x).astype(np.float64)
    exact = m.exact().astype(np.float64)
    sizes = np.abs(m.integers().astype(np.float64)) * np.repeat(np.abs(m.units()), key[1] or k, axis=1)[:, :k]
    bound = (np.abs(seen) @ (2 * sizes + np.abs(exact)).T) * 2.0**-24 * (k + 4)
    within(linear(isa, x, m), seen @ exact.T, bound)


@each_isa
@each_format
@pytest.mark.parametrize("act", list(Act), ids=["f32", "bf16", "i8"])
def test_a_row_is_the_same_in_any_company(isa: str, name: str, act: Act) -> None:
    key = FORMATS[name]
    if act == Act.I8 and name not in INTEGER:
        pytest.skip("codes of floats meet rows of floats")
    x = normal(6, 130, columns(key))
    m = random_blocks(7, 130, x.shape[1], key, act=act).pack(library(isa))
    whole = linear(isa, x, m)
    for count in [*range(1, 14), 17, 64, 97]:
        first = 3 * count % (131 - count)
        np.testing.assert_array_equal(linear(isa, x[first : first + count], m), whole[first : first + count])
    np.testing.assert_array_equal(linear(isa, x, m, THREADS[-1]), whole)


@each_isa
@each_format
@pytest.mark.parametrize("act", list(Act), ids=["f32", "bf16", "i8"])
def test_every_code_is_turned_exactly(isa: str, name: str, act: Act) -> None:
    """A unit vector per input brings out each weight by itself, alone and among others."""
    key = FORMATS[name]
    if act == Act.I8 and name not in INTEGER:
        pytest.skip("codes of floats meet rows of floats")
    k = 256
    m = random_blocks(8, 64, k, key, act=act).pack(library(isa))
    # 127 is what a row's scale divides by.
    x = np.eye(k, dtype=np.float32) * np.float32(127 if act == Act.I8 else 1)
    want = m.exact().T.astype(np.float64) * (127 if act == Act.I8 else 1)
    sizes = np.abs(m.integers().T.astype(np.float64)) * np.repeat(np.abs(m.units()), key[1] or k, axis=1)[:, :k].T
    bound = (2 * sizes + np.abs(want)) * 2.0**-21 if key[3] else (np.abs(want)) * 2.0**-23
    if act == Act.I8:
        bound = bound * 127 if key[3] else bound
    within(linear(isa, x, m), want, bound)
    for row in (0, 5, 33, 255):
        np.testing.assert_array_equal(linear(isa, x[row : row + 1], m)[0], linear(isa, x, m)[row])


@each_isa
@pytest.mark.parametrize("code", [Code.U8, Code.U6, Code.U5, Code.U4, Code.U3, Code.U2, Code.T4])
@pytest.mark.parametrize("group", [0, 16, 32, 128])
def test_nothing_saturates(isa: str, code: Code, group: int) -> None:
    """The largest codes and values everywhere: sums are whole numbers that floats hold."""
    offset = {Code.U8: 128, Code.T4: 0}.get(code, 0)
    m = random_blocks(9, 3, 512, (code, group, Scale.F32, Zero.NONE, offset))
    top = (1 << {Code.U8: 8, Code.U6: 6, Code.U5: 5, Code.U4: 4, Code.U3: 3, Code.U2: 2, Code.T4: 4}[code]) - 1
    m.codes[0], m.codes[1], m.codes[2, ::2], m.codes[2, 1::2] = 0, top, 0, top
    m.scales[:] = 1
    m.pack(library(isa))
    for sign in (1, -1):
        x = np.full((7, 512), 127 * sign, np.float32)
        np.testing.assert_array_equal(linear(isa, x, m), x.astype(np.float64) @ m.exact().T.astype(np.float64))


@each_isa
@pytest.mark.parametrize("name", ["int8", "q8_0", "q6_k", "q4_k", "gptq4", "iq4_xs", "q2_k"])
@pytest.mark.parametrize("act", list(Act), ids=["f32", "bf16", "i8"])
def test_what_is_not_finite_stays_in_its_row(isa: str, name: str, act: Act) -> None:
    key = FORMATS[name]
    x = normal(18, 13, columns(key))
    m = random_blocks(19, 70, x.shape[1], key, act=act).pack(library(isa))
    clean = linear(isa, x, m)
    spoilt = x.copy()
    spoilt[2, 202], spoilt[5, 0], spoilt[11, 77] = np.nan, np.inf, -np.inf
    got = linear(isa, spoilt, m)
    assert np.all(np.isnan(got[2]))
    assert not np.any(np.isfinite(got[[5, 11]]))
    good = [t for t in range(13) if t not in (2, 5, 11)]
    np.testing.assert_array_equal(got[good], clean[good])
    if act == Act.I8:
        assert np.all(np.isnan(got[[5, 11]]))


@each_isa
@pytest.mark.parametrize("name", ["int8", "q8_0", "q6_k", "gptq4"])
def test_rows_at_the_edges(isa: str, name: str) -> None:
    """Zeros give zeros; the smallest and the largest rows are rounded like any other."""
    key = FORMATS[name]
    k = columns(key)
    x = np.stack([np.zeros(k), *(normal(20, k) * f for f in (1.0, 2.0**-80, 2.0**100))]).astype(np.float32)
    m = random_blocks(21, 64, k, key).pack(library(isa))
    got = linear(isa, x, m)
    assert np.all(got[0] == 0)
    np.testing.assert_array_equal(got[2], got[1] * np.float32(2.0**-80))
    np.testing.assert_array_equal(got[3], got[1] * np.float32(2.0**100))


@each_isa
@each_threads
def test_segments_are_products_side_by_side(isa: str, threads: int) -> None:
    """Of different formats, groups and kinds of rows, with biases, onto what is added."""
    k = 256
    names = ["q4_k", "q6_k", "int8", "gptq4", "nf4", "q4_0"]
    acts = [Act.I8, Act.I8, Act.BF16, Act.I8, Act.F32, Act.I8]
    widths = [70, 3, 64, 130, 65, 1]
    parts = [
        random_blocks(i, n, k, FORMATS[name], act=act, bias=normal(40 + i, n)).pack(library(isa))
        for i, (n, name, act) in enumerate(zip(widths, names, acts, strict=True))
    ]
    segments = Segments(parts)
    for count in (1, 5, 40, 131):
        x, added = normal(30, count, k), normal(31, count, sum(widths))

        def make(numbers: list[int], out: int) -> NativeOp:
            n = (0, 0, 0, len(parts))
            return NativeOp(Kind.LINEAR, (numbers[0], numbers[1]), out, n, (0.0, 0.5, 0.0), (segments,))

        got = execute(isa, threads, [x, added], sum(widths), make)
        alone = np.concatenate([linear(isa, x, m) for m in parts], axis=1)
        np.testing.assert_allclose(got, added + np.float32(0.5) * alone, rtol=2e-6, atol=2e-6)
        for i, m in enumerate(parts):
            at = sum(widths[:i])

            def one(numbers: list[int], out: int, m: Blocks = m) -> NativeOp:
                return NativeOp(Kind.LINEAR, (numbers[0], numbers[1]), out, (0, 0, 0), (0.0, 0.5, 0.0), (m,))

            part = np.ascontiguousarray(added[:, at : at + widths[i]])
            np.testing.assert_array_equal(got[:, at : at + widths[i]], execute(isa, 1, [x, part], widths[i], one))


@each_isa
@pytest.mark.parametrize("name", ["gptq4", "q6_k", "fp8_block"])
def test_an_order_of_inputs(isa: str, name: str) -> None:
    """Panels hold inputs in an order of their own; rows follow it."""
    key, k = FORMATS[name], 256
    act = Act.I8 if name in INTEGER else Act.F32
    order = np.random.default_rng(1).permutation(k).astype(np.int32)
    ordered = random_blocks(50, 70, k, key, act=act, order=order).pack(library(isa))
    plain = random_blocks(50, 70, k, key, act=act).pack(library(isa))
    for count in (1, 3, 50):
        x = normal(51, count, k)
        np.testing.assert_array_equal(linear(isa, x, ordered), linear(isa, np.ascontiguousarray(x[:, order]), plain))


@each_isa
@pytest.mark.parametrize("name", ["q4_k", "q6_k", "int8", "fp8_channel"])
@pytest.mark.parametrize("num_rows", [64, 2 * 45])
def test_a_pair_is_gated(isa: str, name: str, num_rows: int) -> None:
    """Silu of the gate times the up, biases first."""
    key, k = FORMATS[name], 256
    act = Act.I8 if name in INTEGER else Act.BF16
    half, bias = num_rows // 2, normal(60, num_rows)
    pair = random_blocks(61, num_rows, k, key, act=act, pair=True, bias=bias).pack(library(isa))
    plain = random_blocks(61, num_rows, k, key, act=act, bias=bias).pack(library(isa))
    np.testing.assert_array_equal(pair.values(library(isa)), plain.values(library(isa)))
    for count in (1, 4, 30):
        x = normal(62, count, k)

        def make(numbers: list[int], out: int) -> NativeOp:
            return NativeOp(Kind.LINEAR, (numbers[0],), out, (0, 2, 0), (0.0, 1.0, 0.0), (pair,))

        gate, up = np.split(linear(isa, x, plain).astype(np.float64), [half], axis=1)
        got = execute(isa, 2, [x], half, make)
        np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-5)


@each_isa
@each_format
def test_rows_of_a_table_are_looked_up(isa: str, name: str) -> None:
    key = FORMATS[name]
    k = columns(key)
    table = random_blocks(70, 100, k, key).pack(library(isa))
    ids = np.array([3, 99, 0, 64, 63, 3], np.int32)

    def make(numbers: list[int], out: int) -> NativeOp:
        return NativeOp(Kind.EMBED, (), out, (0, 0), (2.0,), (None, table))

    plan = plan_of([0, len(ids)], [0], token_ids=ids)
    got = execute(isa, 2, [np.zeros((len(ids), 1), np.float32)], k, make, plan=plan)
    np.testing.assert_array_equal(got, 2 * table.exact()[ids])


@each_isa
def test_what_does_not_fit_is_refused(isa: str) -> None:
    x = normal(1, 1, 256)
    m = random_blocks(1, 64, 256, FORMATS["q4_0"]).pack(library(isa))
    for field, value, sentence in [
        ("offset", 256, "the code of zero"), ("zero", Zero.U8, "an offset or zeros"), ("group", 48, "no format"),
        ("data", m.struct.data + 4, "aligned"), ("code", Code.T4, "their table"), ("code", Code.E4M3, "do not meet"),
    ]:  # fmt: skip
        before = getattr(m.struct, field)
        setattr(m.struct, field, value)
        if value == Code.E4M3:
            m.struct.offset = 0
        with pytest.raises(EngineError, match=sentence):
            linear(isa, x, m)
        setattr(m.struct, field, before)
    m.struct.offset = 8
    order = np.arange(1, 257, dtype=np.int32)
    m.struct.order = order.ctypes.data
    with pytest.raises(EngineError, match="inputs that there are not"):
        linear(isa, x, m)
    table = random_blocks(1, 64, 256, FORMATS["iq4_xs"]).pack(library(isa))
    table.table[3] = 128
    with pytest.raises(EngineError, match="-128"):
        linear(isa, x, table)


@each_isa
@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "mxfp8"])
def test_a_code_that_is_no_number_is_not_hidden(isa: str, name: str) -> None:
    """Its group is NaN, so its output is; others are as they were."""
    key, k = FORMATS[name], 256
    x = normal(80, 5, k)
    clean = linear(isa, x, random_blocks(81, 70, k, key, act=Act.F32).pack(library(isa)))
    m = random_blocks(81, 70, k, key, act=Act.F32)
    m.codes[3, 200], m.codes[66, 0] = 0x7F, 0xFF
    m.pack(library(isa))
    assert np.isnan(m.values(library(isa))[[3, 66], [200, 0]]).all()
    got = linear(isa, x, m)
    assert np.isnan(got[:, [3, 66]]).all()
    others = [n for n in range(70) if n not in (3, 66)]
    np.testing.assert_array_equal(got[:, others], clean[:, others])


@each_format
@pytest.mark.parametrize("act", [Act.F32, Act.I8], ids=["f32", "i8"])
def test_instruction_sets_agree(name: str, act: Act) -> None:
    """Wherever additions are fused; rows of bfloat16 have an instruction of their own on one of them."""
    key = FORMATS[name]
    if act == Act.I8 and name not in INTEGER:
        pytest.skip("codes of floats meet rows of floats")
    x = normal(90, 20, columns(key, longer=True))
    m = random_blocks(91, 70, x.shape[1], key, act=act)
    got = [linear(isa, x, m.pack(library(isa))) for isa in ISAS if isa != "base"]
    for y in got[1:]:
        np.testing.assert_array_equal(y, got[0])
