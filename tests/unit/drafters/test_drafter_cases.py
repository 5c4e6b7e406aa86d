"""Single cases of drafters: what is forgotten, and what options choose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import SchedulerOutput
from penstock.drafters.choose import Sprout
from penstock.drafters.draft_model import DraftModelDrafter
from penstock.drafters.expanders import expander
from penstock.drafters.jacobi import make, make_gauss_seidel
from penstock.drafters.per_row import PerRow
from tests.drafting import appended, removed
from tests.drafting import job as text_job
from tests.unit.drafters.test_draft_models import job, pairs
from tests.unit.drafters.test_drafters_jacobi import counts


@pytest.mark.parametrize("gone", [removed(1), appended(1, [5], rollback=1)])
def test_a_row_that_is_gone_or_rolled_back_begins_anew_and_others_go_on(gone: SchedulerOutput) -> None:
    """A sequence's number may come back with other tokens: what was kept about it would be another's."""
    rows: PerRow[str] = PerRow()
    rows.states.update({1: "its own", 2: "another's"})
    rows.track(appended(1, [4]))
    assert rows.states == {1: "its own", 2: "another's"}
    rows.track(gone)
    assert rows.states == {2: "another's"}


def bench(**config: Any) -> Any:
    usual = {"tree": "opt", "verifier": "match", "branches": 3, "fallback": 0.0, "window": 4}
    return SimpleNamespace(config=SimpleNamespace(**(usual | config)))


def grown(tree: str) -> list[tuple[int, int]]:
    """The nodes after one level of four likely tokens, where six have room."""
    sprout = Sprout(job(num_nodes=6), 6, 3)
    expander(bench(tree=tree)).grow(sprout, np.array([[0.4, 0.3, 0.2, 0.1]], np.float32), [0])
    return pairs(sprout)


def test_opt_expands_all_that_is_likely_and_grown_as_many_as_it_is_told() -> None:
    assert len(grown("opt")) == 4
    assert len(grown("grown")) == 3


def test_gauss_seidel_is_chosen_by_its_name() -> None:
    """It finishes a block before it begins another: where no draft was right, one fewer is left of it."""
    lengths = []
    for made in (make(bench()), make_gauss_seidel(bench())):
        first, then = text_job([7, 8, 9]), text_job([7, 8, 9, 11])
        (tree,) = made.propose([first])
        made.observe([counts(first, tree, lambda tokens: 11)])
        lengths.append((len(tree.token_ids), len(made.propose([then])[0].token_ids)))
    assert lengths == [(4, 4), (4, 3)]


@pytest.mark.parametrize(
    ("num_tokens", "max_depth", "num_nodes", "depth"),
    [(3, 1, 8, 1), (3, 4, 1, 4), (10, 4, 8, 1), (8, 9, 8, 3), (11, 4, 8, 0), (3, 0, 8, 0), (3, 4, 0, 0)],
)
def test_a_draft_model_drafts_as_deep_as_is_asked_and_as_it_can_read(
    num_tokens: int, max_depth: int, num_nodes: int, depth: int
) -> None:
    """One draft where one is asked for, and one behind its last place; it reads 10 tokens at most."""
    drafter: Any = SimpleNamespace(model=SimpleNamespace(max_len=10))
    sprout = DraftModelDrafter._sprout(drafter, job(num_nodes, max_depth, num_tokens))
    assert (sprout.max_depth if sprout is not None else 0) == depth
