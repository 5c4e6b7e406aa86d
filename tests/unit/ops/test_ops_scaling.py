"""The small ops that scale, cut and gate, and norms without weights, against float64; rows do not depend on company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.ops.ref.norm import layer_norm, rms_norm
from penstock.ops.ref.pointwise import (
    activate,
    activate_gated,
    clip,
    gate_rows,
    multiply,
    scale,
    scale_queries,
    soft_cap,
)

F64 = np.ndarray[Any, np.dtype[np.float64]]


def rms(x: F64, eps: float) -> F64:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


def layer(x: F64, eps: float) -> F64:
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps)


ONE: dict[str, tuple[Callable[[Any], Any], Callable[[F64], F64]]] = {
    "scale": (lambda x: scale(x, 0.3), lambda x: x * np.float64(np.float32(0.3))),
    "scale by zero": (lambda x: scale(x, 0.0), lambda x: x * 0.0),
    "clip": (lambda x: clip(x, 0.7), lambda x: np.where(np.abs(x) > 0.7, np.sign(x) * 0.7, x)),
    "soft_cap": (lambda x: soft_cap(x, 1.3), lambda x: 1.3 * np.tanh(x / 1.3)),
    "soft_cap far away": (lambda x: soft_cap(x * np.float32(1e4), 30.0), lambda x: 30.0 * np.tanh(x * 1e4 / 30.0)),
    "relu2": (lambda x: activate(x, "relu2"), lambda x: np.where(x > 0, x * x, 0.0)),
    "rms_norm": (lambda x: rms_norm(x, None, 1e-3), lambda x: rms(x, 1e-3)),
    "layer_norm": (lambda x: layer_norm(x, None, None, 1e-3), lambda x: layer(x, 1e-3)),
}


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (7, 1), (9, 43), (3, 257), (5, 3, 7)])
@pytest.mark.parametrize("name", ONE)
def test_equals_its_definition_row_by_row(name: str, shape: tuple[int, ...]) -> None:
    op, definition = ONE[name]
    x = (np.random.default_rng([len(name), *shape]).standard_normal(shape) * 3).astype(np.float32)
    before = x.copy()
    got = op(x)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(x, before)
    np.testing.assert_allclose(got, definition(x.astype(np.float64)), rtol=2e-6, atol=2e-6)
    for i in range(len(x)):
        np.testing.assert_array_equal(op(x[i : i + 1].copy())[0], got[i])
    if len(x) > 1:
        x[0] = np.nan
        np.testing.assert_array_equal(op(x)[1:], got[1:])


TWO: dict[str, tuple[Callable[[Any, Any], Any], Callable[[F64, F64], F64]]] = {
    "multiply": (multiply, lambda x, y: x * y),
    "gate_rows": (gate_rows, lambda x, y: x / (1 + np.exp(-y))),
    "gate_rows softplus": (lambda x, y: gate_rows(x, y, "softplus"), lambda x, y: x * np.logaddexp(0.0, y)),
    "gate_rows by one": (lambda x, y: gate_rows(x, y[:, :1].copy()), lambda x, y: x / (1 + np.exp(-y[:, :1]))),
    "swiglu_clamped": (
        lambda x, y: activate_gated(x, y, "swiglu_clamped", 1.1),
        lambda x, y: np.minimum(x, 1.1) / (1 + np.exp(-1.702 * np.minimum(x, 1.1))) * (np.clip(y, -1.1, 1.1) + 1),
    ),
    "swiglu_clamped without limit": (
        lambda x, y: activate_gated(x, y, "swiglu_clamped"), lambda x, y: x / (1 + np.exp(-1.702 * x)) * (y + 1),
    ),
    "relu2 gate": (lambda x, y: activate_gated(x, y, "relu2"), lambda x, y: np.maximum(x, 0) ** 2 * y),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (9, 43), (3, 257)])
@pytest.mark.parametrize("name", TWO)
def test_of_two_equals_its_definition_row_by_row(name: str, shape: tuple[int, int]) -> None:
    op, definition = TWO[name]
    x, y = (np.random.default_rng([len(name), *shape]).standard_normal((2, *shape)) * 3).astype(np.float32)
    got = op(x, y)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, definition(x.astype(np.float64), y.astype(np.float64)), rtol=3e-6, atol=3e-6)
    for i in range(len(x)):
        np.testing.assert_array_equal(op(x[i : i + 1].copy(), y[i : i + 1].copy())[0], got[i])


def test_swiglu_clamped_cuts_the_gate_from_above_only() -> None:
    x = np.array([[-50.0, -2.0, 50.0]], np.float32)
    got = activate_gated(x, np.zeros_like(x), "swiglu_clamped", 1.0)
    np.testing.assert_allclose(got[0], [0.0, -2.0 / (1 + np.exp(3.404)), 1.0 / (1 + np.exp(-1.702))], atol=1e-6)


@pytest.mark.parametrize(("beta", "floor", "shift"), [(0.1, 8192, 1), (0.5, 7, 0), (2.0, 1, 1)])
def test_queries_grow_with_their_position(beta: float, floor: int, shift: int) -> None:
    positions = np.array([0, 1, 5, 6, 7, 8190, 8191, 8192, 16383, 2**31 - 2], np.int32)
    x = np.random.default_rng(4).standard_normal((10, 3, 5)).astype(np.float32)
    got = scale_queries(x, positions, beta, floor, shift)
    assert got.dtype == np.float32
    for i, p in enumerate(positions.tolist()):
        want = x[i].astype(np.float64) * (1 + beta * np.log(1 + (p + shift) // floor))
        np.testing.assert_allclose(got[i], want, rtol=2e-6)
        own = scale_queries(x[i : i + 1].copy(), positions[i : i + 1], beta, floor, shift)
        np.testing.assert_array_equal(own[0], got[i])
