"""Decisions without a model: labels as a tree of tokens, what is read from it, wording, and bad questions."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest

from penstock.base.errors import InputError
from penstock.text.decisions import (
    DecisionOption,
    DecisionQuestion,
    Judgement,
    LabelTree,
    asked,
    check_question,
    check_reading,
    judge,
    label_tree,
    wording,
)

VOCAB = 700


class Pieces:
    """A tokenizer of characters, and of some longer pieces that are one token: the longest first."""

    def __init__(self, *pieces: str) -> None:
        self._ids = {piece: 256 + n for n, piece in enumerate(pieces)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = []
        while text:
            piece = max((p for p in self._ids if text.startswith(p)), key=len, default=text[0])
            ids.append(self._ids[piece] if piece in self._ids else ord(piece))
            text = text[len(piece) :]
        return ids


def question(kind: str, num: int) -> DecisionQuestion:
    return DecisionQuestion(kind, "Which?", tuple(DecisionOption(f"o{i}") for i in range(num)))


def told(tree: LabelTree, model: Any) -> list[float]:
    """What a model that is a function from tokens to log-probabilities says of each label."""
    return tree.read({before: {token: model(before)[token] for token in tokens} for before, tokens in tree.runs})


@lru_cache(maxsize=10_000)
def some_model(before: tuple[int, ...]) -> list[float]:
    draws = [random.Random(str(before)).random() * (1 + (i * 7919 + len(before)) % 13) for i in range(VOCAB)]
    return [math.log(draw / sum(draws)) for draw in draws]


@pytest.mark.parametrize(
    ("pieces", "kind", "num", "runs"),
    [
        (("Yes", "No"), "predicate", 2, 1), ((), "predicate", 2, 4), ((" Yes", "Yes", "No", " No"), "predicate", 2, 1),
        ((), "choice", 26, 1), ((" A",), "choice", 3, 1), ((), "choice", 27, 3), ((), "choice", 255, 11),
        (("AB", "BA", "BB"), "choice", 60, 4), ((), "score", 10, 1), ((), "score", 11, 1),
        (tuple(a + b for a in "ABCDEF" for b in "ABCDEFGH"), "choice", 40, 1),
    ],
)  # fmt: skip
def test_probabilities_of_labels_are_those_of_their_tokens_one_by_one(
    pieces: tuple[str, ...], kind: str, num: int, runs: int
) -> None:
    """Against the chain rule, spelt out: a label is its tokens in turn, with or without a space before it."""
    tokenizer: Any = Pieces(*pieces)
    tree = label_tree(tokenizer, question(kind, num), VOCAB)
    assert len(tree.names) == len(set(tree.names)) == num
    assert len(tree.runs) == runs
    assert tree.runs[0][0] == ()
    for name, log in zip(tree.names, told(tree, some_model), strict=True):
        bare, spaced = (tuple(tokenizer.encode(text)) for text in (name, " " + name))
        ways = [bare, spaced] if len(spaced) == len(bare) else [bare]
        want = sum(math.exp(sum(some_model(way[:d])[way[d]] for d in range(len(way)))) for way in ways)
        assert math.exp(log) == pytest.approx(want, rel=1e-12)


def test_a_tree_asks_for_each_token_once() -> None:
    tree = label_tree(Pieces(), question("choice", 255), VOCAB)  # type: ignore[arg-type]
    assert sum(len(tokens) for _, tokens in tree.runs) == 10 + 255
    assert all(len(tokens) == len(set(tokens)) for _, tokens in tree.runs)


@pytest.mark.parametrize("same", [{"Yes": [1], "No": [1]}, {"Yes": [1], "No": [1, 2]}, {"Yes": [], "No": [1]}])
def test_labels_that_cannot_be_told_apart_are_named(same: dict[str, list[int]]) -> None:
    class Blind:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return same[text.strip()]

    with pytest.raises(InputError, match=r"questions needs 2 labels, .*tokenizer cannot write"):
        label_tree(Blind(), question("predicate", 2), VOCAB)  # type: ignore[arg-type]


def test_tokens_outside_the_vocabulary_are_no_labels() -> None:
    with pytest.raises(InputError, match="cannot write"):
        label_tree(Pieces("Yes"), question("predicate", 2), 256)  # type: ignore[arg-type]


def test_what_is_read() -> None:
    found = judge([math.log(0.3), math.log(0.1)])
    assert found.probabilities == pytest.approx((0.75, 0.25))
    assert (found.label_mass, found.best, found.refused) == (pytest.approx(0.4), 0, False)
    assert found.confidence == pytest.approx(0.5)
    sharper = judge([math.log(0.3), math.log(0.1)], temperature=0.5)
    assert sharper.probabilities == pytest.approx((0.9, 0.1))
    assert sharper.label_mass == pytest.approx(0.4), "the mass is the model's own"
    levels = judge([math.log(p) for p in (0.1, 0.1, 0.8)])
    assert levels.score == pytest.approx(1.7)
    assert levels.confidence == pytest.approx(0.7)
    assert Judgement((0.25,) * 4, 1.0, False).confidence == 0
    assert Judgement((0.25,) * 4, 1.0, False).best == 0


def test_too_little_mass_is_a_refusal() -> None:
    logs = [math.log(0.004), math.log(0.003)]
    assert judge(logs).refused
    assert judge(logs).probabilities == pytest.approx((4 / 7, 3 / 7)), "told all the same"
    assert not judge(logs, min_label_mass=0.007).refused
    assert not judge(logs, min_label_mass=0).refused
    nothing = judge([-math.inf, -math.inf], min_label_mass=0)
    assert (nothing.refused, nothing.label_mass, nothing.probabilities) == (True, 0.0, (0.5, 0.5))
    assert judge([-2000.0, -2001.0], min_label_mass=0).probabilities == pytest.approx((0.7311, 0.2689), abs=1e-4)


def test_words() -> None:
    said = wording(question("choice", 2), "AB")
    assert said == "Question: Which?\nA. o0\nB. o1\nAnswer with one letter."
    plain = DecisionQuestion("predicate", " Is it so? ")
    assert wording(plain, ("Yes", "No")) == "Question: Is it so?\nAnswer Yes or No."
    meant = DecisionQuestion(
        "predicate", "So?", (DecisionOption("true", "it is"), DecisionOption("false", "it is not"))
    )
    assert "Yes: it is\nNo: it is not" in wording(meant, ("Yes", "No"))
    assert wording(question("score", 3), "012").endswith("0. o0\n1. o1\n2. o2\nAnswer with one number.")
    assert wording(question("score", 11), "ABCDEFGHIJK").endswith("Answer with one letter.")
    assert wording(question("choice", 27), [f"A{i}" for i in range(27)]).endswith("Answer with two letters.")
    typed = DecisionQuestion("choice", "?", (DecisionOption(True, "yes it is"), DecisionOption("true")))
    assert "A. true: yes it is\nB. true\n" in wording(typed, "AB")


def test_questions_stand_at_the_end_and_share_what_is_before() -> None:
    user = {"role": "user", "content": "text"}
    reply = {"role": "assistant", "content": "well"}
    assert asked([user], "Q")[-1] == {"role": "user", "content": "text\n\nQ"}
    assert asked([user, reply], "Q") == [user, reply, {"role": "user", "content": "Q"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert asked(parts, "Q")[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "Q"}]
    assert parts[0]["content"] == [{"type": "text", "text": "a"}], "what was given is not changed"
    texts = [wording(question(kind, 3), "ABC") for kind in ("choice", "score")]
    assert all(a.startswith("Question: ") and b.startswith("Question: ") for a, b in pairwise(texts))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (DecisionQuestion("guess", "x"), "type must be one of predicate, choice, score"),
        (DecisionQuestion("predicate", " "), "instructions must not be empty"),
        (question("choice", 1), "choices has 1 entries; 2 to 255"),
        (question("choice", 256), "choices has 256 entries; 2 to 255"),
        (question("score", 1), "levels has 1 entries; 2 to 255"),
        (DecisionQuestion("choice", "x", (DecisionOption("a"), DecisionOption("a"))), "there already"),
        (DecisionQuestion("choice", "x", (DecisionOption("a"), DecisionOption(" "))), "is blank"),
    ],
)
def test_bad_questions_are_named(bad: DecisionQuestion, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_question(bad)


def test_a_truth_value_and_its_word_are_two_choices() -> None:
    check_question(DecisionQuestion("choice", "x", (DecisionOption(True), DecisionOption("true"))))


@pytest.mark.parametrize(("values", "words"), [((0.0, 0.1), "temperature"), ((1.0, 1.5), "min_label_mass")])
def test_bad_reading_is_named(values: tuple[float, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_reading(*values)
