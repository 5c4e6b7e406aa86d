"""Medusa heads: their arithmetic, their trees, what they remember, and what they refuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.base.bf16 import narrow
from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput
from penstock.core.draft import NO_DRAFT, ROOT, DraftJob, DraftTree, Outcome
from penstock.core.sampling import TokenRules
from penstock.drafters.heads import DraftHeads, read_heads
from penstock.drafters.medusa import MedusaDrafter, best_paths, best_tokens
from penstock.weights.load import fingerprint

E, V = 6, 40


def job(
    num_tokens: int = 5, num_nodes: int = 8, *, depth: int = 63, chain_only: bool = False, seq: int = 1
) -> DraftJob:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return DraftJob(seq, tokens, 3, num_nodes, depth, TokenRules(), 0, chain_only)


def random_heads(num_heads: int = 3, num_blocks: int = 2, seed: int = 0) -> DraftHeads:
    rng = np.random.default_rng(seed)
    shape = (num_heads, num_blocks, E, E)
    return DraftHeads(rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[:3]).astype(np.float32))


def test_heads_are_residual_blocks() -> None:
    heads, hidden = random_heads(), np.random.default_rng(1).normal(size=(4, E)).astype(np.float32)
    got = heads(hidden)
    for j, k in itertools.product(range(4), range(3)):
        x = hidden[j].astype(np.float64)
        for n in range(2):
            y = heads.weight[k, n].astype(np.float64) @ x + heads.bias[k, n]
            x = x + y / (1 + np.exp(-y))
        np.testing.assert_allclose(got[j, k], x, rtol=1e-4, atol=1e-4)


def test_heads_of_huge_numbers_stay_finite() -> None:
    heads = DraftHeads(np.full((1, 1, E, E), -1e4, np.float32), np.zeros((1, 1, E), np.float32))
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(heads(np.ones((1, E), np.float32)), np.ones((1, 1, E), np.float32))


def test_best_tokens_are_the_likeliest() -> None:
    logits = np.random.default_rng(2).normal(size=(5, V)).astype(np.float32) * 3
    ids, probs = best_tokens(logits, 8)
    for row in range(5):
        wide = np.exp(logits[row].astype(np.float64))
        want = np.argsort(-logits[row])[:8]
        assert ids[row].tolist() == want.tolist()
        np.testing.assert_allclose(probs[row], (wide / wide.sum())[want], rtol=1e-5)


@pytest.mark.parametrize("num_nodes", [1, 2, 5, 13, 40])
@pytest.mark.parametrize("depth", [1, 2, 63])
def test_a_tree_has_the_likeliest_nodes(num_nodes: int, depth: int) -> None:
    """Against all paths there are: the same likelihoods, best first, and every node has its parent."""
    rng = np.random.default_rng(num_nodes)
    probs = -np.sort(-rng.dirichlet(np.ones(4) * 0.5, size=3).astype(np.float32), axis=1)
    ids = np.stack([rng.choice(V, 4, replace=False) for _ in range(3)])
    tree = best_paths(ids, probs, job(num_nodes=num_nodes, depth=depth))
    everything = {
        ranks: float(np.prod([probs[d, r] for d, r in enumerate(ranks)], dtype=np.float64))
        for length in range(1, min(3, depth) + 1)
        for ranks in itertools.product(range(4), repeat=length)
    }
    want = sorted(everything.values(), reverse=True)[:num_nodes]
    paths: list[tuple[int, ...]] = []
    for i, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        assert parent < i
        above = () if parent == ROOT else paths[parent]
        paths.append((*above, int(np.flatnonzero(ids[len(above)] == token)[0])))
        assert tree.probs[i] == pytest.approx(float(probs[len(above), paths[-1][-1]]))
    assert len(set(paths)) == len(paths) == len(want)
    np.testing.assert_allclose([everything[p] for p in paths], want, rtol=1e-5)


def test_where_only_a_chain_can_be_verified_the_tree_is_one() -> None:
    ids, probs = np.arange(12).reshape(3, 4), np.tile(np.float32([0.4, 0.3, 0.2, 0.1]), (3, 1))
    tree = best_paths(ids, probs, job(num_nodes=9, chain_only=True))
    assert tree.is_chain
    assert tree.token_ids == [0, 4, 8]
    assert best_paths(ids, probs, job(num_nodes=0)).token_ids == []


class Head:
    """An output matrix; counts what it is asked for."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(3).normal(size=(V, E)).astype(np.float32)
        self.rows: list[int] = []

    def run(self, plan: Any, planes: Any) -> Any:
        raise AssertionError("heads need no layer")

    def run_pooling(self, plan: Any, planes: Any) -> Any:
        raise AssertionError("heads need no layer")

    def run_head(self, hidden: Any, planes: Any) -> Any:
        self.rows.append(len(hidden))
        return hidden @ self.table.T


