"""Grammars for one vocabulary, by llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.base.errors import InputError
from penstock.text.grammar.schema import locate

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from penstock.text.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]

COMPILED_BYTES = 160_000
COMPILED_BYTES_PER_CHAR = 130
"""What a compiled grammar takes, measured over schemas of 10 to 200 properties."""


_PLACE = re.compile(r'^at \d+\(\d+\): (invalid regex "(?s:.*)" \(in regex\): )?')
_DRAWING = re.compile(r"(\d+ )?\||[\^~ |]+$")
"""Lines that show a place in the library's own text."""


class Vocabulary(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of every token that a model can sample.

    Attributes:
        tokens: bytes by id, as many as the model has logits; empty for ids that stand for no text.
        special_ids: ids that never count as text: a grammar names them (`<[id]>`), or they do not appear.
        eos_ids: the model's end-of-sequence ids.
    """

    tokens: list[bytes]
    special_ids: list[int] = []
    eos_ids: list[int] = []

    @property
    def end_id(self) -> int:
        """An id behind the vocabulary: its bit in a mask says whether the output may end here."""
        return len(self.tokens)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> Vocabulary:
    """`vocab_size` is the model's. Raises: InputError for a tokenizer whose tokens are not bytes."""
    table = tokenizer.table
    if table is None:
        raise InputError(
            "structured_outputs need a tokenizer whose tokens are bytes, and this model's is of another kind",
            param="structured_outputs",
        )
    ends = [i for i in dict.fromkeys(eos_ids) if 0 <= i < vocab_size]
    listed = special_ids_of(tokenizer, vocab_size, ends)
    special = frozenset(listed)
    tokens = [tokenizer.id_to_piece(i).encode() if i in special else table[i] for i in range(vocab_size)]
    return Vocabulary(tokens, listed, ends)


def special_ids_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> list[int]:
    """Ids that never count as text, ascending: special tokens, added ones that look like markers, ends."""
    markers = [i for text, i in tokenizer.added_literals.items() if text[:1] in "<[" and text[-1:] in ">]"]
    return sorted({i for i in (*tokenizer.special_ids, *markers, *eos_ids) if 0 <= i < vocab_size})


def encoder_of(tokenizer: Tokenizer) -> Encode:
    """How `tokenizer` writes text in the middle of a sequence; [] where it cannot."""

    table = tokenizer.table

    def encode(text: str) -> list[int]:
        try:
            ids = tokenizer.encode_plain(text)
            # SentencePiece begins a text with a space of its own.
            exact = table is not None and b"".join([table[i] for i in ids]) == text.encode()
            return ids if exact else tokenizer.encode_inner(text)
        except InputError:
            return []

    return encode


class Compiler:
    """Makes matchers. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None = None) -> None:
        """`encode` writes text as the model is used to see it (`encoder_of`): where a grammar leaves one text only,
        its tokens are taken. Without it, the longest tokens are."""
        self.vocabulary = vocabulary
        self._tokenizer: LLTokenizer = _ll_tokenizer(vocabulary, _Spelling(vocabulary, encode))
        self._limits = _limits()

    def compile(self, grammar: str, param: str = "structured_outputs") -> LLMatcher:
        """A matcher at the beginning of `grammar` (`source.grammar_of`). Releases the GIL. Raises: InputError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            self._refuse(grammar, matcher.get_error(), param)
        return matcher

    def _refuse(self, grammar: str, error: str, param: str) -> None:
        schema = msgspec.json.decode(grammar)["grammars"][0].get("json_schema")
        where = param
        if isinstance(schema, dict):
            options = schema.pop("x-guidance", {})
            where = locate(schema, param, lambda part: self._error({**part, "x-guidance": options}))
        raise InputError(f"{where} cannot be compiled: {told(error)}", param=where)

    def _error(self, schema: Any) -> str | None:
        from llguidance import LLMatcher

        text = json.dumps({"grammars": [{"json_schema": schema}]})
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        return told(matcher.get_error()) if matcher.is_error() else None


def compiled_bytes(grammar: str) -> int:
    """About what a compiled grammar takes in memory. Units: bytes."""
    return COMPILED_BYTES + COMPILED_BYTES_PER_CHAR * len(grammar)


def told(error: str) -> str:
    """An error of the library in one line, without its insides."""
    if error.startswith("NoExtension"):
        return "nothing satisfies it"
    if "(And " in error or "(Regex" in error:
        return "unsatisfiable: its conditions exclude each other"
    if "too big" in error or "too many" in error or "TooComplex" in error or "fuel" in error:
        return "it is too complex"
    lines = [line.strip() for line in _PLACE.sub("", error.split("<state>")[0]).splitlines()]
    return (
        " ".join(line for line in lines if line and not _DRAWING.match(line))
        .replace("<non-verbose/>", "")
        .strip()[:240]
    )


def _limits() -> Any:
    from llguidance import LLParserLimits

    # A lexer state takes 1 to 2 kB, and every row may come to have its own.
    return LLParserLimits(max_lexer_states=20_000, verbose_errors=False)


class _Spelling:
    """Text as tokens that stand for nothing but text, exactly."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self._encode = encode
        self._special = frozenset(vocabulary.special_ids)
        self._tokens = vocabulary.tokens
        self._ids = {t: i for i, t in reversed(list(enumerate(self._tokens))) if t and i not in self._special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        data = text.encode("utf-8", "surrogatepass")
        if self._encode is not None:
            ids = self._encode(text)
            if self._special.isdisjoint(ids) and b"".join([self._tokens[i] for i in ids]) == data:
                return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        out: list[int] = []
        at = 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                found = self._ids.get(data[at:end])
                if found is not None:
                    out.append(found)
                    at = end
                    break
            else:
                break  # this byte cannot be written
        return out


def _ll_tokenizer(vocabulary: Vocabulary, spelling: _Spelling) -> LLTokenizer:
    from llguidance import LLTokenizer

    class Wrapper:
        """What llguidance asks of a tokenizer."""

        def __init__(self) -> None:
            self.is_tokenizer_wrapper = True
            self.eos_token_id = vocabulary.end_id
            self.bos_token_id = None
            self.tokens = [*vocabulary.tokens, b"<penstock end>"]
            self.special_token_ids = [*vocabulary.special_ids, vocabulary.end_id]

        def __call__(self, text: str) -> list[int]:
            return spelling(text)

    wrapper: Any = Wrapper()
    return LLTokenizer(wrapper, n_vocab=vocabulary.end_id + 1)
