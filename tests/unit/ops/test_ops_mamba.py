"""The ops of Mamba and Mamba-2: their definitions in float64, slots that are read and written right, the same bits.

How they agree with transformers is in tests/models/test_mamba_parity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.ref.mamba import causal_conv, mamba2_scan, mamba_scan, softplus
from penstock.ops.step import Step

T, K, N, H, P, G, C = 23, 4, 5, 6, 3, 2, 18
CUTS = [[T], [1] * T, [2, 1, 20], [9, 14]]
F32 = np.ndarray[Any, np.dtype[np.float32]]
Run = Callable[[list[F32], Step], F32]


def step_of(parts: list[tuple[int, int, int]], planes: dict[str, F32]) -> Step:
    """Sequences as (position of the first token, tokens, page)."""
    starts = np.cumsum([0] + [n for _, n, _ in parts]).astype(np.int32)
    positions = np.concatenate([np.arange(at, at + n) for at, n, _ in parts]).astype(np.int32)
    lens = np.array([at + n for at, n, _ in parts], np.int32)
    group = GroupPlan(1, 4, tuple(np.array([[page]], np.int32) for _, _, page in parts))
    return Step(
        StepPlan(np.zeros(starts[-1], np.int32), positions, starts, lens, np.zeros(0, np.int32), (group,)), [planes]
    )


def normal(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


A1, A2 = -np.exp(normal(1, C, N)), -np.exp(normal(2, H))
D1, D2, DT_BIAS, TAPS, BIAS = normal(3, C), normal(4, H), normal(5, H), normal(6, K, C), normal(7, C)
OPS: dict[str, tuple[dict[str, tuple[int, int]], list[tuple[int, ...]], Run]] = {
    "conv": ({"conv": (K - 1, C)}, [(C,)], lambda x, s: causal_conv(*x, s, 0, 0, TAPS, BIAS)),
    "mamba": (
        {"state": (N, C)}, [(C,), (C,), (N,), (N,)], lambda x, s: mamba_scan(*x, s, 0, 0, A1, D1),
    ),
    "mamba2": (
        {"state": (H, N * P)}, [(H, P), (H,), (G, N), (G, N)],
        lambda x, s: mamba2_scan(*x, s, 0, 0, A2, D2, DT_BIAS, 0.1, 1.2),
    ),
}  # fmt: skip


def planes_of(name: str, pages: int = 4) -> dict[str, F32]:
    return {plane: np.full((pages, *shape), np.nan, np.float32) for plane, shape in OPS[name][0].items()}


def inputs_of(name: str, n: int = T, seed: int = 10) -> list[F32]:
    return [normal(seed + i, n, *shape) for i, shape in enumerate(OPS[name][1])]


def chunked(name: str, inputs: list[F32], cuts: list[int], planes: dict[str, F32], page: int = 2) -> F32:
    parts, at = [], 0
    for n in cuts:
        own = [np.ascontiguousarray(x[at : at + n]) for x in inputs]
        parts.append(OPS[name][2](own, step_of([(at, n, page)], planes)))
        at += n
    return np.concatenate(parts)


def defined(name: str, inputs: list[F32]) -> np.ndarray[Any, Any]:
    """Sums over all tokens before, in float64 and without a state."""
    x, *rest = (v.astype(np.float64) for v in inputs)
    out = np.zeros(x.shape)
    if name == "conv":
        for t in range(T):
            out[t] = BIAS + sum(TAPS[k] * x[t - K + 1 + k] for k in range(K) if t - K + 1 + k >= 0)
        return out
    dt, b, c = rest
    if name == "mamba":
        dt, a, d = np.logaddexp(0, dt)[:, :, None], A1, D1
        b, c = b[:, None], c[:, None]
    else:
        dt = np.clip(np.logaddexp(0, dt + DT_BIAS), 0.1, 1.2)[:, :, None, None]
        a, d = A2[:, None, None], D2[:, None]
        b, c = (np.repeat(v, H // G, axis=1)[:, :, None] for v in (b, c))
    for t in range(T):
        for s in range(t + 1):
            left = np.exp((dt[s + 1 : t + 1] * a).sum(axis=0))
            out[t] += (left * c[t] * b[s] * dt[s]).sum(-1) * x[s]
    return out + x * d


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", list(OPS))
def test_every_chunking_equals_the_definition(name: str, cuts: list[int]) -> None:
    inputs, planes = inputs_of(name), planes_of(name)
    got = chunked(name, inputs, cuts, planes)
    np.testing.assert_allclose(got, defined(name, inputs), atol=2e-5)
    np.testing.assert_array_equal(got, chunked(name, inputs, [T], planes_of(name)))
    for plane in planes.values():
        assert np.isnan(plane[[0, 1, 3]]).all(), "only the sequence's own page is written"
        assert np.isfinite(plane[2]).all()


@pytest.mark.parametrize("name", list(OPS))
def test_a_batch_of_sequences_equals_each_alone(name: str) -> None:
    """One goes on, one begins on a page that held another's state, one is there without tokens."""
    planes, alone = planes_of(name), planes_of(name)
    first, second = inputs_of(name, seed=20), inputs_of(name, seed=40)
    chunked(name, [x[:8] for x in first], [8], planes, page=3)
    chunked(name, second, [T], planes, page=0)
    batch = [np.concatenate([x[8:14], y[:5]]) for x, y in zip(first, second, strict=True)]
    before = {plane: values[1].copy() for plane, values in planes.items()}
    got = OPS[name][2](batch, step_of([(8, 6, 3), (7, 0, 1), (0, 5, 0)], planes))
    np.testing.assert_array_equal(got[:6], chunked(name, first, [T], alone, page=3)[8:14])
    np.testing.assert_array_equal(got[6:], chunked(name, second, [T], alone, page=0)[:5])
    for plane, values in planes.items():
        np.testing.assert_array_equal(values[1], before[plane])


def test_convolution_without_bias() -> None:
    x = normal(8, 1, C)
    got = causal_conv(x, step_of([(0, 1, 0)], planes_of("conv")), 0, 0, TAPS, None)
    np.testing.assert_array_equal(got[0], x[0] * TAPS[-1])


def test_softplus_neither_overflows_nor_underflows() -> None:
    x = np.array([-80, -30, -1, 0, 1, 30, 200], np.float32)
    with np.errstate(over="raise"):
        np.testing.assert_allclose(softplus(x), np.logaddexp(0, x.astype(np.float64)), rtol=1e-6)
