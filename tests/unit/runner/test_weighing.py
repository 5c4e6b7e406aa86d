"""`runner.weighing`: attention worked out beside the forward pass."""

from __future__ import annotations

import numpy as np

from penstock.runner.weighing import Score, attention_weights


def test_weights_are_the_softmax_of_what_a_query_sees() -> None:
    rng = np.random.default_rng(3)
    q, keys = rng.normal(size=(3, 2, 4)).astype(np.float32), rng.normal(size=(5, 4)).astype(np.float32)
    positions = np.array([0, 1, 7, 8, 9], np.int32)
    weights = attention_weights(q, keys, positions, 10, Score(1, 0.5, None))
    for t in range(3):
        scores = np.float32(0.5) * q[t] @ keys[: 3 + t].T
        wanted = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights[t, :, : 3 + t], wanted, rtol=1e-5)
        assert not weights[t, :, 3 + t :].any(), "what comes behind the query has no weight"


def test_a_query_whose_tokens_are_all_gone_weighs_nothing() -> None:
    """Without sinks and with a budget below the watched window, an earlier query's own past may be forgotten."""
    q, keys = np.ones((4, 2, 4), np.float32), np.ones((2, 4), np.float32)
    weights = attention_weights(q, keys, np.array([8, 9], np.int32), 10, Score(1, 0.5, 30.0))
    assert not weights[:2].any()
    np.testing.assert_allclose(weights[2:].sum(axis=-1), 1, rtol=1e-6)
