"""all-MiniLM-L6-v2, where it has been fetched (tools/models.py), against what sentence-transformers gave for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.native.backend import NOT_BUILT
from penstock.launch.llm import LLM
from penstock.ops.native.library import best_library

MODEL = Path.home() / ".cache" / "penstock" / "all-minilm-l6-v2"
SEEN = json.loads((Path(__file__).parents[1] / "data" / "minilm.json").read_text("utf-8"))
pytestmark = [
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"{MODEL} is not there: python tools/models.py all-minilm-l6-v2"),
    pytest.mark.skipif(best_library() is None, reason=NOT_BUILT),
]


def test_vectors_are_those_of_sentence_transformers() -> None:
    """A short text, one of many scripts, and one that is cut at the 256 tokens of its files."""
    llm = LLM(MODEL)
    found = llm.embed(SEEN["texts"], truncate_prompt_tokens=-1)
    assert len(found[2].prompt_token_ids) == 256
    got = np.array([one.outputs.embedding for one in found])
    np.testing.assert_allclose(got, SEEN["vectors"], atol=1e-5)
    assert [llm.embed(text, truncate_prompt_tokens=-1)[0].outputs for text in SEEN["texts"]] == [
        one.outputs for one in found
    ]
    scores = [one.outputs.score for one in llm.score("Where is the mill?", ["The mill stands by the river.", "A fox."])]
    assert scores[0] > 0.5 > scores[1]
