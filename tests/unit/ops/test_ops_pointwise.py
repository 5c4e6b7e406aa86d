"""Norms and activations against torch; row independence; extremes without warnings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from penstock.ops.ref.norm import layer_norm, rms_norm
from penstock.ops.ref.pointwise import ACTIVATIONS, activate, activate_gated, columns, erf, flat, heads, sigmoid, xielu

RNG = np.random.default_rng(7)
TORCH = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("n", [1, 7, 32, 129, 2049])
def test_norms_equal_torch_and_keep_rows_apart(n: int) -> None:
    x = (RNG.standard_normal((9, n)) * 3 + 1).astype(np.float32)
    w, b = RNG.standard_normal(n).astype(np.float32), RNG.standard_normal(n).astype(np.float32)
    tx, tw, tb = torch.tensor(x), torch.tensor(w), torch.tensor(b)
    rms = torch.nn.functional.rms_norm(tx, (n,), tw, 1e-5)
    np.testing.assert_allclose(rms_norm(x, w, 1e-5), rms, rtol=2e-6, atol=2e-6)
    layer = torch.nn.functional.layer_norm(tx, (n,), tw, tb, 1e-5)
    np.testing.assert_allclose(layer_norm(x, w, b, 1e-5), layer, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer_norm(x, w, None, 1e-5), layer - tb, rtol=1e-5, atol=1e-5)
    for i in range(9):
        np.testing.assert_array_equal(rms_norm(x[i : i + 1], w, 1e-5)[0], rms_norm(x, w, 1e-5)[i])
        np.testing.assert_array_equal(layer_norm(x[i : i + 1], w, b, 1e-5)[0], layer_norm(x, w, b, 1e-5)[i])
    assert rms_norm(x, w, 1e-5).dtype == layer_norm(x, w, b, 1e-5).dtype == np.float32


def test_xielu_equals_its_definition_and_bends_at_zero() -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-20, -1e-7, -1e4, 1e4]]).astype(np.float32)[None]
    wide = x.astype(np.float64)
    below = 0.9 * (np.expm1(np.minimum(wide, -1e-6)) - wide) + 0.5 * wide
    got = xielu(x, 0.7, 0.9)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.where(wide > 0, 0.7 * wide**2 + 0.5 * wide, below), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_equal_torch(name: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-20, -1e4, 1e4]]).astype(np.float32)[None]
    want = TORCH[name](torch.tensor(x, dtype=torch.float64)).numpy()
    got = activate(x, name)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    up = RNG.standard_normal(x.shape).astype(np.float32)
    np.testing.assert_array_equal(activate_gated(x, up, name), got * up)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_keep_rows_apart(name: str) -> None:
    x = (RNG.standard_normal((9, 43)) * 4).astype(np.float32)
    for i in range(9):
        np.testing.assert_array_equal(activate(x[i : i + 1].copy(), name)[0], activate(x, name)[i])
    x[3] = np.nan
    assert np.isnan(activate(x, name)[3]).all()


def test_erf_is_accurate_everywhere() -> None:
    x = np.concatenate([np.linspace(-7, 7, 20001), [0.0, 1e-300, -1e-300, np.inf, -np.inf]])
    want = np.array([math.erf(v) for v in x])
    np.testing.assert_allclose(erf(x), want, rtol=0, atol=2e-9)
    assert np.isnan(erf(np.array([np.nan])))[0]


def test_sigmoid_at_the_ends() -> None:
    x = np.array([-1e4, -200.0, 0.0, 200.0], np.float32)
    np.testing.assert_array_equal(sigmoid(x), np.array([0, 0, 0.5, 1], np.float32))


def test_shapes_of_heads_flat_and_columns() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 12)
    assert heads(x, 3).shape == (2, 3, 4)
    assert heads(x, 3)[1, 2, 0] == x[1, 8]
    np.testing.assert_array_equal(flat(heads(x, 3)), x)
    np.testing.assert_array_equal(columns(x, 4, 9), x[:, 4:9])
    assert columns(x, 4, 9).flags.c_contiguous
    assert heads(x[:0], 3).shape == (0, 3, 4)
    assert flat(heads(x[:0], 3)).shape == (0, 12)
