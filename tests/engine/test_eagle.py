"""EAGLE's head on a real model: no token changes, and more tokens a step than Medusa's heads give."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
from penstock.drafters.eagle import EagleDrafter
from penstock.launch.bundled import bundled_heads
from penstock.ops.native.library import best_library
from tests.sampled import ALL, grid

PROSE = (
    "Once upon a time there was a little girl who lived near the sea.",
    "The old man opened the door and looked at the boy.",
    '"Where are you going?" said the dog.',
    "On a cold winter morning the king went into the wood.",
)
native_only = pytest.mark.skipif(best_library() is None, reason="no native library was built")
NATIVE = pytest.param("native", marks=native_only)
each_ops = pytest.mark.parametrize("ops", ["ref", "torch", NATIVE])


@cache
def nano(ops: str, method: str, num_drafts: int = 8, **more: Any) -> LLM:
    """`method` "": without drafts."""
    config = {"method": method, "heads": f"nano-{method}", "controller": "fixed", "num_speculative_tokens": num_drafts}
    given = json.dumps(config | more) if method else None
    return LLM(model="nano", ops=ops, max_model_len=512, speculative_config=given)


def params(length: int, temperatures: tuple[float, ...], count: int = len(PROSE), **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=length, temperature=temperatures[i % len(temperatures)], seed=i, ignore_eos=True, **more
        )
        for i in range(count)
    ]


def drafter_of(llm: LLM) -> EagleDrafter:
    drafter = llm.engine.core.executor.runner.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, EagleDrafter), "it has failed"
    return drafter


def texts(llm: LLM, prompts: Any, rules: Any) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(list(prompts), rules)]


@pytest.mark.parametrize(
    ("ops", "num_drafts"), grid([NATIVE], [3, 12]) + grid(["ref", "torch"], [3, 12] if ALL else [12])
)
def test_D13_no_token_changes(ops: str, num_drafts: int) -> None:
    """Greedy and sampled rows in one batch, trees narrow and wide; then again, prompts out of the prefix cache, in
    other company and with a penalty. Nothing is kept of rows that are gone."""
    length = {"ref": 8, "torch": 4, "native": 48}[ops]
    plain, llm = nano(ops, ""), nano(ops, "eagle", num_drafts)
    rules = params(length, (0.0, 0.7, 0.0, 1.0))
    want = texts(plain, PROSE, rules)
    assert texts(llm, PROSE, rules) == want
    stats = llm.engine.core.stats
    assert stats.num_accepted_tokens > 0.05 * stats.num_draft_tokens
    shared = [PROSE[0] + " " * (i > 0) + "She was" * (i % 2) for i in range(3)]
    assert texts(llm, [PROSE[1], *shared], rules) == texts(plain, [PROSE[1], *shared], rules)
    assert texts(llm, PROSE[:1], rules[:1])[0] == want[0]
    followed = params(length, (0.0, 0.8), repetition_penalty=1.3)
    assert texts(llm, PROSE, followed) == texts(plain, PROSE, followed)
    assert texts(llm, PROSE, rules) == want
    drafter_of(llm)
    llm.generate(PROSE[0], SamplingParams(max_tokens=1))
    assert len(drafter_of(llm).states) <= 1, "the last rows leave with the next step"


@native_only
def test_D13_more_tokens_a_step_than_medusa_heads() -> None:
    """The same prompts, drafts and controller; greedy and sampled. Every step counts, the first ones too."""
    per_step: dict[tuple[str, float], float] = {}
    for method in ("medusa", "eagle"):
        llm = nano("native", method)
        stats = llm.engine.core.stats
        for temperature in (0.0, 0.7):
            before = stats.num_accepted_tokens
            texts(llm, PROSE, params(64, (temperature,)))
            made = len(PROSE) * 64
            per_step[method, temperature] = made / (made - (stats.num_accepted_tokens - before))
    assert per_step["eagle", 0.0] > per_step["medusa", 0.0] > 1.5
    assert per_step["eagle", 0.7] > per_step["medusa", 0.7] > 1.1


@each_ops
def test_what_it_is_told_is_what_the_tokens_were_chosen_from(ops: str) -> None:
    """Behind each step: as many hidden states as tokens, and the output matrix finds those tokens in them."""
    llm = nano(ops, "eagle", 3)
    drafter = drafter_of(llm)
    observe, seen = drafter.observe, []

    def spy(outcomes: Any) -> None:
        observe(outcomes)
        for outcome in outcomes:
            slots = drafter.states[outcome.seq_id]
            tokens = [outcome.choices[node + 1] for node in (-1, *outcome.path)]
            logits = drafter._forward.run_head(slots.features, drafter._storage.planes)
            assert logits.argmax(1).tolist() == tokens
            assert slots.start == slots.end, "they belong to the slots that come next"
            seen.append(len(tokens))

    drafter.observe = spy  # type: ignore[method-assign]
    try:
        texts(llm, PROSE, params(10 if ops == "ref" else 40, (0.0,)))
    finally:
        del drafter.observe
    drafter_of(llm)
    assert max(seen) > 1
    assert min(seen) == 1


@native_only
@pytest.mark.parametrize("verifier", ["multi-step", "spectr", "speculative-sampling", "typical"])
def test_other_verifiers_take_its_drafts(verifier: str) -> None:
    """Those that draw, too: drafts are chosen, not drawn, as medusa's. Greedy rows stay exact."""
    llm = nano("native", "eagle", verifier=verifier)
    rules = params(24, (0.0, 0.8))
    got = texts(llm, PROSE, rules)
    want = texts(nano("native", ""), PROSE, rules)
    assert [got[0], got[2]] == [want[0], want[2]]
    assert all(len(tokens) == 24 for tokens in got)
    assert llm.engine.core.stats.num_accepted_tokens > 0
    drafter_of(llm)


@native_only
def test_hidden_states_that_are_not_finite_change_no_token() -> None:
    """The head's own numbers overflow: nothing is drafted, and nobody notices."""
    plain, llm = nano("native", ""), nano("native", "eagle", 5)
    drafter, rules = drafter_of(llm), params(16, (0.0, 0.7))
    before, head = llm.engine.core.stats.num_draft_tokens, drafter.head
    drafter.head = head._replace(down=np.full_like(head.down, np.inf))
    try:
        assert texts(llm, PROSE, rules) == texts(plain, PROSE, rules)
        assert llm.engine.core.stats.num_draft_tokens == before
        drafter_of(llm)
    finally:
        drafter.head = head


def test_D13_what_cannot_be_used_is_refused_at_start() -> None:
    for more, says in [
        ({"heads": "nano-medusa"}, "of kind 'medusa', not 'eagle'"),
        ({"heads": "nosuch-heads"}, "cannot be read"),
        ({}, "heads: the folder"),
    ]:
        with pytest.raises(ConfigError, match=says):
            LLM(model="nano", speculative_config=json.dumps({"method": "eagle", **more}))
    with pytest.raises(ConfigError, match="trained on another model"):
        LLM(model="pico", speculative_config=json.dumps({"method": "eagle", "heads": "nano-eagle"}))


def test_the_bundled_head_is_small() -> None:
    folder = bundled_heads("nano-eagle")
    assert folder is not None
    assert sum(path.stat().st_size for path in Path(folder).iterdir()) <= 1_200_000
