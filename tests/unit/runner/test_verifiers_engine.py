"""Verifiers that are asked for, inside the engine; and the lossy ones by themselves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.config import SpeculativeConfig, from_kwargs
from penstock.core.draft import ROOT, DraftTree
from penstock.core.request import Request
from penstock.core.sampling import TokenRules
from penstock.launch.speculation import make_verifier
from penstock.runner.drafted import DraftedRow
from penstock.runner.sampler import Sampler
from penstock.runner.verifiers import VERIFIERS
from penstock.runner.verifiers.typical import least
from penstock.runner.verifiers.walk import probabilities
from tests.engine.harness import Collected, Knobs, fake_engine, request, run
from tests.engine.naive import fake_logits, generate
from tests.engine.test_speculation import RULES

OTHERS = tuple(name for name in VERIFIERS if name != "match")  # to register one is to enrol it
VOCAB = 8


def engine(name: str, *, threshold: float = 0.3, slots: bool = False, share: float = 0.8) -> Any:
    core, _ = fake_engine(Knobs(budget=64, num_blocks=128, num_drafts=6, draft_share=share), slots=slots)
    runner = core.executor.runner  # type: ignore[attr-defined]
    config = SpeculativeConfig(method="ngram", verifier=name, threshold=threshold)
    runner.verifier = VERIFIERS.get(name)(runner.sampler, config)
    return core


def requests() -> list[Request]:
    return [
        request([3 + i, 4, 5, 6 + i], request_id=f"r{i}", max_tokens=25, eos=[2] if i % 2 else [], **rules)
        for i, rules in enumerate(RULES)
    ]


def greedy(r: Request) -> bool:
    return r.rules.greedy


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_same_seeds_same_tokens_and_greedy_ones_exact(name: str, slots: bool) -> None:
    """Through the engine, with company, processors and (slots) a state that is put back after a rejection."""
    found: list[dict[str, Collected]] = []
    for _ in range(2):
        core = engine(name, slots=slots)
        found.append(run(core, requests()))
        assert core.stats.num_accepted_tokens > 0
    for r in requests():
        tokens = found[0][r.request_id].tokens[0]
        assert found[1][r.request_id].tokens[0] == tokens
        assert found[0][r.request_id].error is None
        if greedy(r) and name != "bild":
            assert tokens == generate(fake_logits, r)[0]
        assert not any(list(pair) == [4, 6] for bad in r.rules.bad_sequences for pair in pairwise(tokens))


@pytest.mark.parametrize(("name", "threshold"), [("typical", 1e9), ("bild", 1e-12)])
def test_lossy_verifiers_are_exact_at_full_strictness(name: str, threshold: float) -> None:
    got = run(engine(name, threshold=threshold), requests())
    for r in requests():
        assert got[r.request_id].tokens[0] == generate(fake_logits, r)[0]


@pytest.mark.parametrize("name", ["speculative-sampling", "multi-step", "spectr"])
def test_exact_verifiers_accept_a_right_draft(name: str) -> None:
    """What the drafter gets right (the likeliest token of a sharp distribution) passes; and tokens stay in the cut."""
    core = engine(name, share=1.0)
    got = run(core, [request([5, 4], request_id="r", max_tokens=60, temperature=0.05, seed=1)])
    assert len(got["r"].tokens[0]) == 60
    assert core.stats.num_accepted_tokens > 30


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(9, VOCAB)).astype(np.float32) * 2


def walk(name: str, threshold: float, logits: np.ndarray, tree: DraftTree, rules: TokenRules) -> Any:
    verifier = VERIFIERS.get(name)(
        Sampler(VOCAB), SpeculativeConfig(method="ngram", verifier=name, threshold=threshold)
    )
    drafted = DraftedRow(1, rules, 0, 5, 0, 4, tree)
    choices = verifier._sampler.sample(logits, [], verifier.nodes([drafted])).choices
    return verifier.verify(logits, [drafted], choices).verified[0]


TREE = DraftTree([0, 1, 2, 3, 4, 5, 6, 7], [ROOT, ROOT, 0, 0, 1, 2, 4, 6])
DRAWN = TokenRules(temperature=1.0)


def test_D12_typical_acceptance_takes_the_longest_typical_path() -> None:
    """Against all paths, tried one by one."""
    lengths = set()
    for seed in range(60):
        logits, rules = table(seed), msgspec.structs.replace(DRAWN, seed=seed)
        p = [probabilities(row, rules) for row in logits]

        def typical(i: int, p: list[np.ndarray] = p) -> bool:
            row = p[TREE.parents[i] + 1]
            return bool(row[TREE.token_ids[i]] > least(row, 0.3))

        longest = 0
        for i in range(8):
            path = [i]
            while TREE.parents[path[-1]] != ROOT:
                path.append(TREE.parents[path[-1]])
            if all(typical(node) for node in path):
                longest = max(longest, len(path))
        tokens = walk("typical", 0.3, logits, TREE, rules).token_ids
        lengths.add(longest)
        assert len(tokens) >= longest + 1
    assert len(lengths) >= 4


def test_typical_bound() -> None:
    """Certain: 0.09 of 0.3; at random over 8 tokens: 0.3 / 8."""
    sure, even = np.eye(VOCAB)[0], np.full(VOCAB, 1 / VOCAB)
    assert least(sure, 0.3) == pytest.approx(0.09)
    assert least(even, 0.3) == pytest.approx(0.3 / VOCAB)


def test_D28_rollback_accepts_more_of_what_the_model_likes_less_as_the_threshold_grows() -> None:
    """The verifier's part of the curve: accepted drafts rise with the threshold, the model's opinion of them falls."""
    chain = DraftTree([0, 1, 2, 3, 4, 5, 6, 7], list(range(-1, 7)))
    accepted, opinion = [], []
    for threshold in (0.1, 0.5, 1.0, 2.0, 4.0):
        total, cost = 0, []
        for seed in range(80):
            logits, rules = table(seed), TokenRules(seed=seed)
            out = walk("bild", threshold, logits, chain, rules)
            total += out.num_accepted
            p = [probabilities(row, DRAWN) for row in logits]
            cost += [-np.log(p[i][t]) for i, t in enumerate(out.token_ids)]
            own = [int(row.argmax()) for row in logits]
            for i, token in enumerate(out.token_ids):
                assert token == own[i] or -np.log(p[i][token]) <= threshold
            if len(out.token_ids) <= 8:
                last = len(out.token_ids) - 1
                assert out.token_ids[last] == own[last] != chain.token_ids[last], "rolled back to the model's token"
        accepted.append(total)
        opinion.append(np.mean(cost))
    assert accepted == sorted(accepted)
    assert accepted[0] < accepted[-1]
    assert opinion == sorted(opinion)


@pytest.mark.parametrize(("chance", "passes"), [(0.36, False), (0.375, True)])
def test_D28_a_draft_passes_down_to_e_to_the_minus_threshold(chance: float, passes: bool) -> None:
    """A threshold of 1 is a chance of 0.368, in natural logarithms; the model's own token has the rest."""
    p = np.full(VOCAB, 1e-6)
    p[3], p[5] = chance, 1 - chance
    logits = np.log(np.stack([p, np.roll(p, 1)])).astype(np.float32)
    out = walk("bild", 1.0, logits, DraftTree([3], [ROOT]), TokenRules())
    assert out.token_ids[0] == (3 if passes else 5)
    assert out.num_accepted == int(passes)


