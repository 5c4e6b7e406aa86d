"""Recurrences of channels and of matrices against their other forms: scans over the whole text, kernels of a
convolution, weighted sums over all tokens. Ours goes by token after token."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.model_spec import Diagonal, Layer, ModelSpec, weight_shapes
from penstock.ops.ref.diagonal import diagonal_scan, rg_lru
from penstock.ops.ref.mlstm import mlstm, mlstm_gates
from penstock.ops.ref.pointwise import sigmoid
from penstock.ops.ref.recurrence import retention
from tests import specs
from tests.paged import Paged
from tests.unit.ops.test_ops_mamba import normal, step_of

T = 150
Array = np.ndarray[Any, Any]
CUTS = [[T], [1] * T, [40, 1, 1, 30, 78]]


def in_steps(run: Any, planes: dict[str, Array], cuts: list[int]) -> Array:
    """What `run(lo, hi, step)` gives for the whole text, in steps of so many tokens."""
    parts, at = [], 0
    for n in cuts:
        parts.append(run(at, at + n, step_of([(at, n, 1)], planes)))
        at += n
    return np.concatenate(parts)


def scanned(a: Array, x: Array) -> Array:
    """state = a state + x by the associative scan of Blelloch (1990), pairs of neighbours at a time: [T, ...] each."""
    if len(x) == 1:
        return x
    even = len(x) // 2 * 2
    pairs = scanned(a[1:even:2] * a[0:even:2], a[1:even:2] * x[0:even:2] + x[1:even:2])
    out = np.empty_like(x)
    out[1:even:2], out[0] = pairs, x[0]
    out[2::2] = a[2::2] * pairs[: len(out[2::2])] + x[2::2]
    return out


def nans(*shape: int) -> Array:
    return np.full((3, *shape), np.nan, np.float32)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("cuts", CUTS, ids=["at once", "one by one", "chunks"])
def test_C33_a_diagonal_s_steps_scan_and_convolution_agree(cuts: list[int], pairs: bool) -> None:
    width, states = 9, 1 if pairs else 6
    a = np.exp(-np.abs(normal(1, width, states)) * 0.3 + 1j * normal(2, width, states))
    c, d = normal(3, width, states) + 1j * normal(4, width, states), normal(5, width)
    a, c = (x.astype(np.complex64) for x in (a, c))
    x = normal(6, T, 2 * width if pairs else width)
    fixed = (np.stack([a.real, a.imag]), np.stack([c.real, c.imag]), None if pairs else d)
    planes = {name: nans(states, width) for name in ("re", "im")}
    got = in_steps(lambda lo, hi, step: diagonal_scan(x[lo:hi], step, 0, 0, *fixed), planes, cuts)
    given = (x[:, :width] + 1j * x[:, width:] if pairs else x).astype(np.complex128)
    every = np.broadcast_to(a.astype(np.complex128), (T, *a.shape))
    states_of = scanned(every, np.repeat(given[:, :, None], states, axis=2))
    by_scan = (states_of * c).sum(-1)
    kernel = ((a.astype(np.complex128)[None] ** np.arange(T)[:, None, None]) * c).sum(-1)
    by_kernel = np.stack([np.convolve(given[:, i], kernel[:, i])[:T] for i in range(width)], axis=1)
    for want in (by_scan, by_kernel):
        told = np.concatenate([want.real, want.imag], axis=1) if pairs else want.real + x * d
        np.testing.assert_allclose(got, told, atol=1e-4)
    assert np.abs(got).max() > 1.0


@pytest.mark.parametrize("cuts", CUTS, ids=["at once", "one by one", "chunks"])
def test_a_gated_linear_recurrence_is_its_scan(cuts: list[int]) -> None:
    width = 11
    x, gate, fade = (normal(i, T, width) for i in range(3))
    a, biases = -np.abs(normal(3, width)), (normal(4, width), normal(5, width))
    planes = {"state": nans(1, width)}
    got = in_steps(lambda lo, hi, s: rg_lru(x[lo:hi], gate[lo:hi], fade[lo:hi], s, 0, 0, a, *biases), planes, cuts)
    keep = np.exp(a.astype(np.float64) * sigmoid(fade + biases[1]))
    given = x * sigmoid(gate + biases[0]) * np.sqrt(1 - keep**2)
    given[0] = x[0] * sigmoid(gate[0] + biases[0])
    np.testing.assert_allclose(got, scanned(keep, given), atol=1e-5)


@pytest.mark.parametrize("cuts", CUTS, ids=["at once", "one by one", "chunks"])
def test_an_mlstm_is_a_weighted_sum_over_all_tokens(cuts: list[int]) -> None:
    """The parallel form of Beck et al., arXiv 2405.04517, appendix A.3: no state, no largest exponent but a row's."""
    heads, keys, width, eps = 3, 6, 7, 1e-6
    i, f = 2 * normal(1, T, heads), 3 + 2 * normal(2, T, heads)
    q, k, v = normal(3, T, heads, keys), normal(4, T, heads, keys), normal(5, T, heads, width)
    planes = {"norm": nans(heads, keys), "max": nans(heads, 1), "state": nans(heads, keys * width)}

    def run(lo: int, hi: int, step: Any) -> Array:
        gates = mlstm_gates(i[lo:hi], f[lo:hi], q[lo:hi], k[lo:hi], step, 0, 0, eps)
        return mlstm(q[lo:hi], k[lo:hi], v[lo:hi], gates, step, 0, 0)

    got = in_steps(run, planes, cuts)
    slow = np.cumsum(-np.logaddexp(0.0, -f.astype(np.float64)), axis=0)
    for head in range(heads):
        weights = slow[:, None, head] - slow[None, :, head] + i[None, :, head]
        weights[np.triu_indices(T, 1)] = -np.inf
        # m begins at 0, so it is never below the sum of all decays so far.
        top = np.maximum(weights.max(axis=1), slow[:, head])[:, None]
        by = np.exp(weights - top) * (q[:, head].astype(np.float64) @ k[:, head].T) * keys**-0.5
        want = by @ v[:, head] / (np.maximum(np.abs(by.sum(axis=1))[:, None], np.exp(-top)) + eps)
        np.testing.assert_allclose(got[:, head], want, rtol=3e-5, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64, T])
