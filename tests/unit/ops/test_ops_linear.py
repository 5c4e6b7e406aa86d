"""Products row by row: the same bits for a row whatever its company."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.base.bf16 import narrow, widen
from penstock.ops.ref import product
from penstock.ops.ref.product import as_float32, embed, linear, select

SHAPES = [(1, 1), (1, 7), (3, 1), (5, 3), (16, 16), (43, 32), (61, 33), (64, 172), (129, 288), (700, 61), (33, 2048)]


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_linear_bits_of_a_row_do_not_depend_on_the_batch(m: int, n: int, dtype: str) -> None:
    rng = np.random.default_rng([m, n])
    wide = rng.standard_normal((m, n), dtype=np.float32)
    w = narrow(wide) if dtype == "bfloat16" else wide.astype(dtype)
    bias = rng.standard_normal(m, dtype=np.float32)
    x = rng.standard_normal((9, n), dtype=np.float32)
    alone = np.concatenate([linear(x[i : i + 1].copy(), w, bias) for i in range(9)])
    exact = x.astype(np.float64) @ as_float32(w).T.astype(np.float64) + bias
    np.testing.assert_allclose(alone, exact, rtol=0, atol=1e-5 * np.sqrt(n))
    for size in range(1, 10):
        for start in range(0, 10 - size, 3):
            got = linear(x[start : start + size], w, bias)
            np.testing.assert_array_equal(got, alone[start : start + size])
            # The same row at another address: alignment must not matter either.
            moved = np.empty(size * n + 3, np.float32)[3:].reshape(size, n)
            moved[:] = x[start : start + size]
            np.testing.assert_array_equal(linear(moved, w, bias), got)


def test_one_matrix_product_would_not_keep_the_bits() -> None:
    """Why `linear` is not `x @ w.T`: some row of some batch comes out differently.

    Which shapes differ depends on the processor, so they are tried together. If this ever fails, this BLAS has become
    stable by row and `linear` may be simpler.
    """
    rng = np.random.default_rng(0)
    differs = 0
    for m, n in SHAPES:
        w, x = rng.standard_normal((m, n), dtype=np.float32), rng.standard_normal((9, n), dtype=np.float32)
        whole = x @ w.T
        differs += sum(not np.array_equal(x[:size] @ w.T, whole[:size]) for size in range(1, 9))
    assert differs > 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widening_in_chunks_keeps_every_output_row(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((37, 10), dtype=np.float32)
    w = narrow(wide) if dtype == "bfloat16" else wide.astype(dtype)
    x = rng.standard_normal((4, 10), dtype=np.float32)
    seen: list[int] = []
    monkeypatch.setattr(product, "as_float32", lambda part: seen.append(part.size) or as_float32(part))
    for limit in (1, 80, 100, 1000):
        monkeypatch.setattr(product, "_CHUNK_ELEMENTS", limit)
        seen.clear()
        np.testing.assert_allclose(linear(x, w), x @ as_float32(w).T, atol=1e-5)
        assert max(seen) <= max(limit, 10)
        assert sum(seen) == 370


def test_linear_of_no_rows() -> None:
    assert linear(np.zeros((0, 5), np.float32), np.ones((3, 5), np.float32)).shape == (0, 3)
    assert linear(np.zeros((0, 5), np.float32), np.ones((3, 5), np.float16)).shape == (0, 3)


def test_a_row_that_is_not_a_number_stays_alone() -> None:
    x = np.ones((3, 8), np.float32)
    x[1] = np.nan
    out = linear(x, np.ones((4, 8), np.float32))
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[[0, 2]], 8.0)


def test_embed_widens_rows_and_select_picks_them() -> None:
    table = np.random.default_rng(1).standard_normal((11, 4), dtype=np.float32)
    ids = np.array([10, 0, 0, 3], np.int32)
    np.testing.assert_array_equal(embed(ids, table), table[[10, 0, 0, 3]])
    np.testing.assert_array_equal(embed(ids, narrow(table)), widen(narrow(table))[ids])
    np.testing.assert_array_equal(embed(ids, table.astype(np.float16)), table.astype(np.float16)[ids])
    assert embed(ids, table.astype(np.float16)).dtype == np.float32
    np.testing.assert_array_equal(select(table, np.array([2, 5], np.int32)), table[[2, 5]])
