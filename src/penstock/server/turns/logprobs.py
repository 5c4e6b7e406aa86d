"""Log-probabilities in the shapes of completions, chat completions and vLLM's prompt_logprobs, as JSON.

They are written as they come, a token at a time, and kept as bytes: as objects, those of one answer with many samples
would take gigabytes, and writing them at its end seconds in which the event loop does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from penstock.core.batch import TokenLogprobs

if TYPE_CHECKING:
    from penstock.server.context import Server
    from penstock.text.places import TokenPlaces
    from penstock.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have (vLLM's number)."""
MAX_TOKENS = 16_384
"""Tokens whose texts are kept, about 8 MB of them; beyond that they are made anew."""


@dataclass(frozen=True)
class Written:
    """A token's text, and as JSON: the text, and what stands before and behind its number in a chat completion."""

    text: str
    key: bytes
    before: bytes
    behind: bytes


class TokenTexts:
    """What tokens are called in answers: their texts, or "token_id:123". One of each kind serves all requests."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self.as_ids = as_ids or tokenizer is None
        self._known: dict[int, Written] = {}

    @classmethod
    def of(cls, server: Server, as_ids: bool | None) -> TokenTexts:
        name = "token_ids" if as_ids else "token_texts"
        found = server.parts.get(name)
        if found is None:
            found = server.parts[name] = cls(server.service.tokenizer, as_ids=bool(as_ids))
        return found

    def __getitem__(self, token_id: int) -> Written:
        found = self._known.get(token_id)
        if found is None:
            if len(self._known) >= MAX_TOKENS:
                self._known.clear()
            found = self._known[token_id] = self._write(token_id)
        return found

    def decoded(self, token_id: int) -> bytes:
        """The text as JSON; null without a tokenizer."""
        return b"null" if self._tokenizer is None else self[token_id].key

    def _write(self, token_id: int) -> Written:
        if self.as_ids:
            text = name_of(token_id)
        else:
            assert self._tokenizer is not None
            text = self._tokenizer.token_text(token_id)
        table = None if self._tokenizer is None else self._tokenizer.table
        data = None if table is None else table[token_id]
        listed = list(text.encode("utf-8", "replace") if data is None else data)
        key = msgspec.json.encode(text)
        return Written(text, key, b'{"token":' + key + b',"logprob":', b',"bytes":' + msgspec.json.encode(listed))


def name_of(token_id: int) -> str:
    """A name that no other token has (vLLM's)."""
    return f"token_id:{token_id}"


def _number(value: float) -> bytes:
    return repr(max(float(value), LOWEST)).encode()  # float(): NumPy's own say what they are


@dataclass
class Columns:
    """Logprobs of a completion as its four lists, each as JSON without its brackets.

    `follows`: whether they stand behind others, so that a comma comes first.
    """

    tokens: bytearray = field(default_factory=bytearray)
    token_logprobs: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)
    text_offset: bytearray = field(default_factory=bytearray)
    follows: bool = False

    def parts(self) -> list[bytearray]:
        return [self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset]

    def add(self, token: bytes, logprob: bytes, top: bytes, offset: int) -> None:
        comma = b"," if self.tokens or self.follows else b""
        self.tokens += comma + token
        self.token_logprobs += comma + logprob
        self.top_logprobs += comma + top
        self.text_offset += b"%b%d" % (comma, offset)

    @staticmethod
    def object(tokens: bytes, token_logprobs: bytes, top_logprobs: bytes, text_offset: bytes) -> bytes:
        """CompletionLogprobs of four lists, as `parts` orders them."""
        head = b'{"tokens":[%b],"token_logprobs":[%b]' % (tokens, token_logprobs)
        return head + b',"top_logprobs":[%b],"text_offset":[%b]}' % (top_logprobs, text_offset)


class LogprobWriter:
    """One per request. `top`: how many alternatives were asked for; -1: all."""

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = None if top < 0 else top

    def chat(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> bytes:
        """The elements of `logprobs.content`, commas between them."""
        return b",".join(self._chat(i, entry) for i, entry in zip(token_ids, entries, strict=True))

    def _chat(self, token_id: int, entry: TokenLogprobs) -> bytes:
        texts = self._texts
        best = []
        for i, logprob in islice(zip(entry.top_ids, entry.top_logprobs, strict=True), self._top):
            top = texts[i]
            best.append(top.before + _number(logprob) + top.behind + b"}")
        own = texts[token_id]
        head = own.before + _number(entry.logprob) + own.behind
        return head + b',"top_logprobs":[' + b",".join(best) + b"]}"

    def completion(
        self, out: Columns, token_ids: Iterable[int], entries: Iterable[TokenLogprobs | None],
        places: TokenPlaces | None,
    ) -> None:  # fmt: skip
        """Add to `out`. An entry of None (a prompt's first token) has no number. `places`: None without a text."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            own, offset = self._texts[token_id], 0
            key = own.key
            if places is not None:
                offset, name = places.next(token_id)
                if not self._texts.as_ids and name != own.text:
                    key = msgspec.json.encode(name)
            if entry is None:
                out.add(key, b"null", b"null", offset)
            else:
                out.add(key, _number(entry.logprob), self._top_object(token_id, key, entry), offset)

    def _top_object(self, token_id: int, key: bytes, entry: TokenLogprobs) -> bytes:
        """The chosen token has the key `key`; among others of equal text the likeliest has it as a key."""
        top: dict[bytes, bytes] = {}
        for i, logprob in islice(zip(entry.top_ids, entry.top_logprobs, strict=True), self._top):
            name = key if i == token_id else self._texts[i].key
            if name in top or (name == key and i != token_id):
                name = msgspec.json.encode(name_of(i))
            top[name] = _number(logprob)
        # As at OpenAI, the chosen token is always there, beside the likeliest.
        top.setdefault(key, _number(entry.logprob))
        return b"{" + b",".join([name + b":" + number for name, number in top.items()]) + b"}"


def prompt_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs | None]) -> Iterator[bytes]:
    """vLLM's shape, element by element: one object per prompt token, keyed by token id; commas are the caller's."""
    for entry in entries:
        if entry is None:
            yield b"null"
            continue
        ranked = list(zip(entry.top_ids, entry.top_logprobs, range(1, len(entry.top_ids) + 1), strict=True))
        if entry.token_id not in entry.top_ids:
            ranked.append((entry.token_id, entry.logprob, entry.rank))
        shown = [
            b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}' % (i, _number(logprob), rank, texts.decoded(i))
            for i, logprob, rank in ranked
        ]
        yield b"{" + b",".join(shown) + b"}"
