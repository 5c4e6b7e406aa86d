"""Drafters whose drafts are the model's own answers to drafts: `jacobi`, `gauss-seidel`, `lookahead`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.draft import UNKNOWN, DraftJob, DraftTree, Outcome
from penstock.drafters.jacobi import JacobiDrafter
from penstock.drafters.lookahead import LookaheadDrafter, NgramPool
from tests.drafting import answer, job, removed

REPETITIVE = ["la la la la la la la la la la la la", "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"]
FREE = "Once upon a time there was a little fox who lived in the forest."


def counts(j: DraftJob, tree: DraftTree, model: Callable[[list[int]], int]) -> Outcome:
    """What a verifier says of a tree, for a model that is a function of the tokens."""
    known = j.tokens.tolist()
    paths = [known]
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*paths[parent + 1], token])
    choices = [model(path) for path in paths]
    path: list[int] = []
    here: int | None = -1
    while here is not None:
        here = tree.child(here, choices[here + 1])
        if here is not None:
            path.append(here)
    return Outcome(j.seq_id, tree, path, choices)


def decode(drafter: Any, model: Callable[[list[int]], int], tokens: list[int], count: int, **more: Any) -> list[int]:
    """Tokens per step of `count` tokens or a few more; every one is the model's."""
    steps: list[int] = []
    tokens = list(tokens)
    while sum(steps) < count:
        j = job(tokens, 1, **({"num_nodes": 40, "max_depth": 40} | more))
        outcome = counts(j, drafter.propose([j])[0], model)
        drafter.observe([outcome])
        said = [outcome.choices[0], *(outcome.choices[i + 1] for i in outcome.path)]
        for token in said:
            assert token == model(tokens)
            tokens.append(token)
        steps.append(len(said))
    return steps


def markov(tokens: list[int]) -> int:
    """Each token depends on the one before it alone."""
    return (3 * tokens[-1] + 1) % 17


def position(tokens: list[int]) -> int:
    """Each token depends on its place alone: one iteration is enough."""
    return len(tokens) % 10


def test_jacobi_iterates_its_own_answers() -> None:
    drafter = JacobiDrafter(3)
    j = job([5, 6, 7])
    assert drafter.propose([j])[0] == DraftTree([5, 6, 7], [-1, 0, 1])
    drafter.observe([Outcome(1, DraftTree([5, 6, 7], [-1, 0, 1]), [], [9, 1, 2, 3])])
    assert drafter.propose([job([5, 6, 7, 9])])[0].token_ids == [1, 2, 3]
    drafter.observe([Outcome(1, DraftTree([1, 2, 3], [-1, 0, 1]), [0], [1, 4, 5, 6])])
    j = job([5, 6, 7, 9, 1, 4])
    assert drafter.propose([j])[0].token_ids == [5, 6, 4], "two are left, one begins as the text ended"
    assert drafter.propose([job([1, 2], seq_id=2)])[0].token_ids == [1, 2, 1]


def test_gauss_seidel_finishes_a_block_first() -> None:
    drafter = JacobiDrafter(3, blocks=True)
    assert drafter.propose([job([5, 6, 7])])[0].token_ids == [5, 6, 7]
    drafter.observe([Outcome(1, DraftTree([5, 6, 7], [-1, 0, 1]), [], [9, 1, 2, 3])])
    assert drafter.propose([job([5, 6, 7, 9])])[0].token_ids == [1, 2]
    drafter.observe([Outcome(1, DraftTree([1, 2], [-1, 0]), [0, 1], [1, 2, 8])])
    assert drafter.propose([job([5, 6, 7, 9, 1, 2, 8])])[0].token_ids == [1, 2, 8], "a block is done: the next"


def test_jacobi_where_answers_are_unknown_or_steps_were_without_drafts() -> None:
    drafter = JacobiDrafter(4)
    tree = drafter.propose([job([1, 2, 3, 4])])[0]
    drafter.observe([Outcome(1, tree, [], [9, UNKNOWN, 7, UNKNOWN, UNKNOWN])])
    assert drafter.propose([job([1, 2, 3, 4, 9])])[0].token_ids == [2, 7, 4, 9], "old drafts stay"
    assert drafter.propose([job([1, 2, 3, 4, 9, 5, 6])])[0].token_ids == [4, 9, 5, 6], "two steps without a draft"
    assert drafter.propose([job([1, 2, 3])])[0].token_ids == [1, 2, 3, 1], "rolled back"
    drafter.track(removed(1))
    assert not drafter.states


def test_jacobi_keeps_drafts_that_there_was_no_room_for() -> None:
    drafter = JacobiDrafter(4)
    tree = drafter.propose([job([1, 2, 3, 4], num_nodes=2)])[0]
    assert tree.token_ids == [1, 2]
    drafter.observe([Outcome(1, tree, [], [9, 5, 6])])
    assert drafter.propose([job([1, 2, 3, 4, 9])])[0].token_ids == [5, 6, 4, 9]


