"""What a task is: examples, each with a prompt and what is expected, and a judge of answers.

A task is one small file with a function `make(path, options)`, and one line in `tasks/__init__.py`. Its examples are a
function of the tokenizer, the room in the context, the seed and the limit, and of nothing that an engine setting
touches: every configuration of an engine reads the same tokens and is decoded alike (greedily, up to the same tokens or
stops). That is what makes two results comparable; `eval.run` takes a digest of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from penstock.base.errors import ConfigError, InputError
from penstock.eval.thought import may_think
from penstock.text.decisions import PLAIN_KWARGS, DecisionQuestion, LabelTree, asked, label_tree, wording
from penstock.text.template import encode_chat
from penstock.text.tokenizer import Tokenizer

_SENTENCE_TOKENS = 48
_THOUGHT_TOKENS = 4096
Tag = str | int | float
Kind = Literal["generate", "score", "perplexity", "decide"]
"""generate: the model answers. score: its likelihoods of given texts are compared. perplexity: ... are the figure.
decide: probabilities of labels are read (`text.decisions`)."""
MetricKind = Literal["rate", "mean", "loss", "calibration", "perplexity", "bits"]
"""rate: 0 or 1 per example, Wilson's interval. mean: 0 to 1. loss: the same, less is better. calibration: of each
example how sure the answer is, with a minus if it is wrong (`eval.calibration`). perplexity and bits: nats per example
over a weight (tokens, bytes); exp(nats / weight), and nats / ln 2 / weight."""


@dataclass(frozen=True)
class Metric:
    name: str
    kind: MetricKind = "rate"

    @property
    def lower_is_better(self) -> bool:
        return self.kind in ("loss", "calibration", "perplexity", "bits")


@dataclass(frozen=True)
class Reading:
    """Token ids of which those from `first` (at least 1) on are scored."""

    ids: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        expected: what the judge compares with; anything that JSON can write.
        prompt: ids to go on from (kinds generate, decide).
        labels: whose probabilities behind the prompt are asked for (kind decide).
        readings: texts whose likelihoods are asked for (score, perplexity).
        tags: where it stands in the task: depth, length, position, subject, ...
        weights: by metric, what its score counts for; 1 if not named.
        max_tokens, stop: how far an answer may go.
        begun: what of the answer stands in the prompt already.
    """

    expected: Any
    prompt: tuple[int, ...] = ()
    readings: tuple[Reading, ...] = ()
    tags: Mapping[str, Tag] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    begun: str = ""
    labels: LabelTree | None = None

    @property
    def num_tokens(self) -> int:
        """What of the context it needs at most."""
        return max([len(self.prompt) + self.max_tokens, *(len(r.ids) + 1 for r in self.readings)])


@dataclass(frozen=True)
class Answer:
    """What the model said, without its thoughts (generate), or what it thought of each reading: the natural logarithm
    of its likelihood, and whether every token of it was the likeliest one (score, perplexity); or of each label's
    probability (decide)."""

    text: str = ""
    logprobs: tuple[float, ...] = ()
    greedy: tuple[bool, ...] = ()


class Task(Protocol):
    """See the module. `axes`: tags by which results are shown, one for a curve, two (down, across) for a map.

    Tasks inherit from it for what they do not say themselves.
    """

    name: str
    source: str
    kind: Kind
    metrics: tuple[Metric, ...]
    """The first one is the headline."""
    axes: tuple[str, ...]

    def examples(self, reader: Reader, seed: int, limit: int) -> list[Example]:
        """About `limit` examples; grids have at least one per cell. What cannot fit the context may be among them: it
        is left out and counted. Raises InputError."""
        ...

    def judge(self, example: Example, answer: Answer) -> dict[str, float]:
        """Every metric's score: 0 to 1; -1 to 1 for calibration; nats for perplexity and bits."""
        ...

    def found(self, example: Example, answer: Answer) -> bool:
        """Whether there is an answer in what was said, right or wrong: something that the judge could compare."""
        return bool(answer.text.strip())

    ends: bool = True
    """Whether answers end by themselves; false where any text is cut off at some length and judged by its beginning."""


