"""Scores of texts against what sacreBLEU 2.6.0, rouge-score 0.1.2 and RapidFuzz 3.14.6 gave. Row K16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError, InputError
from penstock.eval import text_metrics as scores
from penstock.eval.tasks import make_tasks
from penstock.eval.tasks.base import Answer, Example

MAT = ["The cat sat on the mat and did not move.", "A cat was sitting on the mat; it didn't move."]
VOTES = ["In 2023 about 1,234 people voted, which was a record (12%)."]
BUDGET = [
    "After a long debate about roads and schools, the committee approved next year's budget.",
    "The budget was approved.",
]
REFERENCE = [  # text, references, BLEU, ROUGE-1, ROUGE-2, ROUGE-L, edit similarity to the first
    ("The cat sat on the mat, and didn't move.", MAT, 0.603415, 0.8, 0.666667, 0.8, 0.925),
    ("In 2023, 1,234.5 people (about 12%) voted - a record.", VOTES, 0.15702, 0.869565, 0.285714, 0.695652, 0.474576),
    ("Rain.", ["Rain fell all night long in the valley."], 0.021353, 0.222222, 0.0, 0.222222, 0.128205),
    ("the the the the the", ["the cat is here"], 0.106822, 0.222222, 0.0, 0.222222, 0.473684),
    (
        "Prices rose 3-4 times &amp; fell again.", ["Prices rose by 3-4 times & then fell again."],
        0.472694, 0.823529, 0.533333, 0.823529, 0.813953,
    ),
    ("Something else entirely", ["nothing in common whatsoever here"], 0.0, 0.0, 0.0, 0.0, 0.272727),
    (
        "The committee approved the budget after a long debate about schools and roads.", BUDGET,
        0.222359, 0.857143, 0.461538, 0.428571, 0.195402,
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", REFERENCE, ids=[row[0][:20] for row in REFERENCE])
def test_K16_scores_are_those_of_the_packages_that_papers_name(
    row: tuple[str, list[str], float, float, float, float, float],
) -> None:
    text, accepted, *expected = row
    found = [
        scores.sentence_bleu(text, accepted), scores.rouge_n(text, accepted, 1), scores.rouge_n(text, accepted, 2),
        scores.rouge_l(text, accepted), scores.edit_similarity(text, accepted[0]),
    ]  # fmt: skip
    assert found == pytest.approx(expected, abs=1e-6)


def test_K16_bleu_of_a_corpus_adds_counts_before_it_divides() -> None:
    texts, references = [row[0] for row in REFERENCE], [row[1] for row in REFERENCE]
    assert scores.bleu(texts, references) == pytest.approx(0.27326212472282635, abs=1e-9)
    assert scores.bleu(texts, references) != pytest.approx(sum(row[2] for row in REFERENCE) / 7, abs=0.01)
    assert scores.bleu(["A b c d."], [["a b c d."]]) < 1, "case counts"
    assert scores.bleu(["one two three four five"], [["one two three four five"]]) == pytest.approx(1)
    assert scores.bleu(["one two"], [["one two"]]) == 0, "a corpus without sequences of four"
    with pytest.raises(ValueError, match="argument"):
        scores.bleu(["a"], [])


def test_K16_rouge_su_counts_words_and_pairs_in_order() -> None:
    # Lin 2004, section 5: common are police, the, gunman; police-the, police-gunman, the-gunman.
    assert scores.rouge_su("police kill the gunman", ["police killed the gunman"]) == pytest.approx(2 * 6 / 20)
    assert scores.rouge_su("gunman the killed police", ["police killed the gunman"]) == pytest.approx(2 * 4 / 20)
    assert scores.rouge_su("a b", ["a x x x x b"], gap=4) > scores.rouge_su("a b", ["a x x x x x b"], gap=4)


def test_K16_ranks_samples_and_orders() -> None:
    assert scores.reciprocal_rank(["c", "a", "b"], ["a", "b"]) == 0.5
    assert scores.reciprocal_rank(["c"], ["a"]) == 0
    assert scores.precision_recall(["a", "b", "c", "d"], ["a", "e"]) == (0.25, 0.5)
    assert scores.precision_recall([], []) == (1, 1)
    assert scores.precision_recall([], ["a"]) == (0, 0)
    # Chen et al. 2021, section 2.1: 1 - C(n-c, k) / C(n, k).
    assert scores.pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert scores.pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)
    assert scores.pass_at_k(5, 3, 3) == 1
    with pytest.raises(ValueError, match="pass@6 of 5"):
        scores.pass_at_k(5, 3, 6)
    # ZeroSCROLLS, section 2.3: 10 points off halve the score.
    assert scores.exponential_similarity(70, 70) == 1
    assert scores.exponential_similarity(60, 70) == pytest.approx(0.5)
    assert scores.concordance_index([1, 2, 3, 4]) == 1
    assert scores.concordance_index([4, 3, 2, 1]) == 0
    assert scores.concordance_index([2, 1, 3, 4]) == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match="each once"):
        scores.concordance_index([1, 1])
    assert scores.macro_average([0.2, 0.8]) == pytest.approx(0.5)
    assert scores.geometric_average([0.2, 0.8]) == pytest.approx(0.4)
    assert scores.geometric_average([0, 0.8]) == 0


def test_K16_a_file_of_ones_own_is_scored_as_asked(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"prompt": "Say it.", "references": MAT}) + "\n")
    (asked,) = make_tasks([f"texts:{file}?scores=rougeL+edit+rougeSU4+em+bleu+f1&tokens=9"])
    assert [metric.name for metric in asked.task.metrics] == ["rougeL", "edit", "rougeSU4", "em", "bleu", "f1"]
    judged = asked.task.judge(Example(MAT), Answer(f"  {REFERENCE[0][0]}\n"))
    assert (judged["rougeL"], judged["bleu"]) == pytest.approx((0.8, 0.603415), abs=1e-6)
    assert judged["edit"] == pytest.approx(0.925)
    assert asked.task.judge(Example(MAT), Answer(MAT[1]))["em"] == 1


def test_unknown_scores_and_broken_lines_are_told(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "Say it."}\n')
    with pytest.raises(ConfigError, match=r"task 'texts': scores must be of bleu, rouge1, .* not 'meteor'"):
        make_tasks([f"texts:{file}?scores=meteor"])
    with pytest.raises(InputError, match=r"line 1: has no field 'references' or 'answers'"):
        make_tasks([f"texts:{file}"])
