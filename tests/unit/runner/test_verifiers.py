"""Verifiers that are exact in distribution: chi-squares of one token and of two, and of verifiers that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy.stats import chisquare

from penstock.base.rng import uniform
from penstock.config.speculative import VERIFIERS as CHOICES
from penstock.config.speculative import SpeculativeConfig
from penstock.core.batch import AddedRow, SchedulerOutput
from penstock.core.draft import ROOT, DraftTree
from penstock.core.sampling import TokenRules
from penstock.drafters.tree_shapes import Shape, k_ary
from penstock.runner.drafted import DraftedRow
from penstock.runner.sampler import Sampler
from penstock.runner.verifiers import EXACT_DISTRIBUTION, EXACT_TOKENS, LOSSY, VERIFIERS, draws
from penstock.runner.verifiers.draws import Drawn, DrawRule, Select, inverse, one_by_one
from penstock.runner.verifiers.spectr import division, k_sequential
from penstock.runner.verifiers.walk import OWN_DRAW, RuleVerifier, probabilities
from penstock.runner.verify import Verifier, VerifyOutput
from tests.trees import Expand, draw_distinct, draw_independent, fill, likeliest, merge

VOCAB = 5
SURE = 1e-4  # a right verifier fails one chi-square in 10000; seeds are fixed


def fits(counts: np.ndarray, p: np.ndarray) -> float:
    """p-value of the counts; 0.0 if something came that cannot come."""
    if counts[p <= 0].any():
        return 0.0
    return float(chisquare(counts[p > 0], p[p > 0] / p[p > 0].sum() * counts.sum()).pvalue)


def table(rng: np.random.Generator, *, holes: int = 0) -> np.ndarray:
    """A distribution [V], spiky; `holes` of its entries are zero."""
    p = rng.dirichlet(np.full(VOCAB, 0.7)) + 0.01
    p[rng.permutation(VOCAB)[:holes]] = 0.0
    return p / p.sum()


# -- one token --------------------------------------------------------------------------------------------------------

Draw = Callable[[np.ndarray, int, np.random.Generator], list[Drawn]]


def with_replacement(q: np.ndarray, k: int, rng: np.random.Generator) -> list[Drawn]:
    return [Drawn(int(x), q) for x in rng.choice(VOCAB, size=k, p=q)]


def without_replacement(q: np.ndarray, k: int, rng: np.random.Generator) -> list[Drawn]:
    tokens, rows = draw_distinct(q, k, lambda j: rng.random())
    assert rows is not None
    return [Drawn(x, row.astype(np.float64)) for x, row in zip(tokens, rows, strict=True)]


def several_drafters(q: np.ndarray, k: int, rng: np.random.Generator) -> list[Drawn]:
    other = np.roll(q, 1)
    return [*with_replacement(q, 1, rng), *with_replacement(other, k - 1, rng)]


def chosen(q: np.ndarray, k: int, rng: np.random.Generator) -> list[Drawn]:
    return [Drawn(x, None) for x in likeliest(q, k)[0]]


def one_token(
    select: Select, draw: Draw, p: np.ndarray, q: np.ndarray, k: int, *, trials: int = 3000, seed: int = 0
) -> tuple[np.ndarray, float]:  # fmt: skip
    """Counts of the tokens that resulted [V], and the share of trials in which a draft passed."""
    rng = np.random.default_rng(seed)
    counts, passed = np.zeros(VOCAB), 0
    for _ in range(trials):
        drafted_rows = draw(q, k, rng)
        judged = rng.random(k + 1)
        which, token = select(p, drafted_rows, lambda j, u=judged: float(u[j]), float(judged[k]))  # type: ignore[misc]
        assert which is None or drafted_rows[which].token == token
        counts[token] += 1
        passed += which is not None
    return counts, passed / trials


@pytest.mark.parametrize("holes", [(0, 0), (2, 0), (0, 2), (2, 2)])
@pytest.mark.parametrize(
    ("select", "draw", "k"),
    [
        (one_by_one, with_replacement, 1),
        (one_by_one, with_replacement, 3),
        (one_by_one, without_replacement, 3),
        (one_by_one, several_drafters, 3),
        (one_by_one, chosen, 3),
        (k_sequential, with_replacement, 2),
        (k_sequential, with_replacement, 4),
        (k_sequential, without_replacement, 3),
        (k_sequential, chosen, 2),
    ],
)
@pytest.mark.sampled(6)
def test_one_token_has_the_model_s_distribution(
    select: Select, draw: Draw, k: int, holes: tuple[int, int]
) -> None:  # fmt: skip
    rng = np.random.default_rng(k + holes[0] * 10 + holes[1] * 100)
    p, q = table(rng, holes=holes[0]), table(rng, holes=holes[1])
    counts, _ = one_token(select, draw, p, q, k)
    assert fits(counts, p) > SURE, (counts / counts.sum(), p)


def no_residual(p: Any, drafted_rows: Any, judge: Any, rest: float) -> tuple[int | None, int]:
    which, token = one_by_one(p, drafted_rows, judge, rest)
    return which, token if which is not None else inverse(p, rest)


def always(p: Any, drafted_rows: Any, judge: Any, rest: float) -> tuple[int | None, int]:
    return (0, drafted_rows[0].token) if drafted_rows else (None, inverse(p, rest))


def forgets_draws(p: Any, drafted_rows: Any, judge: Any, rest: float) -> tuple[int | None, int]:
    """A token that was drawn twice is judged once."""
    once = [i for i, g in enumerate(drafted_rows) if g.token not in {other.token for other in drafted_rows[:i]}]
    which, token = one_by_one(p, [drafted_rows[i] for i in once], judge, rest)
    return None if which is None else once[which], token


def half_divided(p: Any, drafted_rows: Any, judge: Any, rest: float) -> tuple[int | None, int]:
    """k-sequential selection with g = 1."""
    for j, (token, q) in enumerate(drafted_rows):
        if judge(j) * q[token] < p[token]:
            return j, token
    left = np.maximum(p - drafted_rows[0].q, 0.0)
    return None, inverse(left, rest)


@pytest.mark.parametrize("wrong", [no_residual, always, forgets_draws, half_divided])
def test_a_wrong_verifier_fails_the_chi_square(wrong: Select) -> None:
    """The tests above would see these: the power of the chi-square at the same number of trials."""
    rng = np.random.default_rng(3)
    p, q = table(rng), table(rng)
    k = 1 if wrong in (no_residual, always) else 3
    counts, _ = one_token(wrong, with_replacement, p, q, k)
    assert fits(counts, p) < SURE
    counts, _ = one_token(one_by_one, with_replacement, p, q, k)
    assert fits(counts, p) > SURE


def test_D20_acceptance_is_no_less_than_that_of_one_draft() -> None:
    """SpecTr: in theory (g b(g) against sum min(p, q)), and measured."""
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(300):
        p, q, k = table(rng), table(rng), int(rng.integers(2, 9))
        single = float(np.minimum(p, q).sum())
        g, times = division(p, q, k)
        b = float(np.minimum(q, p / g).sum())
        assert 1.0 <= g <= k
        assert times == pytest.approx((1 - (1 - b) ** k) / b)
        assert times <= g + 1e-9, "more of a token than p has"
        assert b * times >= single - 1e-9
        gains.append(b * times - single)
    assert np.mean(gains) > 0.05
    for seed in range(4):
        p, q = table(rng), table(rng)
        one = one_token(one_by_one, with_replacement, p, q, 1, trials=3000, seed=seed)[1]
        four = one_token(k_sequential, with_replacement, p, q, 4, trials=3000, seed=seed)[1]
        assert one == pytest.approx(float(np.minimum(p, q).sum()), abs=0.04)
        g, times = division(p, q, 4)
        assert four == pytest.approx(times * float(np.minimum(q, p / g).sum()), abs=0.04)
        assert four >= one - 0.02


# -- two tokens, through the whole verifier ---------------------------------------------------------------------------


class TwoSteps:
    """A model of two steps: logits by the last token; and a draft of it."""

    def __init__(self, seed: int, *, draft_holes: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.logits = np.log(np.stack([table(rng) for _ in range(VOCAB + 1)])).astype(np.float32)
        self.draft = np.stack([table(rng, holes=draft_holes) for _ in range(VOCAB + 1)])

    def expand(self) -> Expand:
        return lambda paths: np.stack([self.draft[path[-1] if path else VOCAB] for path in paths])

    def rows(self, tree: DraftTree) -> np.ndarray:
        return self.logits[[VOCAB, *tree.token_ids]]

    def own(self, rules: TokenRules) -> list[np.ndarray]:
        """The model's distributions under these rules, by the last token."""
        bias = np.zeros(VOCAB, np.float32)
        bias[list(rules.logit_bias)] = list(rules.logit_bias.values())
        return [probabilities(row + bias, rules) for row in self.logits]

    def joint(self, rules: TokenRules) -> np.ndarray:
        p = self.own(rules)
        return np.stack([p[VOCAB][a] * p[a] for a in range(VOCAB)])


