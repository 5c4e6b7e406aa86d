"""A thought before a bound answer: free, ended in time, and the answer's grammar begins right behind its mark."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.sampling import StructuredOutputs, Thought, TokenRules
from penstock.runner.logits.grammar import Grammar
from penstock.runner.logits.grammar_cache import GrammarCache
from penstock.text.grammar.compile import Compiler, Vocabulary
from penstock.text.grammar.lead import MAX_TOKENS_KEPT, Lead, led, thought_lead, tokens_to_think
from penstock.text.grammar.source import grammar_of
from penstock.text.tokenizer import Tokenizer

END, OPEN, CLOSE, CALL = 0, 1, 2, 3
SPECIAL = [b"<end>", b"<think>", b"</think>", b"<tool_call>"]
TEXT = [*(bytes([b]) for b in range(0x20, 0x7F)), b"\n", b">{", b"nk>", b"</", b"\xc3", b"\xa9", b'{"']
TOKENS = [*SPECIAL, *TEXT]
ASKED = {
    "json": StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    "regex": StructuredOutputs(regex=r'\{"a":[0-9]\}'),
    "choice": StructuredOutputs(choice=['{"a":1}', "yes"]),
    "lark": StructuredOutputs(grammar='start: "{" "\\"a\\":" /[0-9]/ "}"'),
    "gbnf": StructuredOutputs(grammar='root ::= "{\\"a\\":" [0-9] "}"'),
    "object": StructuredOutputs(json_object=True),
}


def cache(special: bool) -> GrammarCache:
    ids = [END, OPEN, CLOSE, CALL] if special else [END]
    tokens = TOKENS if special else [t if n == END or n >= len(SPECIAL) else b"" for n, t in enumerate(TOKENS)]
    return GrammarCache(lambda: Compiler(Vocabulary(tokens, ids, [END])), end_ids=lambda: frozenset({END}))


CACHES = {True: cache(True), False: cache(False)}


def spelled(text: str, *, special: bool = False) -> list[int]:
    """The longest token at each place."""
    out, data = [], text.encode()
    while data:
        known = TOKENS if special else [b"", b"", b"", b"", *TEXT]
        best = max((n for n, t in enumerate(known) if t and data.startswith(t)), key=lambda n: len(known[n]))
        out.append(best)
        data = data[len(known[best]) :]
    return out


def lead(*, special: bool, opened: bool) -> Lead:
    tokenizer = SimpleNamespace(
        special_ids=[END], encode_inner=spelled,
        added_literals={"<think>": OPEN, "</think>": CLOSE, "<tool_call>": CALL} if special else {},
    )  # fmt: skip
    return thought_lead(cast(Tokenizer, tokenizer), len(TOKENS), [END], "<think>", "</think>", opened=opened)


def rules(kind: str, *, special: bool, opened: bool, most: int = 10_000) -> TokenRules:
    found = lead(special=special, opened=opened)
    assert found.thought is not None
    thought = Thought(found.thought.opening, found.thought.close, found.thought.closing, most)
    return TokenRules(grammar=led(found.rules, grammar_of(ASKED[kind])), thought=thought, stop_ids=[END])


class Row:
    def __init__(self, rules: TokenRules, *, special: bool, output: list[int] | None = None) -> None:
        self.processor = Grammar(len(TOKENS), CACHES[special], threaded=False)
        assert self.processor.add(1, rules, [5], output or [])

    def allowed(self) -> list[int]:
        logits = np.zeros((1, len(TOKENS)), np.float32)
        self.processor.apply(logits, [1])
        found: list[int] = np.flatnonzero(np.isfinite(logits[0])).tolist()
        return found

    def takes(self, ids: list[int]) -> bool:
        for i in ids:
            if i not in self.allowed():
                return False
            self.processor.advance(1, [i])
        return True


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("special", [True, False])
def test_the_thought_is_free_and_the_answer_begins_behind_its_mark(kind: str, special: bool) -> None:
    asked = rules(kind, special=special, opened=True)
    for thought in ("", "hm\n", 'no {"b": [\n<thi', "é <b> </thin </thi"):
        row = Row(asked, special=special)
        assert row.takes(spelled(thought))
        assert END not in row.allowed(), "the answer would be missing"
        assert len(row.allowed()) >= len(TEXT) - 2  # but for the halves of a character
        assert row.takes(spelled("</think>", special=special))
        assert spelled("z")[0] not in row.allowed()
        assert row.takes(spelled('{"a":1}'))
        assert END in row.allowed()
    row = Row(asked, special=special)
    assert row.takes(spelled("x</thi")), "a mark that is spelled counts where it is a token too"
    assert row.takes(spelled("nk>{")[:1] if special else spelled("nk>"))
    assert spelled("z")[0] not in row.allowed()
    assert row.takes(spelled('{"a":1}')), "the answer"
    assert Row(asked, special=special).takes([*spelled("a</thi"), *spelled("n"), *spelled("k"), TOKENS.index(b">{")])


def test_other_special_tokens_are_free_in_a_thought_and_not_in_the_answer() -> None:
    row = Row(rules("json", special=True, opened=True), special=True)
    assert row.takes([CALL, *spelled("call"), CALL, CALL, OPEN, *spelled("x"), CLOSE])
    assert not {OPEN, CLOSE, CALL, END} & set(row.allowed())


@pytest.mark.parametrize("special", [True, False])
def test_a_model_may_think_or_answer_where_the_prompt_has_opened_nothing(special: bool) -> None:
    asked = rules("json", special=special, opened=False, most=20)
    row = Row(asked, special=special)
    assert spelled("z")[0] not in row.allowed()
    assert row.takes(spelled('{"a":1}'))
    assert END in row.allowed()
    row = Row(asked, special=special)
    assert row.takes(spelled("<think>hm</think>", special=special))
    assert row.takes(spelled('{"a":1}'))
    long = Row(asked, special=special)
    assert long.takes(spelled('{"a":1, "b": "<think>' + "x" * 40 + '"}')), "no thought, so nothing is ended"


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("opened", [True, False])
def test_a_thought_is_ended_in_time(special: bool, opened: bool) -> None:
    asked = rules("regex", special=special, opened=opened, most=12)
    mark = spelled("</think>", special=special)
    row = Row(asked, special=special)
    begin = [] if opened else spelled("<think>", special=special)
    taken = [*begin, *spelled("abcdefghijklmnop")][:12]
    assert row.takes(taken[:11])
    assert len(row.allowed()) > 50
    assert row.takes(taken[11:])
    for n, i in enumerate(mark):
        assert row.allowed() == [i]
        row.processor.advance(1, [i])
        again = Row(asked, special=special, output=[*taken, *mark[: n + 1]])  # as after the end of an engine
        assert again.allowed() == row.allowed()
    answer = spelled('{"a":')
    assert row.takes(answer)
    twin = 2
    row.processor.fork(1, twin)
    row.processor.rollback(1, len(answer) + len(mark) + 3)
    assert len(row.allowed()) > 50, "taken back, the thought goes on"
    assert row.takes(spelled("xyz"))
    assert row.allowed() == mark[:1]
    logits = np.zeros((1, len(TOKENS)), np.float32)
    row.processor.apply(logits, [twin])
    assert set(np.flatnonzero(np.isfinite(logits[0]))) == {TOKENS.index(b"%d" % n) for n in range(10)}


def test_a_thought_is_not_ended_in_the_middle_of_a_character() -> None:
    row = Row(rules("regex", special=False, opened=True, most=1), special=False)
    assert row.takes([TOKENS.index(b"\xc3")])
    assert TOKENS.index(b"\xa9") in row.allowed()
    assert row.takes([TOKENS.index(b"\xa9")])
    assert row.allowed() == [TOKENS.index(b"</")]


@pytest.mark.parametrize("seed", range(20))
def test_random_walks_end_with_an_answer(seed: int) -> None:
    rng = random.Random(seed)
    special, opened = rng.random() < 0.5, rng.random() < 0.5
    row = Row(rules("choice", special=special, opened=opened, most=15), special=special)
    out = b""
    for _ in range(60):
        allowed = row.allowed()
        if allowed == [END]:
            break
        token = rng.choice([i for i in allowed if i != END])
        row.processor.advance(1, [token])
        out += TOKENS[token]
    assert out.rpartition(b"</think>")[2] in (b'{"a":1}', b"yes"), out
    assert opened or out.startswith(b"<think>") or b"</think>" not in out


@pytest.mark.parametrize(("max_tokens", "most"), [(1, 0), (8, 0), (9, 0), (10, 1), (28, 10), (9000, 7968)])
def test_a_share_of_the_tokens_is_the_answers(max_tokens: int, most: int) -> None:
    thought = Thought(close="</think>", closing=[1] * 8)
    assert tokens_to_think(max_tokens, thought) == most
    assert MAX_TOKENS_KEPT == 1024


def test_the_form_of_a_lead_holds_every_answer() -> None:
    made: Any = led(lead(special=True, opened=True).rules, grammar_of(ASKED["json"]))
    assert '"name": "answer"' in made
