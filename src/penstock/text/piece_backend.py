"""Our own encoders behind the face of a `tokenizers.Tokenizer`, as far as `Tokenizer` looks at it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tokenizers import AddedToken

from penstock.base.errors import ModelError, UnsupportedError
from penstock.text.coverage import Coverage
from penstock.text.token_bytes import TokenBytes

_WHITESPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and not "\x1c" <= c <= "\x1f")
"""Unicode's White_Space, as `tokenizers` has it; Python adds four control characters."""
_SPACES = re.compile(f"[{_WHITESPACE}]*")

EncodeText = Callable[[str, bool, bool], list[int]]
"""(text, whether it continues another, whether literals of user-defined tokens count) -> ids."""


class Literals:
    """Texts to be found in others, with their ids."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = dict(ids)
        self._lengths = sorted({len(text) for text in self.ids}, reverse=True)
        firsts = "".join(sorted({re.escape(text[0]) for text in self.ids}))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of every one: leftmost, then longest, as `tokenizers` and SentencePiece find them."""
        at = 0
        while self._first is not None and (match := self._first.search(text, at)):
            start = match.start()
            size = next((n for n in self._lengths if text[start : start + n] in self.ids), 0)
            if size:
                yield start, start + size, self.ids[text[start : start + size]]
            at = start + max(size, 1)

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """`text` in parts: literals with their ids, and what lies between them (never empty) with None."""
        at = 0
        for start, end, token_id in self.find(text):
            if start > at:
                yield text[at:start], None
            yield text[start:end], token_id
            at = end
        if at < len(text):
            yield text[at:], None


@dataclass
class Encoding:
    ids: list[int]
    offsets: list[tuple[int, int]] = field(default_factory=list)


class PieceBackend:
    """A vocabulary and a function that encodes plain text; texts of special tokens are looked for here.

    Attributes:
        table: ids as bytes.
        coverage: as `Tokenizer`'s.
        unknown_id: what stands for text that cannot be written otherwise, or None.
        decoder, normalizer: None; decoding is `table`'s, and literals are only looked for in the text as written.
    """

    decoder = None
    normalizer = None

    def __init__(
        self,
        pieces: Mapping[int, str],
        table: TokenBytes,
        encode_text: EncodeText,
        *,
        special: Mapping[int, AddedToken] | None = None,
        user_defined: Mapping[int, str] | None = None,
        unknown_id: int | None = None,
        continues_after_special: bool = False,
        coverage: Coverage | None = None,
    ) -> None:
        """`special` are found in texts and never come of anything else; the pieces of `user_defined` are the
        encoder's own business. `continues_after_special`: text behind a special token counts as continued."""
        self.table = table
        self.coverage = coverage
        self.unknown_id = unknown_id
        self._pieces = dict(pieces)
        self._ids: dict[str, int] = {}
        for token_id, piece in sorted(self._pieces.items()):
            self._ids.setdefault(piece, token_id)
        self._special = dict(special or {})
        self._user_defined = dict(user_defined or {})
        self._encode_text = encode_text
        self._continues = continues_after_special
        self._literals = Literals({token.content: token_id for token_id, token in self._special.items()})

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        user = {i: AddedToken(text, special=False, normalized=False) for i, text in self._user_defined.items()}
        return user | self._special

    def ids(self) -> set[int]:
        return self._pieces.keys() | self._special.keys()

    def id_to_token(self, token_id: int) -> str | None:
        return self._pieces.get(token_id)

    def token_to_id(self, piece: str) -> int | None:
        return self._ids.get(piece)

    def without_added(self) -> PieceBackend:
        """The same encoder, blind to literals of special and user-defined tokens."""
        return PieceBackend(
            self._pieces, self.table, lambda text, inner, _: self._encode_text(text, inner, False),
            unknown_id=self.unknown_id,
        )  # fmt: skip

    def encode(self, text: str, add_special_tokens: bool = False) -> Encoding:
        return Encoding(self._encode(text, False))

    def encode_inner(self, text: str) -> list[int]:
        """Ids of a text that continues another."""
        return self._encode(text, True)

    def _encode(self, text: str, inner: bool) -> list[int]:
        ids: list[int] = []
        at = 0
        for start, end, token_id in self._literals.find(text):
            token = self._special[token_id]
            before = text[at:start].rstrip(_WHITESPACE) if token.lstrip else text[at:start]
            if before:
                ids += self._encode_text(before, inner, True)
            ids.append(token_id)
            inner = self._continues
            at = _SPACES.match(text, end).end() if token.rstrip else end  # type: ignore[union-attr]
        if at < len(text):
            ids += self._encode_text(text[at:], inner, True)
        return ids


def added_tokens(entries: object) -> dict[int, AddedToken]:
    """`added_tokens_decoder` of a tokenizer_config.json. Raises: ModelError, UnsupportedError."""
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        raise ModelError("added_tokens_decoder must be an object from ids to tokens")
    out: dict[int, AddedToken] = {}
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, Mapping) else None
        known = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 8
        if not known or not isinstance(entry, Mapping) or not isinstance(content, str) or not content:
            raise ModelError(f"added_tokens_decoder has an entry that is no token: {str(key)[:40]!r}")
        if entry.get("single_word"):
            raise UnsupportedError(f"the token {content[:40]!r} counts only as a single word, which is not supported")
        flags = {name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "special")}
        out[int(key)] = AddedToken(content, normalized=False, **flags)
    return out
