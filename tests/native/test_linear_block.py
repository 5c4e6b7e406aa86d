"""Products with codes as files have them: panels, rows in blocks, and rows that do not know each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.ops.native.abi import Act, Code, Kind, Scale, Zero
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.program import NativeOp
from tests.native.blocks import Blocks, Key, random_blocks
from tests.native.running import THREADS, each_isa, execute, within

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
    m = random_blocks(3, 70, k, key).pack(library(isa))
    block = key[1] if key[1] in (64, 128) else 32
    values, units = rows_in_blocks(x, block)
    seen = (values * units[..., None].astype(np.float64)).reshape(9, -1)[:, :k]
    exact = m.exact().astype(np.float64)
    # Codes and what zeros take from them are summed apart.
    sizes = np.abs(m.integers().astype(np.float64)) * np.repeat(np.abs(m.units()), key[1] or k, axis=1)[:, :k]
    bound = (np.abs(seen) @ (2 * sizes + np.abs(exact)).T) * 2.0**-24 * (3 * k / (16 if key[1] == 16 else 32) + 4)
    within(linear(isa, x, m), seen @ exact.T, bound)


@each_isa
@each_format
@pytest.mark.parametrize("act", [Act.F32, Act.BF16], ids=["f32", "bf16"])
def test_weight_only(isa: str, name: str, act: Act) -> None:
    key = FORMATS[name]
    k = columns(key)
    x = normal(4, 9, k)
    m = random_blocks(5, 70, k, key, act=act).pack(library(isa))
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
