"""Drafts on the real small model, with native kernels: the same answers in every field, fewer steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.core.output import RequestOutput
from penstock.core.sampling import StructuredOutputs

PROMPTS = (
    "Once upon a time there was a small dog. The small dog",
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "One, two, three, one, two, three, one, two,",
)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "seed": 4, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
    "samples": {"temperature": 0.9, "seed": 6, "n": 3},
    "stop": {"temperature": 0, "stop": ["great boy, and he was a"]},
    "grammar": {"temperature": 0, "structured_outputs": StructuredOutputs(json=SCHEMA)},
}


@functools.cache
def engine(method: str | None) -> LLM:
    config = None if method is None else {"method": method, "controller": "fixed", "num_speculative_tokens": 6}
    return LLM(model="nano", threads=1, max_num_seqs=8, speculative_config=config)


def fields(output: RequestOutput) -> list[Any]:
    return [
        output.prompt_logprobs,
        [(o.text, o.token_ids, o.cumulative_logprob, o.logprobs, o.finish_reason) for o in output.outputs],
    ]


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_answers_are_what_they_are_without_drafts(name: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, **PARAMS[name])
    want, got = (engine(method).generate(list(PROMPTS), params) for method in (None, "ngram"))
    assert [fields(o) for o in got] == [fields(o) for o in want]


def test_requests_know_their_drafts() -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    llm = engine("ngram")
    before = llm.engine.core.stats.num_steps
    outputs = llm.generate(list(PROMPTS), params)
    steps = llm.engine.core.stats.num_steps - before
    for output in outputs:
        m = output.metrics
        assert 0 < m.num_accepted_tokens <= m.num_draft_tokens
        assert m.num_drafts < 40
    assert steps < 40
