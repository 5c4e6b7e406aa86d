"""Single cases of verifiers: distributions at an edge, and paths of drafts that are accepted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.core.draft import ROOT, DraftTree
from penstock.core.sampling import TokenRules
from penstock.runner.verifiers.draws import Drawn, drawn_from, inverse, one_by_one
from penstock.runner.verifiers.spectr import division, k_sequential
from penstock.runner.verifiers.typical import least
from tests.unit.runner.test_verifiers_engine import walk

P = np.array([0.5, 0.25, 0.125, 0.125])


def test_a_draft_of_no_probability_was_not_drawn() -> None:
    """Taken for drawn, it would pass always: its own probability of 0 is below any."""
    rows = np.array([[0.5, 0.5, 0.0, 0.0]], np.float32)
    assert drawn_from(rows, 0, 2) is None
    assert drawn_from(None, 0, 1) is None
    assert drawn_from(rows * 3, 0, 1) == pytest.approx([0.5, 0.5, 0, 0]), "weights are made to add up"


@pytest.mark.parametrize("k", [1, 2, 5])
def test_where_the_draft_is_the_model_the_first_draft_passes(k: int) -> None:
    assert division(P, P, k) == (1.0, 1.0)
    drafted_rows = _drawn(P, [1] * k)
    assert k_sequential(P, drafted_rows, lambda j: 1 - 1e-12, 0.0) == (0, 1)


def test_one_draft_is_rejection_sampling_and_none_is_a_draw() -> None:
    q = np.array([0.25, 0.75, 0.0, 0.0])
    for judged, want in ((0.3, (0, 1)), (0.34, (None, 0))):  # p / q = 1/3
        assert k_sequential(P, _drawn(q, [1]), lambda j, u=judged: u, 0.0) == want
        assert one_by_one(P, _drawn(q, [1]), lambda j, u=judged: u, 0.0) == want
    assert k_sequential(P, [], lambda j: 0.0, 0.6) == (None, 1)


def test_k_drafts_pass_as_often_as_the_model_allows_and_the_rest_is_what_is_missing() -> None:
    """Exact by sum: the chance of each token by way of drafts and by way of what is left is the model's own."""
    q, k = np.array([0.1, 0.3, 0.3, 0.3]), 3
    g, times = division(P, q, k)
    assert 1 <= times <= g <= k
    by_draft = np.minimum(q, P / g) * times
    assert np.all(by_draft <= P + 1e-9)
    passes = 1 - (1 - np.minimum(q, P / g).sum()) ** k
    assert by_draft.sum() == pytest.approx(passes)
    left = P - by_draft
    draws = [k_sequential(P, _drawn(q, [3] * k), lambda j: 1 - 1e-12, u)[1] for u in (np.arange(4000) + 0.5) / 4000]
    shares = np.bincount(draws, minlength=4) / 4000
    assert shares == pytest.approx(left / left.sum(), abs=1e-3), "what is drawn where no draft has passed"


def test_a_draw_at_the_very_end_is_of_a_token_that_may_be_drawn() -> None:
    assert inverse(np.array([0.5, 0.5, 0.0]), 1.0) == 1
    assert inverse(np.array([0.0, 0.5, 0.5]), 0.0) == 1


def test_the_bound_of_typical_acceptance_is_of_the_entropy() -> None:
    even = np.full(4, 0.25)
    assert least(even, 0.3) == pytest.approx(min(0.09, 0.3 / 4)), "exp(-H) of four equal ones is a quarter"
    assert least(np.array([1.0, 0.0]), 0.3) == pytest.approx(0.09), "where the model is sure the square counts"
    assert least(P, 0.9) == pytest.approx(0.9 * 2**-1.75)


@pytest.mark.parametrize(("name", "accepted"), [("speculative-sampling", 0), ("multi-step", 2)])
def test_rejection_looks_at_the_first_draft_alone_and_multi_step_at_all(name: str, accepted: int) -> None:
    """The model is sure of 5, then 6; the first draft is 3, the second 5, and behind it is 6. Either way 5 comes."""
    sure = np.full((4, 8), -40.0, np.float32)
    sure[[0, 1, 2, 3], [5, 1, 6, 7]] = 40.0
    out = walk(name, 0.3, sure, DraftTree([3, 5, 6], [ROOT, ROOT, 1]), TokenRules(temperature=1.0, seed=1))
    assert (out.num_accepted, out.token_ids) == (accepted, [5, 6, 7][: accepted + 1])


def _drawn(q: np.ndarray, tokens: list[int]) -> list[Drawn]:
    return [Drawn(token, q) for token in tokens]
