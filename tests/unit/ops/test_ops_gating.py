"""Ways of limiting what an expert takes, beside dynamic gating: what is dropped, padded and balanced."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from penstock.core.model_spec import Router
from penstock.ops.ref.experts import Routes, route
from penstock.ops.ref.gating import Gating, capacity, capped, dynamic, expert_choice

T, X = 200, 16


def skewed(top_k: int) -> tuple[np.ndarray, Routes]:
    """Some experts are liked more than others."""
    rng = np.random.default_rng(top_k)
    logits = (rng.standard_normal((T, X)) + np.linspace(0, 2, X)).astype(np.float32)
    return logits, route(logits, top_k, Router(renormalize=True))


def load(gating: Gating) -> list[int]:
    return np.count_nonzero(gating.weights, axis=0).tolist()


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_C70_dynamic_gating_drops_and_pads_nobody_where_a_capacity_does_both(top_k: int) -> None:
    """The waste of a capacity: the smaller it is, the more is dropped, the larger, the more is padded; what drops
    nobody is padded by the most that an expert is liked more than the mean."""
    _, routes = skewed(top_k)
    free = dynamic(routes, X)
    assert (free.rows, free.dropped, free.padded, free.waste) == (T * top_k, 0, 0, 0.0)
    chosen = Counter(routes.ids.reshape(-1).tolist())
    assert load(free) == [chosen[e] for e in range(X)]
    for t in range(T):
        np.testing.assert_array_equal(free.weights[t, routes.ids[t]], routes.weights[t])
    factors = [0.5, 1.0, 1.25, 2.0, 4.0]
    found = [capped(routes, X, factor) for factor in factors]
    for factor, one in zip(factors, found, strict=True):
        most = capacity(T, X, top_k, factor)
        want_dropped = sum(max(0, n - most) for n in chosen.values())
        assert one.dropped == want_dropped
        assert one.rows == most * X
        assert one.padded == one.rows - (T * top_k - want_dropped)
    assert found[0].dropped > found[1].dropped > found[2].dropped > 0
    assert found[1].padded > 0, "at the mean, some are full and some are not"
    enough = next(f for f in np.arange(1, 17, 0.01) if not capped(routes, X, f).dropped)
    wasted = capped(routes, X, enough)
    assert wasted.rows > 1.5 * free.rows
    assert wasted.waste > 1 / 3


@pytest.mark.parametrize("top_k", [1, 2])
def test_C66_a_capacity_drops_the_last_tokens_of_full_experts(top_k: int) -> None:
    """Switch (one expert) and GShard (two): the first come are served, and a dropped token keeps its other expert."""
    _, routes = skewed(top_k)
    most = capacity(T, X, top_k, 1.0)
    assert most == -(-T * top_k // X)
    got = capped(routes, X, 1.0)
    counts = [0] * X
    dropped = 0
    for t in range(T):
        for e, weight in zip(routes.ids[t], routes.weights[t], strict=True):
            counts[e] += 1
            if counts[e] > most:
                dropped += 1
                assert got.weights[t, e] == 0
            else:
                assert got.weights[t, e] == weight
    assert got.dropped == dropped > 0
    assert max(load(got)) == most
    assert capped(routes, X, X / top_k).dropped == 0, "room for all at each"
    assert capacity(1, 128, 1, 1.0) == 1


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_C67_experts_that_choose_have_equally_many_tokens(top_k: int) -> None:
    logits, routes = skewed(top_k)
    got = expert_choice(logits, top_k)
    assert set(load(got)) == {capacity(T, X, top_k, 1.0)}
    assert got.padded == 0
    assert len(set(load(dynamic(routes, X)))) > 1
    per_token = np.count_nonzero(got.weights, axis=1)
    assert per_token.min() < top_k < per_token.max()
    assert got.dropped == int((per_token == 0).sum())
    # Not causal: what the first half passes through depends on the second.
    half = expert_choice(logits[: T // 2], top_k)
    assert (half.weights != got.weights[: T // 2]).any()
    same = expert_choice(np.zeros((6, 3), np.float32), 1)
    assert same.weights.any(axis=1).tolist() == [True, True, False, False, False, False], "equals: the lower token"


def test_dynamic_gating_gives_a_token_the_same_in_any_company() -> None:
    logits, _ = skewed(2)
    routes, half = (route(x, 2, Router()) for x in (logits, logits[:7]))
    np.testing.assert_array_equal(dynamic(routes, X).weights[:7], dynamic(half, X).weights)
    assert (capped(routes, X, 1.0).weights[:7] != capped(half, X, 1.0).weights).any()
