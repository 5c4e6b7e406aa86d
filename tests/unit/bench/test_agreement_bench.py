"""How texts of two engines are judged where they part, on made-up logits and a made-up llama.cpp."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.quality import agreement
from benchmarks.quality.agreement import NEITHER, OURS, THEIRS, drawn, earlier, judged, prompts, questions, raw_ids, row

from penstock import LLM

PROMPT = [7, 8]


def after(logits: list[float], seen: list[list[int]]) -> Any:
    """Expects the same behind every token, and notes what it has read."""

    def exact(ids: Any) -> Any:
        seen.append(list(ids))
        return np.tile(np.array(logits, np.float32), (len(ids), 1))

    return exact


@pytest.mark.parametrize(
    ("logits", "counts", "whose"),
    [
        ([1.0, 0.9, 0.0, 0.0], True, OURS),
        ([0.9, 1.0, 0.0, 0.0], True, THEIRS),
        ([0.9, 0.0, 1.0, 0.0], True, NEITHER),
        ([1.0, 0.97, 0.0, 0.0], False, OURS),
    ],
)
def test_a_difference_is_judged_by_the_two_best_logits_behind_what_both_have_said(
    logits: list[float], counts: bool, whose: str
) -> None:
    seen: list[list[int]] = []
    found = judged(after(logits, seen), PROMPT, [3, 0, 2, 2], [3, 1, 0, 0], near=0.05)
    assert seen == [[7, 8, 3]]
    assert (found["at"], found["counts"], found["float32"]) == (1, counts, whose)
    assert found["gap"] == pytest.approx(sorted(logits)[-1] - sorted(logits)[-2], abs=1e-6)
    assert found["behind"][OURS] == pytest.approx(max(logits) - logits[0], abs=1e-6)
    assert found["behind"][THEIRS] == pytest.approx(max(logits) - logits[1], abs=1e-6)


def test_texts_that_never_part_are_not_read_again() -> None:
    seen: list[list[int]] = []
    assert judged(after([1.0, 0.0], seen), PROMPT, [1, 0], [1, 0], near=0.05) == {}
    assert seen == []


def test_the_table_counts_every_text_once() -> None:
    def text(counts: bool, whose: str) -> dict[str, Any]:
        return {"parted": {"counts": counts, "float32": whose}}

    texts = [
        {"parted": {}},
        text(False, THEIRS),
        text(True, THEIRS),
        text(True, OURS),
        text(True, OURS),
        text(True, NEITHER),
    ]
    assert row({"model": "m", "texts": texts}) == ["m", "6", "1", "1", "4", "2", "1", "1"]


def test_questions_are_what_a_user_says_and_files_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines: list[Any] = [
        {"turns": ["first", "second"]}, {"question": "q", "text": "t"}, {"prompt": "p"},
        {"text": "x" * 801}, {"other": 1}, {"turns": []},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)))
    assert questions(file) == ["first", "q", "p"]
    mixed = drawn([["a", "b", "c"], ["1"]], 4)
    assert sorted(mixed) == ["1", "a", "b", "c"]
    assert "1" in mixed[:2]
    with pytest.raises(SystemExit, match="have 4 texts and 5 are wanted"):
        drawn([["a", "b", "c"], ["1"]], 5)


def test_a_model_without_a_template_gets_as_many_prompts() -> None:
    llm = LLM("nano", max_model_len=128)
    raw = ["Once upon a time there was a king.", "The sea was calm.", "A dog"]
    asked = prompts(llm, raw, ["Who are you?"])
    plain = [("raw", raw_ids(llm, text)) for text in raw]
    assert len(asked) == 3
    assert asked == plain or (asked[0][0] == "chat" and asked[1:] == plain[:2])


def test_tokens_of_llama_cpp_come_from_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says the ids that it was given, and whether it was told how long the longest is; one that dies."""
    echo = tmp_path / "echo.py"
    echo.write_text(
        "import sys\nassert sys.argv[-4:] == ['--greedy', '2', '--length', '3'], sys.argv\n"
        "for line in sys.stdin: print(line.strip(), flush=True)\n"
    )
    monkeypatch.setattr(agreement, "ORACLE", echo)
    assert agreement.llama_cpp(sys.executable, "m", [[1, 2], [3, 4, 5]], 2) == [[1, 2], [3, 4, 5]]
    echo.write_text("")
    with pytest.raises(SystemExit, match="gave no tokens of m"):
        agreement.llama_cpp(sys.executable, "m", [[1, 2]], 2)


def test_an_earlier_result_is_taken_for_the_same_prompts_only(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    texts = [{"prompt": [1, 2], THEIRS: [5, 6]}, {"prompt": [3], THEIRS: [7, 8]}]
    result.write_text(json.dumps({"models": [{"model": "m.gguf", "texts": texts}]}))
    assert earlier(result, "folder/m.gguf", [(1, 2), (3,)], 2) == [[5, 6], [7, 8]]
    assert earlier(result, "n.gguf", [[1, 2], [3]], 2) == earlier(result, "m.gguf", [[1, 2], [4]], 2) == []
    assert earlier(result, "m.gguf", [[1, 2], [3]], 3) == earlier(None, "m.gguf", [[1, 2], [3]], 2) == []