Build = Callable[[TwoSteps, np.random.Generator], DraftTree]


def a_chain(world: TwoSteps, rng: np.random.Generator) -> DraftTree:
    return fill(k_ary(1, 2, 2), world.expand(), lambda row, n, d, f: draw_independent(row, n, lambda j: rng.random()))


def independent(world: TwoSteps, rng: np.random.Generator) -> DraftTree:
    return fill(k_ary(2, 6, 2), world.expand(), lambda row, n, d, f: draw_independent(row, n, lambda j: rng.random()))


def distinct(world: TwoSteps, rng: np.random.Generator) -> DraftTree:
    shape = Shape([ROOT, ROOT, ROOT, 0, 0, 1], [0, 1, 2, 0, 1, 0])
    return fill(shape, world.expand(), lambda row, n, d, f: draw_distinct(row, n, lambda j: rng.random()))


def paths(world: TwoSteps, rng: np.random.Generator) -> DraftTree:
    """Three drafts of two tokens, common beginnings once but for the drafts themselves."""
    return merge([a_chain(world, rng) for _ in range(3)], 6)


def picked(world: TwoSteps, rng: np.random.Generator) -> DraftTree:
    return fill(k_ary(2, 6, 2), world.expand())


def lying(world: TwoSteps, rng: np.random.Generator) -> DraftTree:
    """Drafts that their own distribution says are impossible, or whose distribution is none."""
    tree = picked(world, rng)
    rows = np.zeros((len(tree.token_ids), VOCAB), np.float32)
    rows[1] = np.nan
    rows[3] = -1.0
    return tree._replace(drawn_from=rows)