class NoStorage:
    planes = ()


def drafter() -> tuple[MedusaDrafter, Head]:
    head = Head()
    return MedusaDrafter(random_heads(), head, NoStorage()), head  # type: ignore[arg-type]


def heard(seq_id: int, tree: DraftTree, path: list[int], seed: int = 0) -> Outcome:
    hidden = np.random.default_rng(seed).normal(size=(1 + len(tree.token_ids), E)).astype(np.float32)
    return Outcome(seq_id, tree, path, [], hidden)


def test_nothing_is_drafted_before_there_is_a_hidden_state() -> None:
    d, head = drafter()
    assert d.propose([job(5), job(7, seq=2)]) == [NO_DRAFT, NO_DRAFT]
    d.observe([heard(1, NO_DRAFT, [])])
    first, second = d.propose([job(6), job(8, seq=2)])
    assert len(first.token_ids) == 8
    assert second == NO_DRAFT
    assert head.rows == [3]


def test_the_state_is_that_of_the_last_accepted_draft() -> None:
    d, head = drafter()
    d.propose([job(5)])
    tree = DraftTree([7, 8, 9], [ROOT, ROOT, 1])
    outcome = heard(1, tree, [1, 2], seed=4)
    d.observe([outcome])
    assert outcome.hidden is not None
    (got,) = d.propose([job(8)])  # two accepted, one added
    want = best_paths(*best_tokens(random_heads()(outcome.hidden[3:4])[0] @ head.table.T, 8), job(8))
    assert got == want


@pytest.mark.parametrize("num_tokens", [5, 7, 9])
def test_a_state_that_belongs_elsewhere_is_not_used(num_tokens: int) -> None:
    """A row that was preempted, rolled back or extended by others since then."""
    d, _ = drafter()
    d.propose([job(5)])
    d.observe([heard(1, NO_DRAFT, [])])
    assert d.propose([job(num_tokens)]) == [NO_DRAFT]


def test_rows_that_leave_are_forgotten() -> None:
    d, _ = drafter()
    d.propose([job(5)])
    d.observe([heard(1, NO_DRAFT, [])])
    d.track(SchedulerOutput(2, removed=[1]))
    assert d.propose([job(6)]) == [NO_DRAFT]
    d.track(SchedulerOutput(3, removed=[1]))
    assert not d._seen
    assert not d._known


def write(folder: Path, **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    config = {"kind": "medusa", "base": "ab", "hidden_size": E} | changes.pop("config", {})
    tensors = {"weight": np.ones((2, 1, E, E), np.float32), "bias": np.ones((2, 1, E), np.float32)} | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def test_heads_are_read_as_they_were_written(tmp_path: Path) -> None:
    weight = np.random.default_rng(5).normal(size=(2, 3, E, E)).astype(np.float32)
    write(tmp_path, weight=weight, bias=np.ones((2, 3, E), np.float32))
    np.testing.assert_array_equal(read_heads(tmp_path, "medusa", E, "ab")[0].weight, weight)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": {"kind": "model"}}, "of kind 'model', not 'medusa'"),
        ({"config": {"base": "cd"}}, "trained on another model"),
        ({"config": {"hidden_size": 8}}, "trained on another model"),
        ({"weight": None}, "lack a tensor weight"),
        ({"weight": np.ones((2, 1, E, E), np.int32)}, "lack a tensor weight"),
        ({"bias": np.ones((3, 1, E), np.float32)}, "unsound"),
        ({"weight": np.ones((2, 1, E), np.float32)}, "unsound"),
        ({"weight": np.full((2, 1, E, E), np.nan, np.float32)}, "unsound"),
    ],
)
def test_D12_heads_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=says):
        read_heads(tmp_path, "medusa", E, "ab")


def test_D12_heads_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_heads(tmp_path / "nosuch", "medusa", E, "ab")


def test_a_fingerprint_tells_models_apart_but_not_how_they_were_loaded() -> None:
    rng = np.random.default_rng(6)
    exact = {"embed": narrow(rng.normal(size=(300, E))), "final_norm": narrow(rng.normal(size=E))}
    wide = {n: (w.astype(np.uint32) << 16).view(np.float32) for n, w in exact.items()}
    assert fingerprint(exact) == fingerprint(wide)
    wide["final_norm"] = wide["final_norm"] * np.float32(1.01)
    assert fingerprint(exact) != fingerprint(wide)