class Reader:
    """Texts to ids, in one way for all tasks.

    Args:
        room: tokens that the context holds, answers included.
        template: a chat template: prompts become a user's message. None: plain text.
        bos: begin plain texts with the token that begins a text, where the tokenizer does not do so itself.
    """

    def __init__(self, tokenizer: Tokenizer, room: int, *, template: str | None = None, bos: bool = False) -> None:
        if bos and tokenizer.bos_id is None:
            raise InputError("--bos: this tokenizer has no token that begins a text; leave --bos away", param="bos")
        self.tokenizer, self.room, self.template, self.bos = tokenizer, room, template, bos
        self._thinks = template is not None and may_think(template)
        self._head: tuple[str, list[int]] = ("", self.ids(""))

    @property
    def chat(self) -> bool:
        """Whether prompts are messages of a user, and answers an assistant's."""
        return self.template is not None

    def ids(self, text: str) -> list[int]:
        """As plain text."""
        ids = self.tokenizer.encode(text) if text else []
        first = self.tokenizer.bos_id
        return [first, *ids] if self.bos and first is not None and ids[:1] != [first] else ids

    def prompt(
        self, text: str, *, solved: Sequence[tuple[str, str]] = (), system: str | None = None, begun: str = ""
    ) -> tuple[int, ...]:
        """A prompt to answer: a user's message if there is a template.

        The rest is for messages. `solved`: questions and answers that stand before it, `system`: instead of the
        template's own, `begun`: the first words of the answer.
        """
        if self.template is None:
            return tuple(self.ids(text))
        turns = [] if system is None else [{"role": "system", "content": system}]
        for question, answer in solved:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = encode_chat(self.tokenizer, self.template, [*turns, {"role": "user", "content": text}])
        return (*ids, *self.tokenizer.encode(begun, add_special_tokens=False)) if begun else tuple(ids)

    def decision(self, text: str, question: DecisionQuestion) -> tuple[tuple[int, ...], LabelTree]:
        """The prompt of a decision about a text, and its labels. Raises InputError: there is no chat template."""
        if self.template is None:
            raise InputError("by=decision asks chat models only; add --chat", param="tasks")
        labels = label_tree(self.tokenizer, question, self.tokenizer.vocab_size)
        messages = asked([{"role": "user", "content": text}], wording(question, labels.names))
        return tuple(encode_chat(self.tokenizer, self.template, messages, kwargs=PLAIN_KWARGS)), labels

    def stops(self, *plain: str) -> tuple[str, ...]:
        """Where the answer to plain text ends; an assistant may say more first, and ends by itself."""
        return () if self.chat else plain

    def reading(self, before: str, text: str) -> Reading:
        """`text` scored after `before`, encoded as one. Where a token spans both, it belongs to `text`."""
        if self._head[0] != before:  # choices have one head
            self._head = before, self.ids(before)
        whole, head = self.ids(before + text), self._head[1]
        first = next(
            (i for i, (a, b) in enumerate(zip(whole, head, strict=False)) if a != b), min(len(whole), len(head))
        )
        if first == len(whole):
            raise InputError(f"nothing can be scored in {text[:40]!r}: it adds no token", param="tasks")
        return Reading(tuple(whole), max(1, first))

    def count(self, text: str) -> int:
        """Tokens of a text that continues another."""
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def answer(self, num_tokens: int) -> int:
        """Tokens that an answer of `num_tokens` may take: in a chat there is room for a sentence around it."""
        return num_tokens + (_SENTENCE_TOKENS if self.chat else 0)

    def budget(self, prompt: Sequence[int], num_tokens: int) -> int:
        """`num_tokens`, and what the context has left for a thought before them, if the template knows thoughts."""
        most = num_tokens + (_THOUGHT_TOKENS if self._thinks else 0)
        return max(num_tokens, min(most, self.room - len(prompt)))

    def fits(self, prompt: str, max_tokens: int) -> bool:
        return len(self.prompt(prompt)) + max_tokens <= self.room


class Options:
    """What stands behind the `?` of a task: read by name, with bounds, each at most once. Raises ConfigError."""

    def __init__(self, task: str, values: Mapping[str, str]) -> None:
        self.task, self._values, self._read = task, dict(values), set[str]()

    def text(self, name: str, default: str, choices: Sequence[str]) -> str:
        self._read.add(name)
        value = self._values.get(name, default)
        if value not in choices:
            raise self._wrong(name, f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def names(self, name: str, default: tuple[str, ...], choices: Sequence[str]) -> tuple[str, ...]:
        """One or several of `choices`, separated by `+`, as they come, each once."""
        self._read.add(name)
        found = tuple(dict.fromkeys(self._values[name].split("+"))) if name in self._values else default
        for value in found:
            if value not in choices:
                raise self._wrong(name, f"must be of {', '.join(choices)}, with + between several, not {value!r}")
        return found

    def number(self, name: str, default: int, low: int, high: int) -> int:
        return self.numbers(name, (default,), low, high, most=1)[0]

    def numbers(self, name: str, default: Sequence[int], low: int, high: int, most: int = 64) -> tuple[int, ...]:
        """One or several, separated by `+`, in order and each once."""
        found = self._floats(name, default, low, high, most)
        if any(value != int(value) for value in found):
            raise self._wrong(name, f"must be whole, not {self._values[name]}")
        return tuple(int(value) for value in found)

    def real(self, name: str, default: float, low: float, high: float) -> float:
        return self._floats(name, (default,), low, high, most=1)[0]

    def shares(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        return self._floats(name, default, 0, 1, 64)

    def _floats(self, name: str, default: Sequence[float], low: float, high: float, most: int) -> tuple[float, ...]:
        self._read.add(name)
        if name not in self._values:
            return tuple(default)
        try:
            found = [float(part) for part in self._values[name].split("+")]
        except ValueError:
            raise self._wrong(name, f"must be a number, not {self._values[name]!r}") from None
        if not all(low <= value <= high for value in found):
            raise self._wrong(name, f"must be {low} to {high}, not {self._values[name]}")
        if len(found) > most:
            raise self._wrong(name, f"takes at most {most} value{'s' * (most > 1)}, not {len(found)}")
        return tuple(sorted(set(found)))

    def finish(self) -> None:
        """Call when all was read: what is left is a mistake."""
        unknown = sorted(self._values.keys() - self._read)
        if unknown:
            known = ", ".join(sorted(self._read)) or "none"
            raise ConfigError(f"task {self.task!r} has no option {unknown[0]!r}; it has: {known}", field="tasks")

    def _wrong(self, name: str, why: str) -> ConfigError:
        return ConfigError(f"task {self.task!r}: {name} {why}", field="tasks")


def no_file(name: str, path: Path | None) -> None:
    """For tasks that make their examples themselves."""
    if path is not None:
        raise ConfigError(f"task {name!r} makes its examples itself and takes no file; leave {str(path)!r} away",
                          field="tasks")  # fmt: skip