FREE = TokenRules(temperature=1.0)
CUT = TokenRules(temperature=0.8, top_k=4, top_p=0.95)
FOLLOWED = TokenRules(temperature=1.0, logit_bias={1: 0.5}, min_p=0.02)


def make(name: str) -> Any:
    return VERIFIERS.get(name)(Sampler(VOCAB), SpeculativeConfig(method="ngram", verifier=name))


def verified(verifier: Any, world: TwoSteps, tree: DraftTree, rules: TokenRules) -> VerifyOutput:
    drafted = DraftedRow(1, rules, 0, 5, 0, 4, tree)
    nodes = verifier.nodes([drafted])
    logits = world.rows(tree)
    choices = verifier._sampler.sample(logits, [], nodes).choices
    out: VerifyOutput = verifier.verify(logits, [drafted], choices)
    return out


def trials(verifier: Any, world: TwoSteps, build: Build, rules: TokenRules, count: int) -> Iterator[list[int]]:
    rng = np.random.default_rng(9)
    follow = world.own(rules)
    verifier._sampler.chain.track(SchedulerOutput(0, added=[AddedRow(1, 0, [0], 1, rules)]))
    for seed in range(count):
        tree = build(world, rng)
        out = verified(verifier, world, tree, msgspec.structs.replace(rules, seed=seed))
        tokens = out.verified[0].token_ids
        assert out.errors == out.ended == []
        assert [tree.token_ids[i] for i in out.outcomes[0].path] == tokens[:-1]
        assert all(
            tree.parents[i] == above
            for above, i in zip([ROOT, *out.outcomes[0].path], out.outcomes[0].path, strict=False)
        )
        if len(tokens) == 1:  # the next step: without drafts
            tokens.append(inverse(follow[tokens[0]], float(rng.random())))
        yield tokens


def two_tokens(verifier: Any, world: TwoSteps, build: Build, rules: TokenRules, count: int = 3000) -> float:
    counts = np.zeros((VOCAB, VOCAB))
    for tokens in trials(verifier, world, build, rules, count):
        counts[tokens[0], tokens[1]] += 1
    joint = world.joint(rules)
    rare = joint < 3 / count  # a chi-square wants some of each: what is rare is one cell
    cells = [*counts[~rare], counts[rare].sum()]
    expected = [*joint[~rare], joint[rare].sum()]
    assert not counts[joint <= 0].any(), "a token that may not be drawn"
    return fits(np.array(cells), np.array(expected))


@pytest.mark.parametrize("rules", [FREE, CUT], ids=["free", "cut"])
@pytest.mark.parametrize("build", [a_chain, picked])
def test_D10_distribution_of_rejection_sampling(build: Build, rules: TokenRules) -> None:
    assert two_tokens(make("speculative-sampling"), TwoSteps(1, draft_holes=1), build, rules) > SURE


@pytest.mark.parametrize("build", [independent, distinct, paths, picked, lying])
def test_D11_multi_step_sampling_keeps_the_distribution(build: Build) -> None:
    assert two_tokens(make("multi-step"), TwoSteps(2, draft_holes=1), build, CUT) > SURE


@pytest.mark.parametrize("build", [independent, paths, distinct])
def test_D20_spectr_keeps_the_distribution(build: Build) -> None:
    assert two_tokens(make("spectr"), TwoSteps(3), build, FREE) > SURE


@pytest.mark.parametrize("name", ["multi-step", "spectr"])
def test_rows_that_processors_follow_keep_their_distribution(name: str) -> None:
    verifier = make(name)
    assert two_tokens(verifier, TwoSteps(4), paths, FOLLOWED, 2000) > SURE
    assert verifier._sampler.chain.follows(1)


