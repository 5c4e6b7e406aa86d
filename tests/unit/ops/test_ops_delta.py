"""The gated delta rule: transformers' definitions, with one decay per head and per channel, slots that are read and
written right, the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from penstock.ops.ref.delta import gated_delta
from penstock.ops.ref.mamba import softplus
from penstock.ops.ref.pointwise import sigmoid
from penstock.ops.step import Step
from tests.unit.ops.test_ops_mamba import normal, step_of

T, G, H, K, W = 19, 2, 6, 5, 7
A = -np.exp(normal(1, H))
F32 = np.ndarray[Any, np.dtype[np.float32]]


def inputs(seed: int, per_channel: bool, n: int = T) -> list[F32]:
    keys = H if per_channel else G
    shapes = [(keys, K), (keys, K), (H, W), (H * K if per_channel else H,), (H,)]
    return [normal(seed + i, n, *shape) for i, shape in enumerate(shapes)]


def run(x: list[F32], step: Step) -> F32:
    return gated_delta(*x, step, 0, 0, A, 1e-6, 1.0)  # type: ignore[arg-type]


def plane() -> dict[str, F32]:
    return {"state": np.full((4, H, K * W), np.nan, np.float32)}


def cut(x: list[F32], lo: int, hi: int) -> list[F32]:
    return [np.ascontiguousarray(part[lo:hi]) for part in x]


@pytest.mark.parametrize("per_channel", [False, True])
def test_it_is_what_transformers_computes(per_channel: bool) -> None:
    q, k, v, dt, beta = x = inputs(10, per_channel)
    got = run(x, step_of([(0, T, 2)], plane()))
    decay = softplus(dt).reshape(T, H, -1) * A[:, None]
    rows = [torch.tensor(part[None]) for part in (q, k, v, decay if per_channel else decay[:, :, 0], sigmoid(beta))]
    rule = recurrent_kimi_delta_attention if per_channel else torch_recurrent_gated_delta_rule
    want, _ = rule(
        *rows[:3], g=rows[3], beta=rows[4], initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
    )
    np.testing.assert_allclose(got, want[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("cuts", [[1] * T, [2, 1, 16], [9, 10]])
def test_every_chunking_has_the_same_bits(cuts: list[int], per_channel: bool) -> None:
    x, planes, at, parts = inputs(20, per_channel), plane(), 0, []
    for n in cuts:
        parts.append(run(cut(x, at, at + n), step_of([(at, n, 2)], planes)))
        at += n
    whole = plane()
    np.testing.assert_array_equal(np.concatenate(parts), run(x, step_of([(0, T, 2)], whole)))
    np.testing.assert_array_equal(planes["state"], whole["state"])
    assert np.isnan(planes["state"][[0, 1, 3]]).all(), "only the sequence's own page is written"


def test_a_batch_of_sequences_equals_each_alone() -> None:
    """One goes on, one begins on a page that held another's state, one is there without tokens."""
    first, second, planes, alone = inputs(30, False), inputs(40, False), plane(), plane()
    run(cut(first, 0, 8), step_of([(0, 8, 3)], planes))
    run(second, step_of([(0, T, 0)], planes))
    both = [np.concatenate([a[8:14], b[:5]]) for a, b in zip(first, second, strict=True)]
    got = run(both, step_of([(8, 6, 3), (7, 0, 1), (0, 5, 0)], planes))
    np.testing.assert_array_equal(got[:6], run(first, step_of([(0, T, 3)], alone))[8:14])
    np.testing.assert_array_equal(got[6:], run(second, step_of([(0, T, 0)], alone))[:5])
    assert np.isnan(planes["state"][1]).all()


def test_what_beta_is_multiplied_by() -> None:
    """A corrected value is written as often as beta says, so that of 2 the first token leaves twice the value."""
    x = inputs(50, False, 1)
    one, two = (gated_delta(*x, step_of([(0, 1, 0)], plane()), 0, 0, A, 1e-6, by) for by in (1.0, 2.0))  # type: ignore[arg-type]
    np.testing.assert_allclose(two, 2.0 * one, rtol=1e-6)
