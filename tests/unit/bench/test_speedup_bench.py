"""`benchmarks/speculation`: the texts that it finds or makes, and its table."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from benchmarks.speculation import speedup, texts

from penstock.core.acceptance import Acceptance
from penstock.launch.bundled import bundled_model
from penstock.launch.llm import LLM


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return LLM(str(bundled_model("nano")), max_model_len=64, num_gpu_blocks_override=4).get_tokenizer()


@pytest.mark.parametrize("shared", [True, False], ids=["with data", "without data"])
@pytest.mark.parametrize("name", list(texts.TEXTS))
def test_prompts_fit_and_what_is_missing_says_so(
    name: str, shared: bool, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(texts, "DATA", tmp_path)
    elif not texts.DATA.exists():
        pytest.skip(f"{texts.DATA} is not there")
    if name == "spec-bench" and not shared:
        with pytest.raises(texts.Missing, match="spec_bench"):
            texts.TEXTS[name](tokenizer, 200, random.Random(0))
        return
    found = texts.TEXTS[name](tokenizer, 200, random.Random(0))
    assert len(found.prompts) > 8
    assert found.source
    for prompt in found.prompts:
        ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt, False)
        assert 0 < len(ids) <= 200 + 8
        assert found.chat == isinstance(prompt, str)
    assert found.prompts == texts.TEXTS[name](tokenizer, 200, random.Random(0)).prompts


def test_the_interval_holds_the_median_and_narrows() -> None:
    rng = random.Random(0)
    few, many = [[1.5 + rng.gauss(0, 0.2) for _ in range(n)] for n in (6, 200)]
    for ratios in (few, many):
        low, high = speedup.interval(ratios)
        assert low <= sorted(ratios)[len(ratios) // 2] <= high
    assert speedup.interval(many)[1] - speedup.interval(many)[0] < speedup.interval(few)[1] - speedup.interval(few)[0]
    assert speedup.interval([2.0]) == (2.0, 2.0)


def test_the_table_says_what_is_different_and_what_was_left_out() -> None:
    row: dict[str, Any] = {
        "drafter": "ngram", "text": "code", "batch": 1, "temperature": 0.8, "speedup": 1.5, "interval": (1.25, 1.75),
        "different": 1,
        "decode_speedup": None, "settled_speedup": 0.97, **Acceptance(2, 6, 3, accepted_at=(2, 1)).figures(),
    }  # fmt: skip
    page = speedup.markdown([row, row | {"different": 0}], ["suffix: there is none"])
    lines = page.splitlines()
    assert lines[2] == "| ngram | code | 1 | 0.8 | 1.50 | 1.25 to 1.75 | - | 0.97 | 2.50 | 50 % | 1.00 0.50 | - | no |"
    assert lines[3].endswith("| yes |")
    assert lines[-1] == "Not measured: suffix: there is none."


def test_what_counts_as_settled_begins_with_the_step_in_which_the_last_one_has_its_tokens() -> None:
    """Two requests and one that ends before; "b" gives its 16th token in the third step, at 3 s."""
    steps = [
        (1.0, [("a", 20), ("b", 8), ("c", 3)]), (2.0, [("a", 1), ("b", 7)]), (3.0, [("a", 1), ("b", 1)]),
        (4.0, [("a", 1), ("b", 2)]), (5.0, [("a", 1), ("b", 3)]),
    ]  # fmt: skip
    assert speedup.settled_rate(steps) == pytest.approx(7 / 2)
    assert speedup.settled_rate(steps[:4]) is None, "one step tells nothing"