@pytest.mark.parametrize("wrong", [no_residual, always, forgets_draws])
def test_a_wrong_verifier_fails_on_two_tokens(wrong: Select) -> None:
    world, build = (TwoSteps(35), paths) if wrong is forgets_draws else (TwoSteps(1), a_chain)
    assert two_tokens(RuleVerifier(Sampler(VOCAB), DrawRule(wrong)), world, build, FREE) < SURE


@pytest.mark.parametrize("own", [OWN_DRAW, -1])
def test_drafts_are_not_judged_by_the_numbers_they_were_made_with(
    own: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A drafter that draws with its request's own numbers: right, unless the verifier takes the same ones."""
    monkeypatch.setattr(draws, "OWN_DRAW", own)
    world, verifier, counts = TwoSteps(1), make("multi-step"), np.zeros((VOCAB, VOCAB))
    for seed in range(2500):

        def drawn(row: Any, n: int, depth: int, first: int, seed: int = seed) -> Any:
            return draw_independent(row, n, lambda j: uniform(seed, 0, 4 + depth, first + j))

        tree = fill(k_ary(2, 6, 2), world.expand(), drawn)
        tokens = verified(verifier, world, tree, msgspec.structs.replace(FREE, seed=seed)).verified[0].token_ids
        if len(tokens) == 1:
            tokens.append(inverse(world.own(FREE)[tokens[0]], uniform(seed, 0, 6)))
        counts[tokens[0], tokens[1]] += 1
    assert (fits(counts.ravel(), world.joint(FREE).ravel()) > SURE) == (own == OWN_DRAW)


# -- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["speculative-sampling", "multi-step", "spectr", "typical"])
def test_greedy_rows_are_verified_as_by_default(name: str) -> None:
    world, rng = TwoSteps(5), np.random.default_rng(0)
    for _ in range(50):
        tree = paths(world, rng)
        want = verified(Verifier(Sampler(VOCAB)), world, tree, TokenRules())
        got = verified(make(name), world, tree, TokenRules())
        assert got == want


def test_the_seed_decides() -> None:
    world, rng = TwoSteps(6), np.random.default_rng(0)
    tree = paths(world, rng)
    for name in ("speculative-sampling", "multi-step", "spectr", "typical", "bild"):
        runs = [
            [verified(make(name), world, tree, TokenRules(temperature=1.0, seed=s)).verified[0] for s in range(30)]
            for _ in range(2)
        ]
        assert runs[0] == runs[1]
        assert len({tuple(v.token_ids) for v in runs[0]}) > 1


@pytest.mark.parametrize("name", list(VERIFIERS))
def test_processors_stand_where_they_stood(name: str) -> None:
    """Accepted drafts are told to them by the next step, not twice."""
    world, verifier, rng = TwoSteps(7), make(name), np.random.default_rng(0)
    rules = TokenRules(temperature=1.0, frequency_penalty=0.7)
    chain = verifier._sampler.chain
    chain.track(SchedulerOutput(0, added=[AddedRow(1, 0, [0, 3, 3], 1, rules)]))
    accepted = 0
    for seed in range(20):
        out = verified(verifier, world, paths(world, rng), msgspec.structs.replace(rules, seed=seed))
        accepted += out.verified[0].num_accepted
        penalties = np.zeros((1, VOCAB), np.float32)
        chain.apply(penalties, [1])
        assert penalties[0] == pytest.approx([0, 0, 0, -1.4, 0])
    assert accepted > 0


def test_every_verifier_has_a_label() -> None:
    assert set(VERIFIERS) == set(CHOICES)
    labels = {name: VERIFIERS.traits(name) for name in VERIFIERS}
    for name, label in labels.items():
        module = VERIFIERS.get(name).__module__
        text = __import__(module, fromlist=["x"]).__doc__
        assert label in text.lower(), f"{name} does not say that it is {label}"
    assert {labels[n] for n in ("typical", "bild")} == {LOSSY}
    assert labels["match"] == EXACT_TOKENS
    assert labels["multi-step"] == EXACT_DISTRIBUTION
    assert SpeculativeConfig(method="ngram").verifier == "match"


def test_sick_rows_end_alone() -> None:
    """A NaN behind an accepted draft: the draft stays, and the row is told why there is no more."""
    tree = DraftTree([2, 3], [ROOT, 0])
    for name in ("speculative-sampling", "multi-step", "spectr", "typical", "bild"):
        verifier = make(name)
        rows = np.full((3, VOCAB), -1e9, np.float32)
        rows[0, 2] = 0.0
        rows[1] = np.nan
        drafted = DraftedRow(1, FREE, 0, 5, 0, 4, tree)
        out = verifier.verify(rows, [drafted], [])
        assert out.verified[0].token_ids == [2], name
        assert not out.verified[0].whole
        assert "position 6" in out.errors[0].message
