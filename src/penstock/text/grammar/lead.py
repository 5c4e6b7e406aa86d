"""What comes before an answer that a grammar binds: a thought, which is free, up to the mark that ends it.

The answer's grammar begins right behind the mark. The output may not end before: the answer would be missing. So it
would be behind a thought that takes all tokens: a share of them is kept for the answer (`tokens_to_think`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from penstock.core.sampling import Thought
from penstock.text.grammar.compile import special_ids_of
from penstock.text.grammar.source import lark_literal

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

MAX_TOKENS_KEPT = 1024
"""For an answer behind a thought; of a few tokens, half of them are."""


class Lead(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    rules: Lark, with `@answer` where the answer's grammar goes.
    thought: what a rank needs to end the thought in time; None: it never does.
    """

    rules: str
    thought: Thought | None = None


def thought_lead(
    tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int], opening: str, closing: str, *, opened: bool
) -> Lead:
    """A thought between two marks. `opened`: the prompt ends inside it; otherwise the model may open one, or answer
    at once. Marks that are tokens of their own count as well as marks that are spelled, as they do for a reader."""
    ends = frozenset(eos_ids)
    special = [i for i in special_ids_of(tokenizer, vocab_size, ends) if i not in ends]
    literals = {text: i for text, i in tokenizer.added_literals.items() if i in set(special)}
    close_id = literals.get(closing)
    others = [i for i in special if i != close_id]
    regex = "".join(f"\\x{{{ord(char):x}}}" for char in closing)
    end = "closing" if close_id is None else f"(TEXT? <[{close_id}]> | closing)"
    lines = [
        "start: thought @answer" if opened else f"start: ({_mark(opening, literals)} thought)? @answer",
        f"thought: (TEXT? <[{_ranges(others)}]>)* {end}" if others else f"thought: {end}",
        rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{regex}(.|\n)*/",
        rf"closing[lazy]: /(.|\n)*{regex}/",
    ]
    ids = tokenizer.encode_inner(closing) if close_id is None else [close_id]
    thought = Thought(opening="" if opened else opening, close=closing, closing=ids) if ids else None
    return Lead(rules="\n".join(lines) + "\n", thought=thought)


def led(rules: str, grammar: str) -> str:
    """llguidance's form of `grammar` (itself in that form) behind `rules`."""
    answer, *others = json.loads(grammar)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**answer, "name": "answer"}, *others]})


def tokens_to_think(max_tokens: int, thought: Thought) -> int:
    """Of `max_tokens`, how many a thought may take before it is ended."""
    left = max(0, max_tokens - len(thought.closing))
    return left - min((left + 1) // 2, MAX_TOKENS_KEPT)


def _mark(text: str, literals: dict[str, int]) -> str:
    """A mark as operands of Lark: what of it is a token of its own, and what is text."""
    for literal in sorted(literals, key=len, reverse=True):
        before, found, after = text.partition(literal)
        if found:
            return " ".join(filter(None, (_mark(before, literals), f"<[{literals[literal]}]>", _mark(after, literals))))
    return lark_literal(text) if text else ""


def _ranges(ids: Sequence[int]) -> str:
    """`3-5,9` of ascending ids."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)
