"""Routing and experts against plain loops in float64, over odd shapes; rows do not depend on their company."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from penstock.core.model_spec import Router
from penstock.ops.ref.experts import ExpertWeights, Routes, experts, route
from penstock.ops.ref.product import linear

ROUTERS: dict[str, tuple[int, int, Router]] = {
    "one of one": (1, 1, Router()),
    "softmax": (7, 3, Router()),
    "softmax, renormalized": (7, 3, Router(renormalize=True)),
    "chosen only": (13, 4, Router(chosen_only=True)),
    "chosen only, scaled": (5, 5, Router(chosen_only=True, scale=2.5)),
    "sigmoid": (9, 1, Router(score="sigmoid")),
    "sigmoid, corrected": (9, 4, Router(score="sigmoid", correction=True, renormalize=True, scale=1.5)),
    "softmax, corrected": (11, 2, Router(correction=True)),
    "best groups": (12, 3, Router(groups=4, top_groups=2)),
    "best groups of one": (6, 2, Router(groups=6, top_groups=3)),
    "groups by two": (15, 4, Router(score="sigmoid", correction=True, groups=3, top_groups=2, group_score="top2",
                                    renormalize=True, scale=0.7)),
}  # fmt: skip


def routed(logits: np.ndarray, top_k: int, router: Router, correction: np.ndarray | None) -> list[dict[int, float]]:
    """Expert -> weight for every token, one comparison at a time in Python's floats."""
    out = []
    for row in logits.tolist():
        low = max(row)
        exp = [math.exp(s - low) for s in row]
        scores = [1 / (1 + math.exp(-s)) for s in row] if router.score == "sigmoid" else [e / sum(exp) for e in exp]
        choice = dict(
            enumerate(s + (0.0 if correction is None else float(correction[i])) for i, s in enumerate(scores))
        )
        size = len(row) // router.groups
        best = []
        for g in range(router.groups):
            own = sorted((choice[e] for e in range(g * size, (g + 1) * size)), reverse=True)
            best.append((-(own[0] if router.group_score == "max" else sum(own[:2])), g))
        allowed = {g for _, g in sorted(best)[: router.top_groups]}
        left = sorted((-worth, e) for e, worth in choice.items() if e // size in allowed or router.groups == 1)
        chosen = sorted(e for _, e in left[:top_k])
        total = sum(exp[e] for e in chosen) if router.chosen_only else 1.0
        weights = {e: exp[e] / total if router.chosen_only else scores[e] for e in chosen}
        by = sum(weights.values()) if router.renormalize else 1.0
        out.append({e: w / by * router.scale for e, w in weights.items()})
    return out


@pytest.mark.parametrize("tokens", [0, 1, 5, 33])
@pytest.mark.parametrize("name", ROUTERS)
def test_routes_equal_a_plain_loop(name: str, tokens: int) -> None:
    num, top_k, router = ROUTERS[name]
    rng = np.random.default_rng([tokens, num])
    logits = (rng.standard_normal((tokens, num)) * 2).astype(np.float32)
    correction = rng.standard_normal(num).astype(np.float32) if router.correction else None
    ids, weights = route(logits, top_k, router, correction)
    assert (ids.shape, ids.dtype, weights.dtype) == ((tokens, top_k), np.int32, np.float32)
    for t, want in enumerate(routed(logits, top_k, router, correction)):
        assert ids[t].tolist() == list(want), "ascending, each once"
        np.testing.assert_allclose(weights[t], list(want.values()), rtol=2e-6)
    for t in range(tokens):
        alone = route(logits[t : t + 1].copy(), top_k, router, correction)
        np.testing.assert_array_equal(alone.ids[0], ids[t])
        np.testing.assert_array_equal(alone.weights[0], weights[t])


def test_the_correction_chooses_but_does_not_weigh() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    correction = np.array([0.0, 0.0, 0.0, 9.0], np.float32)
    router = Router(score="sigmoid", correction=True)
    ids, weights = route(logits, 2, router, correction)
    assert ids.tolist() == [[0, 3]]
    np.testing.assert_allclose(weights[0], [1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(1.0))], rtol=1e-6)


