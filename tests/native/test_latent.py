"""PST_LATENT: the heads of a row, each times a matrix of its own, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import F32, narrow, widen
from penstock.base.errors import EngineError
from penstock.core.matrix_format import parse_scheme
from penstock.core.panels import panels_of
from penstock.ops.native.abi import Act, Format, Kind
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.matrix import Packed, order, pack
from penstock.ops.native.program import NativeOp
from penstock.ops.ref.latent import latent_output, latent_query
from tests.native.running import each_isa, each_threads, execute, within

KINDS: dict[str, tuple[Format, Act]] = {
    "float32": (Format.F32, Act.F32), "float16": (Format.F16, Act.F32), "bfloat16": (Format.BF16, Act.F32),
    "short rows": (Format.BF16, Act.BF16), "8 bits": (Format.BLOCK, Act.I8),
}  # fmt: skip
SHAPES = [(1, 1, 1, 0), (4, 12, 6, 4), (3, 64, 16, 5), (5, 65, 33, 0), (16, 128, 130, 8), (2, 200, 7, 3)]
"""Heads, outputs, inputs, numbers that pass."""


def weights(rng: np.random.Generator, kind: str, heads: int, width: int, cols: int) -> tuple[npt.NDArray[Any], F32]:
    """[H, N, K] in its own type, and what it stands for."""
    w = rng.standard_normal((heads, width, cols), dtype=np.float32)
    if kind in ("bfloat16", "short rows"):
        return narrow(w), widen(narrow(w))
    stored = w.astype(np.float16) if kind == "float16" else w
    return stored, stored.astype(np.float32)


def packed(isa: str, kind: str, w: npt.NDArray[Any]) -> Packed:
    format, act = KINDS[kind]
    heads, _, cols = w.shape
    panels = panels_of(parse_scheme("int8-w8a8").format, cols) if format == Format.BLOCK else None
    library = open_library(libraries()[isa])
    return pack(library, [w.reshape(-1, cols)], format, act, panels=panels, heads=heads)


def multiply(isa: str, threads: int, kind: str, x: F32, w: npt.NDArray[Any], rest: int) -> F32:
    """x [T, H, K + rest] -> [T, H, N + rest]."""
    heads, width, _ = w.shape
    m = packed(isa, kind, w)
    out = execute(
        isa, threads, [x.reshape(len(x), -1)], heads * (width + rest),
        lambda registers, to: NativeOp(Kind.LATENT, tuple(registers), to, (heads, width, 0, rest), (), (m,)),
    )  # fmt: skip
    return out.reshape(len(x), heads, -1)


@each_isa
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(isa: str, kind: str, shape: tuple[int, int, int, int]) -> None:
    """C04: also what the reference operations say, in float32."""
    heads, width, cols, rest = shape
    rng = np.random.default_rng(shape)
    stored, w = weights(rng, kind, heads, width, cols)
    x = rng.standard_normal((7, heads, cols + rest), dtype=np.float32)
    got = multiply(isa, 2, kind, x, stored, rest)
    np.testing.assert_array_equal(got[..., width:], x[..., cols:])
    if kind == "8 bits":
        w = packed(isa, kind, stored).values(open_library(libraries()[isa])).reshape(heads, -1, cols)[:, :width]
    size = np.einsum("thk,hnk->thn", np.abs(x[..., :cols]), np.abs(w), dtype=np.float64)
    want = np.einsum("thk,hnk->thn", x[..., :cols], w, dtype=np.float64)
    loss = {"short rows": 2.0**-8, "8 bits": 0.0}.get(kind, 1e-6)
    largest = np.abs(x[..., :cols]).max(axis=-1)[..., None]
    rounded = largest / 127 * np.abs(w).sum(axis=-1) if kind == "8 bits" else 0.0
    within(got[..., :width], want, loss * size + rounded + 1e-6)
    if kind == "float32":
        np.testing.assert_allclose(latent_query(x, w.swapaxes(1, 2)), got, atol=1e-4 * cols)
        if not rest:
            np.testing.assert_allclose(latent_output(x, w), got, atol=1e-4 * cols)


@each_isa
@each_threads
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_company_or_threads(isa: str, threads: int, kind: str) -> None:
    """Blocks of 96 rows are one of the ways in which work is cut."""
    rng = np.random.default_rng(4)
    stored, _ = weights(rng, kind, 5, 70, 33)
    x = rng.standard_normal((205, 5, 36), dtype=np.float32)
    whole = multiply(isa, 1, kind, x, stored, 3)
    got = multiply(isa, threads, kind, x, stored, 3)
    np.testing.assert_array_equal(got.view(np.uint32), whole.view(np.uint32))
    for a, b in pairwise([0, 1, 3, 15, 60, 205]):
        got = multiply(isa, threads, kind, x[a:b], stored, 3)
        np.testing.assert_array_equal(got.view(np.uint32), whole[a:b].view(np.uint32))


@each_isa
def test_a_nan_stays_in_its_row_and_head(isa: str) -> None:
    rng = np.random.default_rng(6)
    stored, _ = weights(rng, "float32", 3, 20, 8)
    x = rng.standard_normal((4, 3, 10), dtype=np.float32)
    clean = multiply(isa, 1, "float32", x, stored, 2)
    x[2, 1, 3] = np.nan
    got = multiply(isa, 1, "float32", x, stored, 2)
    assert np.isnan(got[2, 1, :20]).all()
    got[2, 1] = clean[2, 1]
    np.testing.assert_array_equal(got, clean)


def test_heads_begin_with_a_panel() -> None:
    where = order([6], False, heads=2).reshape(2, 64)
    assert where[:, :3].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (where[:, 3:] == -1).all()


@each_isa
@pytest.mark.parametrize(
    ("n", "words"),
    [
        ((2, 20, 0, 2), "panels of its own"), ((3, 65, 0, 2), "panels of its own"), ((0, 20, 0, 2), "some numbers"),
        ((3, 20, 0, 3), "heads do not fill"), ((3, 21, 0, 2), "become does not fill"), ((3, 20, 0, -1), "some numbers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(isa: str, n: tuple[int, ...], words: str) -> None:
    rng = np.random.default_rng(7)
    m = packed(isa, "float32", weights(rng, "float32", 3, 20, 8)[0])
    op = NativeOp(Kind.LATENT, (), -1, (3, 20, 0, 2), (), (m,))
    x = rng.standard_normal((2, 30), dtype=np.float32)
    execute(isa, 1, [x], 66, lambda registers, to: replace(op, inputs=tuple(registers), out=to))
    with pytest.raises(EngineError, match=words):
        execute(isa, 1, [x], 66, lambda registers, to: replace(op, inputs=tuple(registers), out=to, n=n))
    square = packed(isa, "float32", np.zeros((3, 20, 20), np.float32))
    with pytest.raises(EngineError, match="lie on the input"):
        execute(
            isa, 1, [np.zeros((2, 66), np.float32)], None,
            lambda registers, to: replace(op, inputs=tuple(registers), out=to, pointers=(square,)),
        )  # fmt: skip
