"""Row D28 on the bundled models: what the threshold costs in tokens, and what it saves in calls of the large model."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.ops.native.library import best_library

PROMPTS = (
    "Once upon a time there was a little girl who lived near the sea.",
    "The old man opened the door and looked at the boy.",
    '"Where are you going?" said the dog.',
    "On a cold winter morning the king went into the wood.",
)
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def texts(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(list(PROMPTS), PARAMS)]


def with_small(threshold: float, fallback: float) -> tuple[list[list[int]], float, float]:
    """Tokens, the large model's passes per token (counted per sequence), and drafts per pass that had some."""
    config: dict[str, Any] = {
        "method": "draft-model", "model": "pico", "verifier": "bild", "threshold": threshold, "fallback": fallback,
        "num_speculative_tokens": 6, "controller": "fixed",
    }  # fmt: skip
    llm = LLM("nano", max_model_len=256, speculative_config=config)
    got = texts(llm)
    stats = llm.engine.core.stats
    calls = (stats.num_sampled_tokens - stats.num_accepted_tokens) / stats.num_sampled_tokens
    return got, calls, stats.num_draft_tokens / stats.num_drafts


@pytest.mark.skipif(best_library() is None, reason="no native library was built")
def test_D28_tolerance_calls_the_large_model_less_and_leaves_its_text_and_doubt_falls_back() -> None:
    own = texts(LLM("nano", max_model_len=256))
    rows = {at: with_small(*at) for at in ((0.01, 0.3), (3.0, 0.3), (3.0, 0.8))}
    same = {
        at: sum(x == y for a, b in zip(got, own, strict=True) for x, y in zip(a, b, strict=True))
        for at, (got, _, _) in rows.items()
    }
    calls, drafts = ({at: row[i] for at, row in rows.items()} for i in (1, 2))
    print("same tokens", same, "calls per token", calls, "drafts per pass", drafts)
    assert same[0.01, 0.3] == len(PROMPTS) * 48, "with next to no tolerance the text is the large model's own"
    assert same[3.0, 0.3] < 0.8 * len(PROMPTS) * 48, "it is lossy"
    assert calls[3.0, 0.3] < 0.8 * calls[0.01, 0.3] < 0.6
    assert drafts[3.0, 0.8] < 0.6 * drafts[3.0, 0.3] < 4, "the small model stops where it is in doubt"
    assert calls[3.0, 0.8] > calls[3.0, 0.3]
