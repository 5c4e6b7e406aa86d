"""Exercises with known answers, as many as wanted: retrieval, lookup, copying, small sums, small JSON.

Every exercise is a context (numbers, names, noise), a question and an answer. Names, values and wordings of the test
half are never seen in training: nano and pico learnt from the training half (`tools/train`), `penstock eval` asks the
test half. `Exercise.pieces` marks what the model should learn: the answer fully, the rest little.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Split = Literal["train", "test"]


class Piece(NamedTuple):
    """Some text of an exercise; `answer`: it is what the model has to produce; `prose`: (start, end) of each stretch of
    characters that is a story told in full, worth learning for its own sake."""

    text: str
    answer: bool
    prose: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Exercise:
    """`depth`: where in the context the needed fact stands, 0 at its beginning, 1 at its end; None if nowhere.

    `more`: further questions about the same context and their answers. They make training denser: a long context is
    read once and asked often. Only the first question counts where models are judged.
    `planted`: the sentences that interrupt a context of prose; None if the context is not prose.
    """

    skill: str
    prompt: str
    answer: str
    depth: float | None = None
    more: tuple[tuple[str, str], ...] = ()
    planted: tuple[str, ...] | None = None

    def pieces(self, chat: bool) -> list[Piece]:
        """As plain text, or as turns of a dialogue."""
        asked = ((self.prompt, self.answer), *self.more)
        out: list[Piece] = []
        for i, (prompt, answer) in enumerate(asked):
            prose = self._prose() if i == 0 else ()
            if chat:
                begin = "<|im_start|>user\n"
                prose = tuple((a + len(begin), b + len(begin)) for a, b in prose)
                out.append(Piece(f"{begin}{prompt}<|im_end|>\n<|im_start|>assistant\n", False, prose))
                out += [Piece(answer + "<|im_end|>", True), Piece("\n", False)]
            else:
                out += [Piece(prompt, False, prose), Piece(" " + answer + "\n", True)]
        return out

    def _prose(self) -> tuple[tuple[int, int], ...]:
        """What of the prompt is prose: all before the question but the planted sentences."""
        if self.planted is None:
            return ()
        end = self.prompt.rindex("\n\n")
        # Sentence by sentence: a second plant may stand between the two sentences of the first.
        sentences = [part.rstrip(".") + "." for text in self.planted for part in text.split(". ")]
        cuts = sorted((at, at + len(text)) for text in sentences for at in [self.prompt.index(text)])
        edges = [0, *(edge for cut in cuts for edge in cut), end]
        return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


class Words(NamedTuple):
    """One half of the world."""

    names: tuple[str, ...]
    things: tuple[str, ...]
    places: tuple[str, ...]
    colours: tuple[str, ...]


_NAMES = (
    "Tom", "Ann", "Ben", "Lucy", "Max", "Rose", "Sam", "Ella", "Jack", "Mary", "Paul", "Nina", "Fred", "Grace",
    "Leo", "Ivy", "Hugo", "Clara", "Owen", "Ruth", "Dan", "Eve", "Karl", "Lily", "Mark", "Jane", "Peter", "Alice",
    "Hans", "Emma", "Toby", "Flora", "Oscar", "Daisy", "Ralph", "Maud", "Felix", "Wendy", "Colin", "Vera",
)  # fmt: skip
_THINGS = (
    "ball", "book", "lamp", "hat", "cup", "key", "drum", "kite", "bell", "coin", "ring", "doll", "boat", "shoe",
    "clock", "flute", "spoon", "chair", "rope", "basket", "mirror", "stone", "candle", "ladder", "whistle", "button",
    "feather", "hammer", "ribbon", "saddle",
)  # fmt: skip
_PLACES = (
    "garden", "kitchen", "forest", "barn", "school", "tower", "river", "market", "church", "cellar", "meadow",
    "harbour", "attic", "bridge", "mill", "castle", "village", "orchard", "stable", "island",
)  # fmt: skip
_COLOURS = (
    "red", "blue", "green", "black", "white", "yellow", "brown", "grey", "pink", "golden", "silver", "purple",
)  # fmt: skip


def words(split: Split) -> Words:
    """Every fifth word is for the test half only."""

    def half(all_words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(w for i, w in enumerate(all_words) if (i % 5 == 4) == (split == "test"))

    return Words(half(_NAMES), half(_THINGS), half(_PLACES), half(_COLOURS))


def number(rng: random.Random, digits: int, split: Split) -> str:
    """A number whose digits add up to a multiple of 5 in the test half only: no number is in both."""
    while True:
        text = "".join(rng.choice(string.digits) for _ in range(digits))
        if text[0] != "0" and (sum(map(int, text)) % 5 == 0) == (split == "test"):
            return text


def code(rng: random.Random, split: Split, length: int = 4) -> str:
    """A made-up word such as "bako"; the letter q, x or z stands in those of the test half only."""
    consonants = "bdfghklmnprstvw"
    parts = [rng.choice(consonants) + rng.choice("aeiou") for _ in range(length // 2)]
    if split == "test":
        i = rng.randrange(len(parts))
        parts[i] = rng.choice("qxz") + parts[i][1]
    return "".join(parts)


Noise = Callable[[random.Random, int], str]
"""(rng, about how many characters) -> prose to hide a fact in."""

_HIDE = {
    "train": (
        ("The pass key is {v}. Remember it.", "What is the pass key? The pass key is"),
        ("The magic number is {v}.", "What is the magic number? The magic number is"),
        ("Remember this: the secret code of {n} is {v}.", "What is the secret code of {n}? The secret code of {n} is"),
    ),
    "test": (
        ("The pass key is {v}. Do not forget it.", "What is the pass key? The pass key is"),
        ("Take note that the secret code of {n} is {v}.", "What is the secret code of {n}? The secret code of {n} is"),
    ),
}


def needle(rng: random.Random, split: Split, size: int, noise: Noise) -> Exercise:
    """One fact hidden in prose at a random depth."""
    return hidden(rng, split, size, noise, rng.random())


def hidden(rng: random.Random, split: Split, size: int, noise: Noise, depth: float) -> Exercise:
    """One fact hidden in prose behind the last sentence that ends before the part `depth` of it."""
    w = words(split)
    template, question = rng.choice(_HIDE[split])
    values = {"v": number(rng, rng.choice((4, 5, 6)), split), "n": rng.choice(w.names)}
    text = noise(rng, size)
    cut = _sentence_end(text, int(depth * len(text)))
    planted = [template.format(**values)]
    context = f"{text[:cut]}{planted[0]} {text[cut:]}".strip()
    more: list[tuple[str, str]] = []
    if split == "train":  # more needles, of other kinds and other people
        for other, asked in _HIDE[split]:
            for name in rng.sample(w.names, rng.randint(0, 4)) if "{n}" in other else w.names[:1]:
                if other == template and ("{n}" not in other or name == values["n"]):
                    continue
                fact = {"v": number(rng, rng.choice((4, 5, 6)), split), "n": name}
                at = _sentence_end(context, rng.randrange(len(context)))
                planted.append(other.format(**fact))
                context = f"{context[:at]}{planted[-1]} {context[at:]}"
                more.append((asked.format(**fact), fact["v"] + "."))
        rng.shuffle(more)
    prompt = f"{context}\n\n{question.format(**values)}"
    return Exercise("needle", prompt, values["v"] + ".", cut / max(1, len(text)), tuple(more), tuple(planted))


def _sentence_end(text: str, before: int) -> int:
    """Where the last sentence that ends before `before` ends, its blank included; 0 if there is none."""
    return text.rfind(". ", 0, before) + 2 if text.rfind(". ", 0, before) >= 0 else 0


def pairs(rng: random.Random, split: Split, count: int) -> dict[str, str]:
    """Made-up words, each with a number of four digits."""
    out: dict[str, str] = {}
    while len(out) < count:
        out[code(rng, split)] = number(rng, 4, split)
    return out


def lookup(rng: random.Random, split: Split, size: int, noise: Noise) -> Exercise:
    """Key-value pairs, one of them asked for. Form: Liu et al., Lost in the Middle, arXiv 2307.03172, section 3."""
    count = max(2, size // 14)
    keys = pairs(rng, split, count)
    at = rng.randrange(count)
    key = list(keys)[at]
    lines = "\n".join(f"{k}: {v}" for k, v in keys.items())
    more = rng.sample(list(keys), min(count, 12)) if split == "train" else []
    asked = tuple((f"The value of {k} is", keys[k] + ".") for k in more)
    return Exercise("lookup", f"{lines}\n\nThe value of {key} is", keys[key] + ".", at / count, asked)


def two_hop(rng: random.Random, split: Split, size: int, noise: Noise) -> Exercise:
    """Where is the thing? It is with somebody, who is somewhere."""
    w = words(split)
    count = max(2, min(len(w.names), len(w.things), len(w.places), size // 60))
    people, things = rng.sample(w.names, count), rng.sample(w.things, count)
    places = rng.sample(w.places, count)
    facts = [f"{n} has the {t}." for n, t in zip(people, things, strict=True)]
    facts += [f"{n} is in the {p}." for n, p in zip(people, places, strict=True)]
    rng.shuffle(facts)
    i, *others = rng.sample(range(count), count)
    asked = [(f"Who has the {things[j]}, and where? The {things[j]} is with", f"{people[j]} in the {places[j]}.")
             for j in (i, *others[:4])]  # fmt: skip
    prompt = " ".join(facts) + "\n\n" + asked[0][0]
    return Exercise("two-hop", prompt, asked[0][1], more=tuple(asked[1:]) if split == "train" else ())


def passage(rng: random.Random, split: Split, size: int, noise: Noise) -> Exercise:
    """A short story of facts and one question about it."""
    w = words(split)
    n, other = rng.sample(w.names, 2)
    thing, place, colour = rng.choice(w.things), rng.choice(w.places), rng.choice(w.colours)
    day = rng.choice(("Monday", "Tuesday", "Friday", "Sunday"))
    story = (
        f"On {day}, {n} went to the {place} and found a {colour} {thing}. {n} gave it to {other}. "
        f"{other} was very happy and said thank you."
    )
    questions = [
        (f"What did {n} find? {n} found", f"a {colour} {thing}."), (f"Where did {n} go? {n} went to", f"the {place}."),
        (f"What colour was the {thing}? It was", f"{colour}."), (f"Who got the {thing}? It was given to", f"{other}."),
        (f"When did {n} go to the {place}? It was on", f"{day}."),
    ]  # fmt: skip
    rng.shuffle(questions)
    question, answer = questions[0]
    more = tuple(questions[1:]) if split == "train" else ()
    return Exercise("passage", f"{story}\n\n{question}", answer, more=more)


def copying(rng: random.Random, split: Split, size: int, noise: Noise) -> Exercise:
    text = " ".join(code(rng, split, rng.choice((2, 4, 6))) for _ in range(rng.randint(3, max(4, min(40, size // 12)))))
    return Exercise("copy", f"Repeat: {text}\nAgain:", text + ".")


def arithmetic(rng: random.Random, split: Split, size: int, noise: Noise) -> Exercise:
    """Two-digit sums and differences; pairs whose sum is divisible by 7 are for the test half only."""
    return _several(rng, split, _sum)


def _several(rng: random.Random, split: Split, make: Callable[[random.Random, Split], Exercise]) -> Exercise:
    """An exercise; in training often with others behind it that have nothing to do with it."""
    first = make(rng, split)
    others = [make(rng, split) for _ in range(rng.choice((0, 0, 4, 12)))] if split == "train" else []
    return replace(first, more=tuple((e.prompt, e.answer) for e in others))


def _sum(rng: random.Random, split: Split) -> Exercise:
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if ((a + b) % 7 == 0) == (split == "test"):
            break
    if rng.random() < 0.5:
        return Exercise("arithmetic", f"{a} + {b} =", f"{a + b}.")
    a, b = max(a, b), min(a, b)
    return Exercise("arithmetic", f"{a} - {b} =", f"{a - b}.")


def small_json(rng: random.Random, split: Split, size: int, noise: Noise) -> Exercise:
    return _several(rng, split, _record)


def _record(rng: random.Random, split: Split) -> Exercise:
    w = words(split)
    record = {"name": rng.choice(w.names), "age": rng.randint(3, 90), "likes": rng.choice(w.things)}
    keys = rng.sample(list(record), rng.randint(1, 3))
    prompt = (
        f"{record['name']} is {record['age']} years old and likes the {record['likes']}. "
        f"Write as JSON with {', '.join(keys)}:"
    )
    return Exercise("json", prompt, json.dumps({k: record[k] for k in keys}))


SKILLS: dict[str, Callable[[random.Random, Split, int, Noise], Exercise]] = {
    "needle": needle, "lookup": lookup, "two-hop": two_hop, "passage": passage, "copy": copying,
    "arithmetic": arithmetic, "json": small_json,
}  # fmt: skip
WEIGHTS = {"needle": 3, "lookup": 8, "two-hop": 2, "passage": 2, "copy": 3, "arithmetic": 1, "json": 2}


def exercise(rng: random.Random, split: Split, size: int, noise: Noise) -> Exercise:
    """One of any skill; its context has about `size` characters at most."""
    name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    return SKILLS[name](rng, split, size, noise)