def test_C31_three_forms_of_retention_agree(chunk: int) -> None:
    """Parallel, in chunks, and ours, token by token. Source: Sun et al., arXiv 2307.08621, equations 5 to 7."""
    heads, keys, width = 3, 8, 12
    q, k, v = normal(1, T, heads, keys), normal(2, T, heads, keys) * keys**-0.5, normal(3, T, heads, width)
    decay = np.array([1 - 2.0 ** (-5 - h) for h in range(heads)], np.float32)
    planes = {"state": nans(heads, keys * width)}
    got = retention(q, k, v, step_of([(0, T, 1)], planes), 0, 0, decay)
    ages = np.arange(T)[:, None] - np.arange(T)[None]
    for head, keep in enumerate(decay.astype(np.float64)):
        own = [x[:, head].astype(np.float64) for x in (q, k, v)]
        fading = np.where(ages >= 0, keep ** np.maximum(ages, 0), 0.0)
        parallel = ((own[0] @ own[1].T) * fading) @ own[2]
        state, parts = np.zeros((keys, width)), []
        for at in range(0, T, chunk):
            cq, ck, cv = (x[at : at + chunk] for x in own)
            n = len(cq)
            inner = ((cq @ ck.T) * fading[:n, :n]) @ cv
            parts.append(inner + (keep ** (1 + np.arange(n)))[:, None] * (cq @ state))
            state = keep**n * state + (ck * (keep ** (n - 1 - np.arange(n)))[:, None]).T @ cv
        np.testing.assert_allclose(np.concatenate(parts), parallel, atol=1e-9)
        np.testing.assert_allclose(got[:, head], parallel, atol=1e-4)
        np.testing.assert_allclose(planes["state"][1, head].reshape(keys, width), state, atol=1e-4)
    assert np.abs(got).max() > 1.0


