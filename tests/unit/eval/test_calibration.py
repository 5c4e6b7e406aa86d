"""Calibration: of probabilities, of their bins, and of the tasks that ask for decisions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import ConfigError, InputError
from penstock.cli.eval_page import html_page
from penstock.cli.eval_tables import print_result
from penstock.eval.calibration import NUM_BINS, calibration_error, columns, error_of, reliability
from penstock.eval.paired import difference
from penstock.eval.result import encode
from penstock.eval.run import evaluate
from penstock.launch.bundled import bundled_model
from penstock.launch.llm import LLM
from penstock.text.decisions import DecisionOption, DecisionQuestion

ROWS = [
    {"input": f"{'not ' * (i % 2)}( {i % 3 == 0} ) is", "target": str((i % 3 == 0) != bool(i % 2)), "task": "boolean"}
    for i in range(6)
] + [
    {"input": f"Which is it, {i}?\nOptions:\n(A) the cat\n(B) the dog\n(C) the sea", "target": f"({'ABC'[i % 3]})",
     "task": "which"} for i in range(6)
]  # fmt: skip


def by_hand(scores: list[float]) -> float:
    """The definition, bin by bin."""
    error = 0.0
    for b in range(NUM_BINS):
        own = [s for s in scores if b / NUM_BINS < abs(s) <= (b + 1) / NUM_BINS]
        if own:
            sure, right = np.mean(np.abs(own)), np.mean([s > 0 for s in own])
            error += len(own) / len(scores) * abs(sure - right)
    return float(error)


def test_the_error_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(4)
    scores = (rng.uniform(0.01, 1, 300) * rng.choice([1, -1], 300)).tolist()
    value, interval = calibration_error(scores)
    assert value == pytest.approx(by_hand(scores), rel=1e-12)
    assert interval is not None
    assert interval[0] < value < interval[1] + 0.05
    assert calibration_error([0.75])[1] is None


def test_known_cases() -> None:
    assert calibration_error([0.75] * 3 + [-0.75])[0] == pytest.approx(0.0), "75 % sure, 75 % right"
    assert calibration_error([-1.0, -1.0])[0] == pytest.approx(1.0), "sure, and wrong"
    assert calibration_error([0.5, -0.5, 1.0, 1.0])[0] == pytest.approx(0.0)
    assert calibration_error([0.95, 0.95, 0.65, -0.65])[0] == pytest.approx(0.1)
    (only,) = reliability([0.95, -0.91])
    assert (only.low, only.high, only.n) == (0.9, 1.0, 2)
    assert (only.sure, only.right) == (pytest.approx(0.93), 0.5)
    assert [b.low for b in reliability([0.1, 0.1001, 1.0])] == [0.0, 0.1, 0.9], "a bin's upper end belongs to it"


def test_calibrated_guesses_have_a_small_error_and_bold_ones_a_large_one() -> None:
    rng = np.random.default_rng(7)
    sure = rng.uniform(0.5, 1, 4000)
    right = rng.uniform(size=4000) < sure
    assert calibration_error(np.where(right, sure, -sure).tolist())[0] < 0.03
    assert calibration_error(np.where(right, 0.99, -0.99).tolist())[0] > 0.2
    assert error_of(*(np.mean(c) for c in columns(np.where(right, sure, -sure).tolist()))) < 0.03


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(bundled_model("nano")), ops="ref", max_model_len=256, num_gpu_blocks_override=64)


def test_an_evaluation_asks_what_a_decision_would(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bbh.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    result = evaluate(llm, [f"bbh:{file}?by=decision"], chat=True)
    (task,) = result.tasks
    assert [(v.name, v.kind) for v in task.values] == [
        ("accuracy", "rate"), ("brier", "loss"), ("ece", "calibration"), ("label mass", "mean"),
    ]  # fmt: skip
    assert (task.kind, task.answers) == ("decide", None)
    animals = tuple(DecisionOption(name) for name in ("the cat", "the dog", "the sea"))
    for row, example in zip(ROWS, task.examples, strict=True):
        if row["task"] == "boolean":
            question, right = DecisionQuestion("predicate", "Is the answer True?"), int(row["target"] == "False")
        else:
            question, right = (
                DecisionQuestion("choice", "Which answer is right?", animals),
                "ABC".index(row["target"][1]),
            )
        text = str(row["input"]).split("\n(A)")[0]
        (found,) = llm.decide(text, [question], min_label_mass=0)
        p, scores = found.probabilities, example.scores
        assert scores["accuracy"] == float(found.best == right)
        assert scores["brier"] == pytest.approx(sum((x - (i == right)) ** 2 for i, x in enumerate(p)) / 2)
        assert abs(scores["ece"]) == pytest.approx(max(p))
        assert (scores["ece"] > 0) == (found.best == right)
        assert scores["label mass"] == pytest.approx(found.label_mass)
    values = [e.scores["ece"] for e in task.examples]
    assert task.value("ece").value == pytest.approx(by_hand(values))
    same = difference(task, task, "ece")
    assert (same.value, same.interval, same.metric.lower_is_better) == (0.0, (0.0, 0.0), True)
    print_result(result)
    assert "by how sure they are" in capsys.readouterr().out
    page = html_page(result, [], [])
    assert "right by how sure" in page
    assert "expected calibration error" in page
    assert json.dumps(encode(result))


def test_temperature_moves_certainty_and_not_the_answers(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "bbh.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    plain, flat = (
        evaluate(llm, [f"bbh:{file}?by=decision{more}"], chat=True).tasks[0] for more in ("", "&temperature=50")
    )
    assert [e.scores["accuracy"] for e in flat.examples] == [e.scores["accuracy"] for e in plain.examples]
    sure = [[abs(e.scores["ece"]) for e in found.examples] for found in (plain, flat)]
    assert all(b < a for a, b in zip(*sure, strict=True))
    assert flat.digest != plain.digest


def test_what_cannot_be_asked_is_named(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "bbh.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    with pytest.raises(InputError, match="add --chat"):
        evaluate(llm, [f"bbh:{file}?by=decision"])
    with pytest.raises(ConfigError, match="no option 'temperature'"):
        evaluate(llm, [f"bbh:{file}?temperature=2"])
    with pytest.raises(ConfigError, match="temperature must be"):
        evaluate(llm, [f"bbh:{file}?by=decision&temperature=0"])