@pytest.mark.parametrize("blocks", [False, True])
def test_jacobi_needs_one_iteration_where_tokens_do_not_depend_on_each_other(blocks: bool) -> None:
    steps = decode(JacobiDrafter(8, blocks=blocks), position, [0], 90)
    assert len(steps) <= 90 / 4, steps
    assert len(decode(JacobiDrafter(8, blocks=blocks), markov, [1], 60, num_nodes=3)) <= 60


@pytest.mark.parametrize("blocks", [False, True])
def test_D08_iterations_are_fewer_than_tokens_on_repetitive_text(blocks: bool) -> None:
    for prompt in (*REPETITIVE, FREE):
        draws: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 2}]
        for sampling in draws:
            plain = answer(prompt, None, **sampling)
            iterated = answer(prompt, JacobiDrafter(8, blocks=blocks), 8, **sampling)
            assert iterated.token_ids == plain.token_ids
            assert iterated.num_steps <= plain.num_steps == 64
            if prompt in REPETITIVE and not sampling:
                # Drafts settle where one token comes again and again; of longer periods hardly any do.
                most = 48 if prompt == REPETITIVE[0] else plain.num_steps - 1
                assert iterated.num_steps <= most, (prompt, iterated)


def test_a_pool_keeps_the_newest() -> None:
    pool = NgramPool(2)
    for rest in ((1, 2), (3, 4), (1, 2), (5, 6)):
        pool.add(9, rest)
    assert list(pool.after(9)) == [(5, 6), (1, 2)]
    assert list(pool.after(8)) == []


def test_the_window_sees_what_it_shall() -> None:
    """N-grams that enter the pool are what the model says along the window's diagonals (figure 2 of the paper)."""
    drafter = LookaheadDrafter(4, 3)
    tokens = [3, 5, 8]
    pooled: list[tuple[int, ...]] = []
    decode_step = 0
    while decode_step < 6:
        j = job(tokens, 1, num_nodes=40, max_depth=40)
        tree = drafter.propose([j])[0]
        state = drafter.states[1]
        if len(state.levels) == 2:
            for column in range(4):
                above = state.levels[0][: column + 1]
                newer = state.levels[1][column]
                pooled.append((state.levels[0][column], newer, history([*tokens, *above, newer])))
        outcome = counts(j, tree, history)
        drafter.observe([outcome])
        tokens += [outcome.choices[0], *(outcome.choices[i + 1] for i in outcome.path)]
        decode_step += 1
    assert pooled
    for first, *rest in pooled[-8:]:
        assert tuple(rest) in list(state.pool.after(first))


def history(tokens: list[int]) -> int:
    """Every token so far counts."""
    h = 0
    for token in tokens:
        h = (h * 31 + token + 7) % 65521
    return h % 11


def test_lookahead_learns_what_the_model_repeats() -> None:
    steps = decode(LookaheadDrafter(8, 4), markov, [1], 120)
    assert sum(steps[-8:]) / 8 >= 3, steps
    chains = decode(LookaheadDrafter(8, 4), markov, [1], 120, chain_only=True)
    assert sum(chains[-8:]) / 8 >= 3, chains


@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 1), (2, 9), (5, 2), (9, 3), (63, 63), (63, 4)])
def test_lookahead_fits_into_any_room(num_nodes: int, max_depth: int) -> None:
    drafter = LookaheadDrafter(8, 4)
    tokens = [1, 2, 3]
    for _ in range(30):
        j = job(tokens, 1, num_nodes=num_nodes, max_depth=max_depth)
        tree = drafter.propose([j])[0]
        assert len(tree.token_ids) <= num_nodes
        assert max([0, *tree.depths()]) <= max_depth
        outcome = counts(j, tree, markov)
        drafter.observe([outcome])
        tokens += [outcome.choices[0], *(outcome.choices[i + 1] for i in outcome.path)]


def test_D09_lookahead_on_repetitive_text() -> None:
    """At least 1.3 tokens per step; what runs in addition is counted, window and pool apart."""
    for prompt in (*REPETITIVE, FREE):
        plain = answer(prompt, None)
        drafter = LookaheadDrafter(8, 3)
        ahead = answer(prompt, drafter, 32)
        assert ahead.token_ids == plain.token_ids
        assert ahead.num_drafts == drafter.num_window_drafts + drafter.num_pool_drafts
        if prompt in REPETITIVE:
            assert ahead.per_step >= 1.3, ahead
        assert drafter.num_window_drafts <= 16 * ahead.num_steps
        assert drafter.num_pool_drafts <= 16 * ahead.num_steps
        sampled: dict[str, Any] = {"temperature": 0.8, "seed": 2}
        drawn = answer(prompt, LookaheadDrafter(8, 3), 32, **sampled)
        assert drawn.token_ids == answer(prompt, None, **sampled).token_ids
