"""Decisions: typed questions about one text, answered from the probabilities of the tokens that may answer them.

A question becomes words behind the text, and its options become labels: Yes and No, letters, or digits. What is asked
of the model are log-probabilities of the labels' tokens where its answer would begin; nothing is generated. Labels that
are several tokens form a tree, and one run of the model for each of its inner nodes gives their probabilities exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from string import ascii_uppercase, digits
from typing import Any

import msgspec

from penstock.base.errors import InputError
from penstock.core.sampling import SamplingParams
from penstock.text.tokenizer import Tokenizer

KINDS = ("predicate", "choice", "score")
MAX_OPTIONS = 255
MAX_QUESTIONS = 400
MIN_LABEL_MASS = 0.01
"""An answer whose labels have less of the model's probability together is a refusal."""
MAX_TEMPERATURE = 100.0
PLAIN_KWARGS = {"enable_thinking": False}
"""For the template: a thought would stand where the label is read."""
_ANSWERS = {"predicate": "Answer Yes or No.", "choice": "Answer with one letter.", "score": "Answer with one number."}

Ids = tuple[int, ...]


@dataclass(frozen=True)
class DecisionOption:
    """What may be answered. `name` as the client knows it (a text or a truth value), `description`: when it applies."""

    name: str | bool
    description: str = ""

    @property
    def text(self) -> str:
        name = self.name if isinstance(self.name, str) else str(self.name).lower()
        return f"{name}: {self.description}" if self.description else name


@dataclass(frozen=True)
class DecisionQuestion:
    """`kind`: one of KINDS. `options` of a choice; levels of a score, the lowest first; of a predicate yes and no, or
    nothing. `param`: how errors call it."""

    kind: str
    instructions: str
    options: tuple[DecisionOption, ...] = ()
    param: str = "questions"

    @property
    def num_options(self) -> int:
        return 2 if self.kind == "predicate" else len(self.options)


@dataclass(frozen=True)
class Judgement:
    """An answer. `probabilities`: of the options in their order (yes and no of a predicate), sum 1; `label_mass`: of
    the model's probability what all labels had together; `refused`: that was too little to go by."""

    probabilities: tuple[float, ...]
    label_mass: float
    refused: bool

    @property
    def best(self) -> int:
        """The likeliest option, of equally likely ones the first."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """0 where all options are as likely, 1 where one has everything: (K p - 1) / (K - 1)."""
        num = len(self.probabilities)
        return max(0.0, (num * max(self.probabilities) - 1) / (num - 1))

    @property
    def score(self) -> float:
        """The mean level, counted from 0."""
        return sum(level * p for level, p in enumerate(self.probabilities))


def check_question(question: DecisionQuestion, *, most_levels: int = MAX_OPTIONS) -> None:
    """Raises InputError."""
    at, kind, options = question.param, question.kind, question.options
    if kind not in KINDS:
        raise InputError(f"{at}.type must be one of {', '.join(KINDS)}, not {kind[:40]!r}", param=f"{at}.type")
    if not question.instructions.strip():
        raise InputError(f"{at}.instructions must not be empty", param=f"{at}.instructions")
    if kind == "predicate":
        return
    field, most = ("choices", MAX_OPTIONS) if kind == "choice" else ("levels", most_levels)
    if not 2 <= len(options) <= most:
        raise InputError(f"{at}.{field} has {len(options)} entries; 2 to {most} are possible", param=f"{at}.{field}")
    seen: set[tuple[type, str | bool]] = set()
    for i, option in enumerate(options):
        if isinstance(option.name, str) and not option.name.strip():
            raise InputError(f"{at}.{field}[{i}] is blank", param=f"{at}.{field}[{i}]")
        if kind == "choice" and (type(option.name), option.name) in seen:
            shown = f"{at}.{field}[{i}] is {str(option.name)[:40]!r}, which is there already"
            raise InputError(shown, param=f"{at}.{field}[{i}]")
        seen.add((type(option.name), option.name))


def check_reading(temperature: float, min_label_mass: float) -> None:
    """Raises InputError."""
    if not 0 < temperature <= MAX_TEMPERATURE:
        raise InputError(
            f"temperature must be above 0 and at most {MAX_TEMPERATURE:g}, not {temperature:g}", param="temperature"
        )
    if not 0 <= min_label_mass <= 1:
        raise InputError(f"min_label_mass must be from 0 to 1, not {min_label_mass:g}", param="min_label_mass")


def as_text(value: Any) -> str:
    """A text, or JSON as compact text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


# -- words -------------------------------------------------------------------------------------------------------------


def asked(messages: Sequence[Mapping[str, Any]], words: str) -> list[dict[str, Any]]:
    """The conversation with a question at its end: in the user's last message, or in one of its own."""
    if not messages or messages[-1].get("role") != "user":
        return [*map(dict, messages), {"role": "user", "content": words}]
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = f"{content}\n\n{words}" if content else words
    else:
        last["content"] = [*(content or ()), {"type": "text", "text": words}]
    return [*map(dict, messages[:-1]), last]