def whole(spec: ModelSpec, weights: dict[str, Array], ids: list[int], by: str) -> Array:
    """Logits [T, V] of one layer of a diagonal between gates, in float64, over the whole text at once: `by` a scan or a
    convolution with the kernel. Written from the papers: Fu et al., arXiv 2212.14052, section 3; Mehta et al., arXiv
    2206.13947, section 3.2; Gu et al., arXiv 2206.11893, section 3."""
    w = {name.removeprefix("layers.0."): array.astype(np.float64) for name, array in weights.items()}
    m, t = spec.layers[0].mixer, len(ids)
    assert isinstance(m, Diagonal)

    def normed(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

    def gelu(x: Array) -> Array:
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    rate = -np.exp(w["a_log"]) + 1j * w["a_im"]
    a = np.exp(np.exp(w["log_dt"])[:, None] * rate)
    c = 2 * (w["c_re"] + 1j * w["c_im"]) * (a - 1) / rate

    def spaces(u: Array) -> Array:
        if by == "scan":
            states = scanned(np.broadcast_to(a, (t, *a.shape)), np.repeat(u[:, :, None] + 0j, m.state, axis=2))
            return (states * c).sum(-1).real + w["d"] * u
        kernel = ((a[None] ** np.arange(t)[:, None, None]) * c).sum(-1).real
        return np.stack([np.convolve(u[:, i], kernel[:, i])[:t] for i in range(m.inner)], axis=1) + w["d"] * u

    x = w["embed"][ids]
    h = normed(x, "attn_norm")
    if m.gates == "h3":
        # The shifting state holds the last inputs; its C are the taps, the newest input's being D as well.
        k = np.stack([np.convolve((h @ w["k"].T)[:, i], w["conv"][i, ::-1])[:t] for i in range(m.inner)], axis=1)
        y = (h @ w["q"].T) * spaces(k * (h @ w["v"].T))
    else:
        y = gelu(h @ w["out_gate"].T) * (spaces(gelu(h @ w["in"].T)) @ w["mix"].T)
    return normed(x + y @ w["o"].T, "final_norm") @ w["lm_head"].T


@pytest.mark.parametrize("gates", ["h3", "gss"])
@pytest.mark.parametrize("cuts", CUTS, ids=["at once", "one by one", "chunks"])
def test_C33_h3_and_gss_step_as_they_scan(cuts: list[int], gates: str) -> None:
    """The engine's operations in steps, from a state of a fixed size, and the papers' two parallel forms."""
    mixers = specs.make("gated_diagonal")[0].layers
    mixer = next(layer.mixer for layer in mixers if isinstance(layer.mixer, Diagonal) and layer.mixer.gates == gates)
    source = specs.make("gated_diagonal")[0]
    spec = msgspec.structs.replace(source, layers=(Layer(mixer=mixer, ffn=None),))
    rng = np.random.default_rng(3)
    weights = {}
    for name, shape in weight_shapes(spec).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        weights[name] = np.exp(0.1 * noise) if name.endswith("norm") else noise / np.float32(np.sqrt(shape[-1]))
    weights["layers.0.log_dt"] = (rng.random(mixer.inner) - 2).astype(np.float32)
    ids = rng.integers(3, spec.vocab_size, T).tolist()
    got = Paged(spec, weights).chunked("a", ids, cuts)
    for by in ("scan", "kernel"):
        want = whole(spec, weights, ids, by)
        np.testing.assert_allclose(got, want, atol=1e-4)
        assert want.std() > 0.3
        without = whole(spec, weights | {"layers.0.o": 0 * weights["layers.0.o"]}, ids, by)
        assert np.abs(want - without).max() > 0.3, "the layer matters"
