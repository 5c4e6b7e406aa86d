"""The latent and the recurrent mixer against their definitions in float64, without absorption and without a state."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.ref.latent import latent_output, latent_query
from penstock.ops.ref.recurrence import recurrent
from penstock.ops.step import Step
from tests.oracle import softmax_attention

T, H, NOPE, ROPE, C, W = 17, 3, 6, 4, 12, 5


def test_absorbed_latent_attention_equals_the_naive_form() -> None:
    """Keys and values rebuilt per head from the latent, as the paper writes them before absorbing."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((T, H, NOPE + ROPE)).astype(np.float32)
    latent = rng.standard_normal((T, C)).astype(np.float32)
    k_rope = rng.standard_normal((T, ROPE)).astype(np.float32)
    key, value = (rng.standard_normal((H, n, C)).astype(np.float32) for n in (NOPE, W))
    absorbed = latent_query(q, key)
    assert absorbed.shape == (T, H, C + ROPE)
    attended = softmax_attention(absorbed, np.concatenate([latent, k_rope], -1)[:, None], latent[:, None], 0.3)
    got = latent_output(attended, value)
    k_nope = np.einsum("tc,hnc->thn", latent.astype(np.float64), key)
    keys = np.concatenate([k_nope, np.broadcast_to(k_rope[:, None], (T, H, ROPE))], axis=-1)
    want = softmax_attention(
        q.astype(np.float64), keys, np.einsum("tc,hwc->thw", latent.astype(np.float64), value), 0.3
    )
    np.testing.assert_allclose(got, want, atol=1e-5)
    for t in range(T):
        np.testing.assert_array_equal(latent_query(q[t : t + 1].copy(), key)[0], absorbed[t])
        np.testing.assert_array_equal(latent_output(attended[t : t + 1].copy(), value)[0], got[t])


def step_of(start: int, count: int, page: int, plane: np.ndarray) -> Step:
    positions = np.arange(start, start + count, dtype=np.int32)
    ints = [np.array(x, np.int32) for x in ([0, count], [start + count], [])]
    group = GroupPlan(1, 4, (np.array([[page]], np.int32),))
    return Step(StepPlan(np.zeros(count, np.int32), positions, *ints, (group,)), [{"state": plane}])


@pytest.mark.parametrize("cuts", [[17], [1] * 17, [5, 1, 11]])
def test_recurrence_equals_its_closed_form(cuts: list[int]) -> None:
    """out_t = sum over s <= t of decay_{s+1} ... decay_t (q_t . k_s) v_s."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, T, H, NOPE)).astype(np.float32)
    v = rng.standard_normal((T, H, W)).astype(np.float32)
    decay = rng.standard_normal((T, H)).astype(np.float32)
    plane = np.full((3, H, NOPE * W), np.nan, np.float32)
    parts, at = [], 0
    for n in cuts:
        own = slice(at, at + n)
        parts.append(recurrent(q[own], k[own], v[own], decay[own], step_of(at, n, 2, plane), 0, 0))
        at += n
    keep = 1 / (1 + np.exp(-decay.astype(np.float64)))
    want = np.zeros((T, H, W))
    for t in range(T):
        for s in range(t + 1):
            weight = np.prod(keep[s + 1 : t + 1], axis=0) * np.einsum("hk,hk->h", q[t], k[s])
            want[t] += weight[:, None] * v[s]
    np.testing.assert_allclose(np.concatenate(parts), want, atol=1e-4)
    assert np.isnan(plane[:2]).all(), "only the sequence's own page is written"
    assert np.isfinite(plane[2]).all()


def test_a_sequence_at_position_0_ignores_what_its_page_held() -> None:
    ones = np.ones((1, H, NOPE), np.float32)
    plane = np.full((1, H, NOPE * W), 99.0, np.float32)
    out = recurrent(
        ones, ones, np.ones((1, H, W), np.float32), np.zeros((1, H), np.float32), step_of(0, 1, 0, plane), 0, 0
    )
    np.testing.assert_array_equal(out, NOPE)