def wording(question: DecisionQuestion, labels: Sequence[str]) -> str:
    """The question as a model reads it."""
    options = question.options
    lines = [f"{label}. {option.text}" for label, option in zip(labels, options, strict=bool(options))]
    if question.kind == "predicate" and options:
        lines = [f"{label}: {option.description}" for label, option in zip(labels, options, strict=True)]
    answer = _ANSWERS[question.kind]
    if len(labels) > len(ascii_uppercase):
        answer = "Answer with two letters."
    elif question.kind == "score" and not labels[0].isdigit():
        answer = _ANSWERS["choice"]
    return "\n".join(["Question: " + question.instructions.strip(), *lines, answer])


# -- labels ------------------------------------------------------------------------------------------------------------


class LabelTree:
    """The ids of labels, as a tree: which tokens' probabilities behind which ids tell those of the labels.

    Attributes:
        names: as they are written.
        runs: (ids that follow the prompt, tokens to tell of), one for each inner node; the first one's ids are none.
    """

    def __init__(self, names: Sequence[str], variants: Sequence[Sequence[Ids]]) -> None:
        """`variants`: the ways in which each label may be spelt; no path begins another."""
        self.names = tuple(names)
        self._variants = tuple(tuple(dict.fromkeys(paths)) for paths in variants)
        nodes: dict[Ids, dict[int, None]] = {(): {}}
        for path in [path for paths in self._variants for path in paths]:
            for depth, token in enumerate(path):
                nodes.setdefault(path[:depth], {})[token] = None
        self.runs: list[tuple[Ids, list[int]]] = [(before, list(tokens)) for before, tokens in nodes.items()]

    def read(self, found: Mapping[Ids, Mapping[int, float]]) -> list[float]:
        """The natural logarithm of each label's probability, from those of the tokens of each run."""
        return [
            log_sum_exp([sum(found[path[:d]][path[d]] for d in range(len(path))) for path in paths])
            for paths in self._variants
        ]


def label_tree(tokenizer: Tokenizer, question: DecisionQuestion, vocab_size: int) -> LabelTree:
    """The labels of a question's options. Raises InputError: this tokenizer cannot write them apart."""
    try:
        return _tree(tokenizer, question.kind, question.num_options, vocab_size)
    except _Unwritable as error:
        raise InputError(
            f"{question.param} needs {question.num_options} labels, and this model's tokenizer cannot write {error} "
            "apart from the others",
            param=question.param,
        ) from None


class _Unwritable(Exception):
    pass


@lru_cache(maxsize=256)
def _tree(tokenizer: Tokenizer, kind: str, num: int, vocab_size: int) -> LabelTree:
    names = _names(lambda text: len(_spelt(tokenizer, text)), kind, num)
    variants = [_ways(tokenizer, name) for name in names]
    paths = {path for ways in variants for path in ways}
    for name, ways in zip(names, variants, strict=True):
        for path in ways:
            fits = path and all(0 <= token < vocab_size for token in path)
            if not fits or any(path[:n] in paths for n in range(1, len(path))):
                raise _Unwritable(repr(name))
    if len(paths) < sum(map(len, variants)):
        raise _Unwritable("two of them")
    return LabelTree(names, variants)


def _names(length: Callable[[str], int], kind: str, num: int) -> list[str]:
    """`length`: tokens of a text. Of pairs of letters those that are one token go first, if they are enough."""
    if kind == "predicate":
        return ["Yes", "No"]
    if kind == "score" and num <= len(digits):
        return list(digits[:num])
    if num <= len(ascii_uppercase):
        return list(ascii_uppercase[:num])
    pairs = ["".join(pair) for pair in product(ascii_uppercase, repeat=2)]
    short = [pair for pair in pairs if length(pair) == 1]
    return (short if len(short) >= num else pairs)[:num]


def _ways(tokenizer: Tokenizer, text: str) -> list[Ids]:
    """As a text begins with it, and behind a space where that is as many tokens."""
    bare, spaced = _spelt(tokenizer, text), _spelt(tokenizer, " " + text)
    return [bare, spaced] if len(spaced) == len(bare) and spaced != bare else [bare]


def _spelt(tokenizer: Tokenizer, text: str) -> Ids:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def label_params(tokens: list[int]) -> SamplingParams:
    """Of a request that tells of these tokens behind its prompt. Its one generated token is not looked at."""
    return SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprob_token_ids=tokens)


# -- answers -----------------------------------------------------------------------------------------------------------


def judge(
    logs: Sequence[float], *, temperature: float = 1.0, min_label_mass: float = MIN_LABEL_MASS
) -> Judgement:  # fmt: skip
    """From the natural logarithms of the labels' probabilities. `temperature` divides them before they are shared out
    among the options; the mass is the model's own."""
    mass = min(1.0, math.exp(min(0.0, log_sum_exp(logs))))
    scaled = [log / temperature for log in logs]
    norm = log_sum_exp(scaled)
    if norm == -math.inf:
        return Judgement(tuple(1 / len(logs) for _ in logs), 0.0, refused=True)
    return Judgement(tuple(math.exp(log - norm) for log in scaled), mass, refused=mass < min_label_mass)


def log_sum_exp(logs: Sequence[float]) -> float:
    peak = max(logs)
    return peak if peak == -math.inf else peak + math.log(sum(math.exp(log - peak) for log in logs))
