"""Single cases of evaluation: limits of options, files of few rows, texts at an edge."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.eval.cap.context import Scores
from penstock.eval.numbers import boxed
from penstock.eval.programs import _made
from penstock.eval.result import Scored, TaskResult, figure
from penstock.eval.tasks import make_tasks
from penstock.eval.tasks.base import Answer, Example, Reader, Task
from tests.unit.eval.test_cap import GRID
from tests.unit.eval.test_cap import of as context_of_scores
from tests.unit.eval.test_eval_forms import ran, result, whys
from tests.unit.eval.test_eval_judges import TOKENIZER

ROOM = 1 << 20
FILES: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(70)],
    "mmlu": [{"question": f"What is {i}?", "choices": ["it", "not it"], "answer": 0} for i in range(30)],
    "nq-open": [
        {"question": f"Who came {i}th?", "answers": [f"Ann{i}"], "ctxs": [{"title": "T", "text": f"Ann{i} did."}]}
        for i in range(4)
    ],
    "ruler": [{"input": "Find it.", "outputs": ["12"], "answer_prefix": " It is"}],
    "longbench": [{"input": "Who?", "context": "Ann came. ", "answers": ["Ann"], "dataset": "qasper"}],
    "next-line": [],
}  # fmt: skip


def task(name: str, options: str, folder: Path) -> Task:
    spec = name
    if name in FILES:
        path = folder / ("program.py" if name == "next-line" else "rows.jsonl")
        rows = [json.dumps(row) for row in FILES[name]] or [f"value_{i} = compute({i})" for i in range(40)]
        path.write_text("\n".join(rows) + "\n", encoding="utf-8")
        spec += f":{path}"
    (made,) = make_tasks([spec + (f"?{options}" if options else "")])
    return made.task


def asked(made: Task, limit: int = 100) -> list[Example]:
    return made.examples(Reader(TOKENIZER, ROOM), 0, limit)


# -- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option", "low", "high"),
    [
        ("gsm8k", "shots", 0, 64), ("gsm8k", "tokens", 16, 65536), ("mmlu", "shots", 0, 20),
        ("nq-open", "docs", 1, None),
        ("ruler", "tokens", 1, 4096), ("listops", "depths", 1, 12), ("listops", "parts", 2, 20),
        ("longbench", "context", 256, 1 << 24), ("next-line", "context", 64, 1 << 24),
        ("perplexity", "tokens", 2, None),
        ("needle", "lengths", 64, 1 << 24), ("count", "passages", 2, None), ("lookup", "positions", 2, 50),
    ],
)  # fmt: skip
def test_an_option_s_limits_are_taken_and_what_is_beyond_them_is_named(
    name: str, option: str, low: int, high: int | None, tmp_path: Path
) -> None:
    for value in (low, high) if high is not None else (low,):
        task(name, f"{option}={value}", tmp_path)
    for value in (low - 1, high + 1) if high is not None else (low - 1,):
        with pytest.raises(ConfigError, match=rf"{option} must be {low} to \d+, not {value}"):
            task(name, f"{option}={value}", tmp_path)


@pytest.mark.parametrize("name", ["listops", "json", "copy", "two-hop"])
def test_a_file_for_a_task_that_makes_its_examples_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no file"):
        make_tasks([f"{name}:{tmp_path / 'rows.jsonl'}"])


def test_mmlu_shows_nothing_solved_unless_asked_to(tmp_path: Path) -> None:
    plain, shown = (asked(task("mmlu", options, tmp_path)) for options in ("", "shots=2"))
    assert (len(plain), len(shown)) == (30, 28), "what is shown is not asked"
    solved = [TOKENIZER.decode(found[0].readings[0].ids).count("Answer: A") for found in (plain, shown)]
    assert solved == [1, 3], "the first answer that is weighed is A as well"


def test_more_passages_than_half_the_file_has_are_still_drawn(tmp_path: Path) -> None:
    """Four questions, four passages in each prompt: all of the others, and the one that answers, once."""
    for example in asked(task("nq-open", "docs=4", tmp_path)):
        text = TOKENIZER.decode(example.prompt)
        assert [text.count(f"Ann{i} did.") for i in range(4)] == [1, 1, 1, 1]


def test_ruler_answers_may_be_as_long_as_asked(tmp_path: Path) -> None:
    for options, want in (("", 128), ("tokens=1", 1), ("tokens=700", 700)):
        (example,) = asked(task("ruler", options, tmp_path))
        assert example.max_tokens == want


def test_the_longest_context_is_judged_by_the_first_of_a_task_s_figures() -> None:
    """A needle that is found, but not said exactly, is not accurate."""
    (needle,) = make_tasks(["needle"])
    assert needle.task.metrics[0].name == "accuracy"

    def scores(accurate: float) -> Scores:
        made = [Scored(scores={"accuracy": accurate, "found": 1.0}, tags={"length": n}) for n in GRID for _ in range(8)]
        told = TaskResult(name="needle", task="needle", kind="generate", source="", digest="",
                          values=[figure(m, made) for m in needle.task.metrics], examples=made)  # fmt: skip
        return Scores(told, list(range(len(made))), [n for n in GRID for _ in range(8)])

    assert context_of_scores(scores(1.0), scores(1.0)).longest == GRID[-1]
    assert context_of_scores(scores(0.0), scores(1.0)).longest == 0


# -- texts at an edge --------------------------------------------------------------------------------------------


def test_a_box_may_be_the_first_thing_said() -> None:
    assert boxed(r"\boxed{7} it is") == "7"
    assert boxed(r"\fbox{a{b}c}") == "a{b}c"
    assert boxed("7") is None


def test_names_that_a_statement_makes_are_those_it_assigns() -> None:
    assert _made(ast.parse("a, b = c, d[e] = f(g)")) == {"a", "b", "c"}


def test_records_are_right_only_if_they_are_equal() -> None:
    made = make_tasks(["json"])[0].task
    example = asked(made, 1)[0]
    changed = json.loads(example.expected) | {"more": 1}
    for text, want in ((example.expected, (1, 1)), (json.dumps(changed), (0, 1)), ("no", (0, 0))):
        found = made.judge(example, Answer(text))
        assert (found["right"], found["valid"]) == want


def test_a_sentence_of_the_cloze_has_eight_words_at_least() -> None:
    made = make_tasks(["cloze"])[0].task
    lengths = [len(text.rpartition(". ")[2].split()) for text in made.texts]  # type: ignore[attr-defined]
    assert min(lengths) == 8


def test_a_row_of_a_table_has_four_choices(tmp_path: Path) -> None:
    """The last cell is the letter of the right one, no choice."""
    table = tmp_path / "law_test.csv"
    table.write_text("Which is it?,one,two,three,four,D\n")
    (made,) = make_tasks([f"mmlu:{table}"])
    (example,) = asked(made.task)
    assert (len(example.readings), example.expected) == (4, 3)
    text = TOKENIZER.decode(example.readings[0].ids)
    assert [text.count(f"\n{letter}.") + text.count(f"\n({letter})") for letter in "ABCDE"] == [1, 1, 1, 1, 0]


def test_a_task_well_above_zero_is_not_held_against_its_like() -> None:
    assert whys(result(ran("humaneval", [1, 0] * 25), ran("mbpp", [1] * 40))) == []
    assert len(whys(result(ran("humaneval", [0] * 50), ran("mbpp", [1] * 40)))) == 1