@pytest.mark.parametrize("name", ["typical", "bild"])
def test_lossy_verifiers_accept_no_fewer_drafts_than_match(name: str) -> None:
    more = 0
    for seed in range(60):
        rules = msgspec.structs.replace(DRAWN, seed=seed)
        lossy = walk(name, 0.7, table(seed), TREE, rules).num_accepted
        exact = walk("match", 0.7, table(seed), TREE, rules).num_accepted
        more += lossy - exact
    assert more > 0


@pytest.mark.parametrize(("name", "threshold"), [("typical", 1e-9), ("bild", 1e9)])
def test_lossy_verifiers_never_accept_what_must_not_be_drawn(name: str, threshold: float) -> None:
    for seed in range(20):
        rules = msgspec.structs.replace(DRAWN, seed=seed, top_k=2)
        out = walk(name, threshold, table(seed), TREE, rules)
        rows, here = [0], ROOT
        for token in out.token_ids[:-1]:
            here = next(i for i in range(8) if TREE.parents[i] == here and TREE.token_ids[i] == token)
            rows.append(here + 1)
        for row, token in zip(rows, out.token_ids, strict=True):
            assert probabilities(table(seed)[row], rules)[token] > 0.0


def spec(**given: Any) -> Any:
    return make_verifier(from_kwargs(model="(test)", speculative_config=given or None), Sampler(VOCAB))


def test_the_verifier_is_chosen_by_its_name() -> None:
    for given in ({}, {"method": "ngram"}, {"method": "ngram", "verifier": "match"}):
        assert spec(**given) is None, "the rank's own"
    for name in OTHERS:
        assert spec(method="ngram", verifier=name) is not None
    with pytest.raises(ConfigError, match="choose tree chain, or verifier multi-step"):
        spec(method="ngram", verifier="speculative-sampling", tree="k-ary")
