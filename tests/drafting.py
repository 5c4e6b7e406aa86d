"""For tests of drafters: jobs, a model that answers with any drafter, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from penstock.core.batch import AddedRow, Appended, SchedulerOutput
from penstock.core.draft import DraftJob
from penstock.core.protocols import Drafter
from penstock.core.sampling import SamplingParams, TokenRules
from penstock.launch.llm import LLM
from penstock.sched.drafts.fixed import FixedDrafts


def job(tokens: Sequence[int], prompt_len: int | None = None, **more: Any) -> DraftJob:
    given: dict[str, Any] = {"seq_id": 1, "num_nodes": 8, "max_depth": 8, "rules": TokenRules(), "sample_index": 0}
    known = np.array(tokens, np.int32)
    return DraftJob(tokens=known, prompt_len=len(known) if prompt_len is None else prompt_len, **(given | more))


def added(seq_id: int, tokens: Sequence[int], prompt_len: int) -> SchedulerOutput:
    return SchedulerOutput(0, added=[AddedRow(seq_id, 0, list(tokens), prompt_len, TokenRules())])


def appended(seq_id: int, tokens: Sequence[int], rollback: int = 0) -> SchedulerOutput:
    return SchedulerOutput(0, appended=[Appended(seq_id, list(tokens), rollback)])


def removed(*seq_ids: int) -> SchedulerOutput:
    return SchedulerOutput(0, removed=list(seq_ids))


class Answer(NamedTuple):
    """`num_steps`: forward passes; `num_drafts`: drafts that were verified in them."""

    token_ids: list[list[int]]
    num_steps: int
    num_drafts: int
    num_accepted: int

    @property
    def per_step(self) -> float:
        """Tokens per step of a single sequence."""
        return sum(map(len, self.token_ids)) / self.num_steps


@cache
def nano() -> LLM:
    config = {"method": "ngram", "controller": "fixed"}
    return LLM(model="nano", speculative_config=config, max_model_len=1024, enable_prefix_caching=False)


def ids(text: str) -> list[int]:
    return list(nano().get_tokenizer().encode_inner(text))


def answer(
    prompts: str | list[int] | Sequence[str], drafter: Drafter | None, num_drafts: int = 16, **sampling: Any
) -> Answer:
    """What nano says with a drafter; None: plainly. `num_drafts`: drafts of a sequence in a step, at most."""
    llm = nano()
    core = llm._engine.core
    runner = core.executor.runner  # type: ignore[attr-defined]
    runner.drafter = drafter
    if hasattr(drafter, "rows"):
        drafter.rows = runner.rows  # those of the rank that it drafts for now
    core.scheduler.drafts = None if drafter is None else FixedDrafts(num_drafts, 63)
    before = dict(vars(core.stats))
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 64, "ignore_eos": True} | sampling))
    given: Any = {"prompt_token_ids": prompts} if prompts and not isinstance(prompts[0], str) else prompts
    found = llm.generate(given, params)
    assert runner.drafter is drafter, "the drafter has failed"
    stats = core.stats
    return Answer(
        [list(out.outputs[0].token_ids) for out in found],
        stats.num_steps - before["num_steps"],
        stats.num_draft_tokens - before["num_draft_tokens"],
        stats.num_accepted_tokens - before["num_accepted_tokens"],
    )