def test_ties_go_to_the_lower_id_and_extremes_stay_finite() -> None:
    ids, weights = route(np.zeros((2, 9), np.float32), 3, Router(renormalize=True))
    assert ids.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
    ids, _ = route(np.zeros((1, 8), np.float32), 2, Router(groups=4, top_groups=1))
    assert ids.tolist() == [[0, 1]]
    far = np.array([[50.0, -50.0, 0.0]], np.float32)
    for router in (Router(), Router(score="sigmoid", renormalize=True), Router(chosen_only=True)):
        ids, weights = route(far, 2, router)
        assert ids.tolist() == [[0, 2]]
        assert np.isfinite(weights).all()
    for router in (Router(), Router(score="sigmoid", renormalize=True), Router(chosen_only=True)):
        assert np.isfinite(route(far * 200, 2, router).weights).all()
    nothing = route(np.full((1, 3), -1e4, np.float32), 2, Router(score="sigmoid", renormalize=True))
    np.testing.assert_array_equal(nothing.weights, 0.0)  # 0 / 1e-20, not 0 / 0


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


INNER: dict[str, tuple[str, bool, float | None, Any]] = {
    "silu": ("silu", True, None, lambda gate, up: silu(gate) * up),
    "ungated": ("relu2", False, None, lambda gate, up: np.maximum(up, 0) ** 2),
    "clamped": ("swiglu_clamped", True, 0.6, lambda gate, up: (
        lambda g, u: g / (1 + np.exp(-1.702 * g)) * (u + 1))(np.minimum(gate, 0.6), np.clip(up, -0.6, 0.6))),
}  # fmt: skip


def make(rng: np.random.Generator, num: int, e: int, f: int, gated: bool, bias: bool) -> list[ExpertWeights]:
    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return [
        ExpertWeights(
            array(f, e) if gated else None, array(f, e), array(e, f),
            *((array(f) if gated else None, array(f), array(e)) if bias else ()),
        )
        for _ in range(num)
    ]  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(("tokens", "num", "top_k", "e", "f"), [(1, 1, 1, 1, 1), (5, 7, 2, 13, 9), (33, 4, 4, 8, 17)])
def test_experts_equal_a_plain_loop(
    tokens: int, num: int, top_k: int, e: int, f: int, inner: str, scale_input: bool, bias: bool
) -> None:
    activation, gated, limit, between = INNER[inner]
    rng = np.random.default_rng([tokens, num, bias])
    weights = make(rng, num, e, f, gated, bias)
    x = rng.standard_normal((tokens, e)).astype(np.float32)
    ids = np.sort([rng.choice(num, top_k, replace=False) for _ in range(tokens)], axis=1).astype(np.int32)
    routes = Routes(ids, rng.uniform(0.1, 1.0, ids.shape).astype(np.float32))
    got = experts(x, routes, weights, activation, limit, scale_input, linear)
    assert got.dtype == np.float32
    for t in range(tokens):
        want = np.zeros(e)
        for expert, share in zip(ids[t], routes.weights[t].astype(np.float64), strict=True):
            w = weights[expert]
            h = x[t].astype(np.float64) * (share if scale_input else 1.0)
            gate = (
                None if w.gate is None else w.gate.astype(np.float64) @ h + (0 if w.gate_bias is None else w.gate_bias)
            )
            up = w.up.astype(np.float64) @ h + (0 if w.up_bias is None else w.up_bias)
            y = w.down.astype(np.float64) @ between(gate, up) + (0 if w.down_bias is None else w.down_bias)
            want += y * (1.0 if scale_input else share)
        np.testing.assert_allclose(got[t], want, rtol=1e-4, atol=1e-4)
        one = Routes(ids[t : t + 1].copy(), routes.weights[t : t + 1].copy())
        alone = experts(x[t : t + 1].copy(), one, weights, activation, limit, scale_input, linear)
        np.testing.assert_array_equal(alone[0], got[t])


def test_a_token_of_nan_spoils_nobody_else_and_an_expert_nobody_chose_is_not_run() -> None:
    rng = np.random.default_rng(3)
    weights = make(rng, 4, 6, 5, True, False)
    weights[3] = ExpertWeights(*(np.full_like(w, np.nan) for w in weights[3][:3]))
    x = rng.standard_normal((3, 6)).astype(np.float32)
    routes = Routes(np.array([[0, 2], [0, 2], [1, 2]], np.int32), np.full((3, 2), 0.5, np.float32))
    clean = experts(x, routes, weights, "silu", None, False, linear)
    assert np.isfinite(clean).all()
    x[1] = np.nan
    dirty = experts(x, routes, weights, "silu", None, False, linear)
    np.testing.assert_array_equal(dirty[[0, 2]], clean[[0, 2]])
    assert np.isnan(dirty[1]).all()
    assert experts(x[:0], Routes(routes.ids[:0], routes.weights[:0]), weights, "silu", None, False, linear).shape == (
        0,
        6,
    )
