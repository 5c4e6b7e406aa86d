"""The number of ranks changes within a request (catalogue row H13, LoongServe): nothing that is cached moves."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pytest
from benchmarks.ranks.elastic import FIXED, Load, simulated, sustained

from penstock.backends.sequence import SequenceModel
from penstock.base.errors import ConfigError, EngineError
from penstock.parallel.messages import Messages
from penstock.parallel.team import RankTeam
from tests import specs
from tests.paged import Paged
from tests.sequences import in_threads, prompt

PROMPTS = {"a": prompt(50), "b": prompt(23, 5)}
Phase = tuple[int, list[int], list[int] | None]
"""Steps, ranks that compute, ranks that keep."""
ELASTIC: list[Phase] = [(1, [0, 1, 2, 3], [0, 1]), (8, [0, 1], None), (6, [0, 1, 2], None), (5, [3], None)]
"""A prompt on four ranks, kept by two; tokens on those; a third and a fourth come to compute and keep new ones."""


class Told(NamedTuple):
    """By one rank: tokens of each sequence, bytes given by label and phase, bytes kept behind each phase."""

    tokens: dict[str, list[int]]
    given: list[dict[str, int]]
    kept: list[int]
    holders: list[list[int]]


def greedy(comm: Messages, name: str, method: str, phases: Sequence[Phase]) -> Told:
    spec, weights = specs.make(name)
    paged = Paged(spec, weights, num_slabs=1, max_model_len=200)
    model = SequenceModel(paged.graph, comm, method)
    told = Told({seq: [] for seq in PROMPTS}, [], [], [])
    work: dict[Any, Any] = {seq: (ids, [len(ids) - 1]) for seq, ids in PROMPTS.items()}
    for steps, ranks, keep in phases:
        before = comm.given.copy()
        for _ in range(steps):
            for seq, rows in model.run(work, ranks=ranks, keep=keep).items():
                told.tokens[seq].append(int(np.argmax(rows[0])))
            work = {seq: ([ids[-1]], [0]) for seq, ids in told.tokens.items()}
        told.given.append(dict(comm.given - before))
        told.kept.append(model.held.num_bytes())
        told.holders.append(model.holders("a"))
    return told


def want(name: str, steps: int) -> dict[str, list[int]]:
    spec, weights = specs.make(name)
    return Paged(spec, weights, max_model_len=200).greedy(PROMPTS, steps)


@pytest.fixture(scope="module")
def team() -> Any:
    with RankTeam(4) as four:
        yield four


@pytest.mark.parametrize("method", ["ring", "striped", "burst", "gather"])
def test_H13_tokens_are_those_of_one_process_while_ranks_come_and_go(team: RankTeam, method: str) -> None:
    for name in ("llama_gqa", "windowed"):
        tokens = want(name, 20)
        for told in team.run(greedy, name, method, ELASTIC):
            assert told.tokens == tokens
            assert told.holders == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_H13_fewer_ranks_behind_a_prompt_move_no_keys(team: RankTeam) -> None:
    """Those that stay take what comes by in the prompt's ring: no byte more than without, and the others keep none.
    What is kept lies where it is from then on, whoever comes."""
    same = [(1, [0, 1, 2, 3], None), (8, [0, 1, 2, 3], None)]
    plain, elastic = (team.run(greedy, "llama_gqa", "ring", phases) for phases in (same, ELASTIC))
    for before, after in zip(plain, elastic, strict=True):
        assert after.given[0] == before.given[0]
    per_token, tokens = 2 * 2 * 2 * 8 * 4, sum(map(len, PROMPTS.values()))
    assert [told.kept[0] for told in elastic[2:]] == [0, 0]
    assert sum(told.kept[0] for told in elastic) == tokens * per_token
    for phase, steps in ((1, 8), (2, 6), (3, 5)):
        grown = [told.kept[phase] - told.kept[phase - 1] for told in elastic]
        assert sum(grown) == 2 * steps * per_token, "new tokens, and nothing else"
        assert all(grown[rank] == 0 for rank in range(4) if rank not in ELASTIC[phase][1])
    assert elastic[3].given[1] == {}, "who keeps nothing has no part"


def test_H13_with_queries_passed_a_step_costs_no_keys() -> None:
    """Behind the prompt, single tokens ask the ranks that keep keys: bytes do not grow with what they keep."""
    phases: list[Phase] = [(1, [0, 1, 2], None), (4, [0, 1], None), (4, [0], None)]
    tokens = want("llama_gqa", 9)
    for told in in_threads(3, greedy, "llama_gqa", "pass_q", phases):
        assert told.tokens == tokens
        assert all("kv" not in given for given in told.given)


def test_ranks_that_a_method_cannot_run_are_refused() -> None:
    for method, phases, why in (
        ("pass_q", ELASTIC, "keep: with pass_q keys and values do not come by other ranks; use ring"),
        ("ulysses", [(1, [0, 1], None), (1, [0], None)], "keeps a sequence's heads on the ranks that it began with"),
        ("ring", [(1, [0, 4], None)], "they must be some of 0 to 3"),
        ("ring", [(1, [], None)], "they must be some of 0 to 3"),
        ("rings", ELASTIC, "unknown sequence method 'rings'"),
    ):
        with pytest.raises((ConfigError, EngineError), match=why):
            in_threads(4, greedy, "llama_gqa", method, phases)


def test_H13_simulated_ranks_that_change_sustain_a_higher_rate_than_any_fixed_number() -> None:
    """Nine of ten short requests in time, and nine of ten long ones: in the middle of five draws."""
    rates = [0.2 * n for n in range(3, 14)]
    loads = [Load(200, 1.0, 0.1, seed) for seed in range(5)]
    found = {size: median(sustained(load, size, rates) for load in loads) for size in (None, *FIXED)}
    assert found[None] > 1.1 * max(found[size] for size in FIXED)
    assert simulated(loads[0], None).num_tokens == simulated(loads[0], 4).num_tokens
