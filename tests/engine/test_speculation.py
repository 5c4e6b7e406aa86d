"""Drafts change no token: the verifier against naive decoding, through the whole engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import Verified
from penstock.core.draft import DraftJob, DraftTree
from penstock.core.sampling import TokenRules
from penstock.runner.logits.base import F32, RowProcessor
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Knobs, fake_engine, request, run
from tests.engine.naive import fake_logits, generate
from tests.engine.sloppy import SloppyDrafter

RULES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_k": 5, "top_p": 0.9},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
    {
        "temperature": 0.9,
        "seed": 7,
        "presence_penalty": 0.5,
        "min_tokens": 9,
        "stop_ids": [2],
        "bad_sequences": [[4, 6]],
    },
]


@pytest.mark.parametrize(("slots", "windows"), [(False, ()), (True, ()), (False, (None, 6)), (False, (5, 9))])
@pytest.mark.parametrize(("num_drafts", "share"), [(1, 1.0), (4, 0.6), (9, 0.9), (30, 1.0)])
def test_drafts_change_no_token(slots: bool, windows: tuple[int | None, ...], num_drafts: int, share: float) -> None:
    k = Knobs(budget=64, num_blocks=128, num_drafts=num_drafts, draft_share=share)
    core, _ = fake_engine(k, slots=slots, windows=windows)
    requests = [
        request([3 + i, 4, 5, 6 + i], max_tokens=25, eos=[2] if i % 2 else [], **rules) for i, rules in enumerate(RULES)
    ]
    got = run(core, requests)
    for r in requests:
        assert got[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    stats = core.stats
    assert stats.num_drafts > 0
    assert stats.num_accepted_tokens == sum(stats.accepted_at)
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


def test_right_drafts_take_fewer_steps() -> None:
    """32 tokens, three right drafts a step: a quarter of the steps; all of the last one is used."""
    steps = {}
    for num_drafts in (0, 3):
        core, forward = fake_engine(Knobs(budget=64, num_drafts=num_drafts, draft_share=1.0), drafter=None)
        if num_drafts:
            core.executor.runner.drafter._trees = False  # type: ignore[attr-defined]
            core.executor.runner.drafter._rng.randint = lambda low, high: high  # type: ignore[attr-defined]
        run(core, [request([3, 4, 5], max_tokens=33)])
        steps[num_drafts] = forward.num_steps
    assert steps[0] == 33
    assert steps[3] == 1 + 8


def test_a_sample_ends_inside_accepted_drafts() -> None:
    """An end token among the accepted ones: what was accepted behind it is dropped, in text and memory."""
    for eos in range(29):
        core, _ = fake_engine(Knobs(budget=64, num_drafts=8, draft_share=1.0))
        r = request([5, 4], max_tokens=20, eos=[eos])
        got = run(core, [r])[r.request_id]
        want, reason = generate(fake_logits, r)
        assert (got.tokens[0], got.reasons[0]) == (want, reason)


def test_logprobs_of_accepted_tokens() -> None:
    core, _ = fake_engine(Knobs(budget=64, num_drafts=6, draft_share=0.9))
    plain, _ = fake_engine(Knobs(budget=64))
    for rules in RULES:
        r = request([5, 4], max_tokens=20, num_logprobs=3, **rules)
        again = request([5, 4], max_tokens=20, num_logprobs=3, **rules)
        assert run(core, [r])[r.request_id].logprobs == run(plain, [again])[again.request_id].logprobs


class Broken:
    name = "broken"
    wants_hidden = False

    def __init__(self, where: str) -> None:
        self._where = where

    def track(self, output: Any) -> None:
        if self._where == "track":
            raise RuntimeError("no")

    def propose(self, jobs: Any) -> Any:
        if self._where == "propose":
            raise RuntimeError("no")
        return [] if self._where == "count" else [([1, 2], None)] * len(jobs) if self._where == "type" else []

    def observe(self, outcomes: Any) -> None:
        raise RuntimeError("no")


@pytest.mark.parametrize("where", ["track", "propose", "count", "type"])
def test_a_drafter_that_fails_costs_nobody_an_answer(where: str, caplog: pytest.LogCaptureFixture) -> None:
    core, _ = fake_engine(Knobs(budget=64, num_drafts=4), drafter=Broken(where))
    r = request([5, 4], max_tokens=20)
    assert run(core, [r])[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    assert "the drafter 'broken' failed" in caplog.text
    assert len([record for record in caplog.records if "failed" in record.message]) == 1


def test_memory_for_drafts_preempts_nobody() -> None:
    core, _ = fake_engine(Knobs(budget=64, num_blocks=16, block_size=4, num_drafts=12, draft_share=1.0))
    requests = [request([3 + i] * 8, max_tokens=20) for i in range(2)]
    got = run(core, requests)
    assert core.stats.num_preemptions == 0
    for r in requests:
        assert got[r.request_id].tokens[0] == generate(fake_logits, r)[0]


def test_accepted_counts_only_what_was_drafted() -> None:
    assert Verified(1, [5, 6, 7], 4, 3).num_accepted == 2
    assert Verified(1, [5, 6], 4, 3, whole=False).num_accepted == 2


class Dfa(RowProcessor[list[int]]):
    """Only tokens congruent to 2 more than the sum of all generated ones, modulo 5, are allowed: one too many or too
    few in its state, and everything after it is another text."""

    name = "dfa"

    def begin(self, rules: TokenRules, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        return [sum(output)]

    def change(self, row: F32, state: list[int]) -> None:
        row[[t for t in range(len(row)) if not dfa_allows(t, state[-1])]] = -np.inf

    def extend(self, state: list[int], token_ids: Sequence[int]) -> None:
        for token in token_ids:
            state.append(state[-1] + token)

    def drop(self, state: list[int], n: int) -> None:
        assert n < len(state), "rollback reaches into the prompt"
        del state[len(state) - n :]

    def copy(self, state: list[int]) -> list[int]:
        return state.copy()


def dfa_allows(token: int, total: int) -> bool:
    return token % 5 == (total + 2) % 5


def dfa_best(prompt: Sequence[int], output: Sequence[int]) -> int:
    logits = fake_logits((*prompt, *output)).copy()
    logits[[t for t in range(len(logits)) if not dfa_allows(t, sum(output))]] = -np.inf
    return int(logits.argmax())


class DfaDrafter(SloppyDrafter):
    """Two paths: the right one for a random while, and one that leaves it."""

    def _propose(self, job: DraftJob) -> DraftTree:
        prompt, output = job.tokens[: job.prompt_len].tolist(), job.tokens[job.prompt_len :].tolist()
        tokens: list[int] = []
        for _ in range(self._rng.randint(0, max(0, job.num_nodes - 2))):
            tokens.append(dfa_best(prompt, output + tokens))
        return DraftTree([9, *tokens], [-1, -1, *range(1, len(tokens))][: 1 + len(tokens)])


def test_a_stateful_processor_goes_along_and_comes_back() -> None:
    """Among accepted and rejected drafts, preempted and with company, the text is the automaton's."""
    core, _ = fake_engine(Knobs(budget=64, num_blocks=24, num_drafts=7), drafter=DfaDrafter(3))
    chain = core.executor.runner.sampler.chain  # type: ignore[attr-defined]
    chain.processors = (*chain.processors, Dfa(VOCAB))
    requests = [request([3 + i, 4, 9 - i], max_tokens=24) for i in range(4)]
    got = run(core, requests)
    for r in requests:
        want: list[int] = []
        while len(want) < 24:
            want.append(dfa_best(r.prompt_token_ids, want))
        assert got[r.request_id].tokens[0] == want
    assert core.stats.num_accepted_tokens > 20
    assert core.stats.num_accepted_tokens < core.stats.num_draft_tokens
