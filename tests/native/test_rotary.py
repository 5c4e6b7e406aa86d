"""PST_ROPE: bits of the reference rotation, in place."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.base.errors import EngineError
from penstock.ops.native.abi import Kind
from penstock.ops.native.program import NativeOp
from penstock.ops.ref.rotary import rope, rope_angles
from tests.native.running import each_isa, each_threads, execute, plan_of

POSITIONS = 97
BOUNDS, STARTS = [0, 1, 20, 41], [96, 0, 33]


def turn(
    isa: str, threads: int, x: np.ndarray, table: np.ndarray, first: int, half: int, interleaved: bool
) -> np.ndarray:
    """x [T, H, D] after the operation."""
    tokens, heads, dim = x.shape
    n = (heads, dim, first, half, int(interleaved), POSITIONS)
    out = execute(
        isa, threads, [x.reshape(tokens, -1)], None,
        lambda registers, _: NativeOp(Kind.ROPE, (registers[0],), registers[0], n, (), (table,)),
        plan=plan_of(BOUNDS, STARTS),
    )  # fmt: skip
    return out.reshape(x.shape)


@each_isa
@each_threads
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "first", "half"), [
    (1, 2, 0, 1), (14, 64, 0, 32), (3, 80, 0, 40), (2, 80, 16, 10), (5, 33, 7, 13), (2, 192, 128, 32),
])  # fmt: skip
def test_equals_the_reference(
    isa: str, threads: int, interleaved: bool, heads: int, dim: int, first: int, half: int
) -> None:
    rng = np.random.default_rng([heads, dim])
    x = rng.standard_normal((41, heads, dim), dtype=np.float32)
    x[5, 0, first] = np.nan
    x[6, 0, first + 1] = np.inf
    table = rng.standard_normal((2, POSITIONS, half), dtype=np.float32)
    positions = plan_of(BOUNDS, STARTS).positions
    with np.errstate(invalid="ignore"):
        want = rope(x, rope_angles(positions, table), interleaved, first)
    np.testing.assert_array_equal(turn(isa, threads, x, table, first, half, interleaved), want)


@each_isa
def test_misfits_are_told(isa: str) -> None:
    x, table = np.zeros((41, 2, 16), np.float32), np.zeros((2, POSITIONS, 8), np.float32)
    with pytest.raises(EngineError, match="smaller than what turns"):
        turn(isa, 1, x, table, 2, 8, False)
