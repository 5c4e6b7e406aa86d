"""Prompt compression without a model: units, places of text, options, and the two methods' own rules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import InputError
from penstock.compress.drop import keep_units
from penstock.compress.locate import compressible, find_once, tokens_within
from penstock.compress.options import keep_last, make_transform, read_options, target
from penstock.compress.units import UNITS
from penstock.core.compression import ContextJob, PromptCompression
from penstock.text.contents import find_contents
from tests.conformance.test_context_transform import FakeReader

TEXTS = [
    "In", " the", " old", " house", ",", " found", " by", " Ann", ".", ' "', "Yes", '!"', " she", " said", ".", "\n",
    "\n", "ba", "ko", ":", " ", "3", ".", "1", "\n", "End",
]  # fmt: skip


class Table:
    """A reader that finds every token as surprising as a list says, wherever it stands."""

    def __init__(self, nats: Sequence[float]) -> None:
        self.by_id = list(nats)
        self.asked: list[tuple[list[int], list[int]]] = []

    def nats(self, prefix: Sequence[int], ids: Sequence[int]) -> np.ndarray:
        self.asked.append((list(prefix), list(ids)))
        return np.array([self.by_id[i] for i in ids])


def cut(unit: str, texts: Sequence[str] = TEXTS) -> list[str]:
    return ["".join(texts[a:b]) for a, b in UNITS[unit](texts, (0, len(texts)))]


def test_units() -> None:
    said = ["In the old house, found by Ann.", ' "Yes!"', " she said.\n\n", "bako: 3.1\n", "End"]
    assert cut("sentence") == said
    assert cut("paragraph") == ['In the old house, found by Ann. "Yes!" she said.\n\n', "bako: 3.1\nEnd"]
    assert cut("phrase")[:3] == ["In the old house,", " found", " by Ann."]
    assert "".join(cut("phrase")) == "".join(TEXTS)
    assert cut("phrase")[-2:] == [" 3.1\n", "End"]
    assert cut("token") == TEXTS
    for unit in UNITS:  # a span in the middle: nothing before it counts, nothing behind it belongs to it
        found = UNITS[unit](TEXTS, (2, 12))
        assert found[0][0] == 2
        assert found[-1][1] == 12
        assert all(a[1] == b[0] for a, b in pairwise(found))


def test_the_last_unit_is_cut_token_by_token() -> None:
    units, nats = [(0, 3), (3, 5), (5, 9)], {i: float(i) for i in range(9)}
    assert keep_units(units, [1.0, 3.0, 2.0], nats, 9) == list(range(9))
    assert keep_units(units, [1.0, 3.0, 2.0], nats, 7) == [2, 3, 4, 5, 6, 7, 8]
    assert keep_units(units, [1.0, 3.0, 2.0], nats, 3) == [3, 4, 8]
    assert keep_units(units, [2.0, 2.0, 2.0], nats, 6) == [3, 4, 5, 6, 7, 8]


def test_G38_the_phrases_that_are_expected_go_first() -> None:
    """Self-information per token, merged into phrases; the least of them goes whole."""
    texts = ["The", " cat", " of", " the", " king", " sat", ".", " Ann", " slept", "."]
    nats = [5, 5, 1, 1, 1, 9, 2, 8, 8, 2]
    job = ContextJob(range(10), texts, [(0, 10)], 7)
    kept = make_transform(PromptCompression(method="selective-context", rate=0.5)).keep(job, Table(nats))
    # Phrases: "The cat" 5, " of the king sat." 2.8, " Ann slept." 6: three tokens go, the least of the second.
    assert kept == [0, 1, 5, 6, 7, 8, 9]
    assert "".join(texts[i] for i in kept) == "The cat sat. Ann slept."


def test_G39_each_segment_is_read_behind_what_was_kept() -> None:
    """Algorithm 2: the prefix of a segment is the prompt as compressed so far, fixed parts included, and no more."""
    rng = random.Random(2)
    ids = [rng.randrange(17) for _ in range(60)]
    job = ContextJob(ids, ["a"] * 60, [(5, 30), (40, 55)], 13)
    reader = FakeReader()
    options = PromptCompression(method="llmlingua", rate=0.5, segment_tokens=10, coarse=100.0)
    kept = make_transform(options).keep(job, reader)
    assert len(reader.asked) == 4  # 40 tokens in tens; nothing is dropped coarsely, so nothing is read for it
    whole = [i for i in range(55) if i in kept or not (5 <= i < 30 or 40 <= i < 55)]
    shown = [ids[i] for i in whole]
    for prefix, segment in reader.asked:
        assert prefix == shown[: len(prefix)]
        assert len(segment) <= 20  # ten, and the ten fixed tokens between the spans
    prefixes = [len(prefix) for prefix, _ in reader.asked]
    assert prefixes == sorted(prefixes)
    assert prefixes[-1] > 0
    # The most surprising of the first segment, by what the reader said of it.
    first = dict(zip(range(15), reader.nats([], ids[:15]).tolist(), strict=True))
    best = sorted(range(5, 15), key=lambda i: -first[i])[:3]
    assert [i for i in kept if i < 15] == sorted(best)


def test_G39_the_budget_controller_keeps_the_units_of_the_highest_perplexity() -> None:
    texts = [" a", " b", ".", " c", " d", ".", " e", " f", ".", " g", " h", "."]
    nats = [1, 1, 1, 9, 9, 9, 2, 2, 2, 7, 7, 7]
    job = ContextJob(range(12), texts, [(0, 12)], 3)
    reader = Table(nats)
    kept = make_transform(PromptCompression(method="llmlingua", rate=0.25)).keep(job, reader)
    assert kept == [3, 4, 5]
    assert reader.asked[0] == ([], list(range(12)))
    assert reader.asked[1] == ([], [3, 4, 5, 9, 10, 11])  # twice the target: the two sentences that surprise most
    tight = make_transform(PromptCompression(method="llmlingua", rate=0.25, coarse=1.0)).keep(job, Table(nats))
    assert tight == [3, 4, 5]


@pytest.mark.parametrize("percent", [1, 7, 10, 25, 30, 33, 50, 70, 75, 90, 99, 100])
def test_a_rate_is_rounded_up_and_exact(percent: int) -> None:
    options = PromptCompression(method="random", rate=percent / 100)
    for num in range(1, 400):
        assert target(options, num + 5, num) == ceil(Fraction(percent, 100) * num)
    assert target(options, 5, 0) == 0


def test_target_tokens_are_of_the_whole_prompt() -> None:
    options = PromptCompression(method="random", target_tokens=30)
    assert target(options, 100, 80) == 10
    assert target(options, 30, 10) == 10
    for tokens, context, said in ((20, 10, "only 20 tokens"), (100, 60, "at least 41"), (100, 0, "nothing of")):
        with pytest.raises(InputError, match=said) as caught:
            target(options, tokens, context)
        assert caught.value.param == "prompt_compression.target_tokens"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"method": "lingua", "rate": 0.5}, "method", "llmlingua, random, selective-context, not 'lingua'"),
    ({"method": "random"}, "rate", "either rate or target_tokens"),
    ({"method": "random", "rate": 0.5, "target_tokens": 9}, "rate", "either rate or target_tokens"),
    ({"method": "random", "rate": 0}, "rate", "above 0 and at most 1"),
    ({"method": "random", "rate": 1.01}, "rate", "above 0 and at most 1"),
    ({"method": "random", "rate": float("nan")}, "rate", "above 0 and at most 1"),
    ({"method": "random", "target_tokens": 0}, "target_tokens", "at least 1"),
    ({"method": "random", "rate": 0.5, "context": ""}, "context", "is empty"),
    ({"method": "random", "rate": 0.5, "context": "a", "messages": [0]}, "messages", "exclude each other"),
    ({"method": "random", "rate": 0.5, "messages": []}, "messages", "empty list"),
    ({"method": "random", "rate": 0.5, "keep_last": -1}, "keep_last", "at least 0"),
    ({"method": "random", "rate": 0.5, "coarse": 2}, "coarse", "no option of random; it has seed, unit"),
    ({"method": "llmlingua", "rate": 0.5, "seed": 2}, "seed", "no option of llmlingua"),
    ({"method": "llmlingua", "rate": 0.5, "unit": "token"}, "unit", "one of sentence, paragraph"),
    ({"method": "llmlingua", "rate": 0.5, "segment_tokens": 0}, "segment_tokens", "from 1 to 1024"),
    ({"method": "llmlingua", "rate": 0.5, "coarse": 0.5}, "coarse", "from 1 to 100"),
]


@pytest.mark.parametrize(("given", "field", "said"), BAD, ids=lambda v: str(v)[:60])
def test_bad_options_are_named(given: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        make_transform(read_options(given))
    assert caught.value.param == f"prompt_compression.{field}"


def test_an_object_of_the_wrong_shape() -> None:
    for given, said in (({"method": "random", "rate": 0.5, "ratio": 1}, "ratio"), ({"rate": 0.5}, "method"),
                        ({"method": "random", "rate": "half"}, "rate")):  # fmt: skip
        with pytest.raises(InputError, match=said) as caught:
            read_options(given)
        assert caught.value.param == "prompt_compression"


def test_a_question_at_the_end_is_safe_unless_the_context_is_named() -> None:
    assert keep_last(PromptCompression(method="random", rate=0.5)) == 64
    assert keep_last(PromptCompression(method="random", rate=0.5, context="a")) == 0
    assert keep_last(PromptCompression(method="random", rate=0.5, messages=[0])) == 0
    assert keep_last(PromptCompression(method="random", rate=0.5, context="a", keep_last=7)) == 7


def test_places_of_text() -> None:
    pieces = [b"On", b"ce", b" upon", b" a", b" ti", b"me", b"!"]
    assert find_once(pieces, " upon a", "context") == (2, 4)
    assert find_once(pieces, "ce upon a t", "context") == (1, 4)  # a token that is cut by the end stays
    assert find_once(pieces, "O", "context") == (0, 0)  # no whole token of it
    for text, said in (("twice", "does not stand"), ("e", "more than once")):
        with pytest.raises(InputError, match=said):
            find_once(pieces, text, "context")
    assert tokens_within(pieces, [(0, 2), (3, 4), (2, 9)]) == [(0, 1), (2, 2), (1, 3)]
    assert compressible([(0, 3), (4, 7)], [9, 5, 9, 5, 9, 9, 9], {5}, 1) == [(0, 1), (2, 3), (4, 6)]
    assert compressible([(0, 3)], [1, 1, 1], (), 3) == []


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TRIMMING = TEMPLATE.replace("m.content", "m.content | trim")
CHANGING = TEMPLATE.replace("m.content", "m.content[:7]")


def test_contents_are_found_where_the_template_writes_them() -> None:
    messages = [{"role": "system", "content": "user"}, {"role": "user", "content": " <user> \u00e9 "},
                {"role": "user", "content": "user"}]  # fmt: skip
    for template, expected in ((TEMPLATE, " <user> \u00e9 "), (TRIMMING, "<user> \u00e9")):
        found = find_contents(template, messages, [1, 2])
        data = found.text.encode()
        assert [data[a:b].decode() for a, b in found.stretches] == [expected, "user"]
        assert data[: found.stretches[0][0]].decode() == "<system>user\n<user>"
    with pytest.raises(InputError, match="template changes"):
        find_contents(CHANGING, messages, [1])
