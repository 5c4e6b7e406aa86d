"""How much of a text one token can stand for: a lower bound of a text's tokens that costs no encoding.

A vocabulary says it only where every part of a text has to appear in some token. Components that may delete or fuse
text (stripping normalisers, splits that drop what they match, unknown tokens that stand for whole stretches) leave it
unknown; then nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import models

from penstock.text.token_bytes import byte_level_piece

_STRIDE = 1 << 16
"""Characters that are looked at in one go: the interpreter's lock is free in between."""
_SHRINKS = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
"""Normaliser -> times that a stretch of text can be longer than what becomes of it, in characters and in bytes."""
_KEEPING = frozenset(("ByteLevel", "Digits", "Metaspace", "UnicodeScripts"))
"""Pre-tokenisers that only cut, or replace one character by another."""
_BYTES = [f"<0x{value:02X}>" for value in range(256)]


@dataclass(frozen=True)
class Coverage:
    """What of a text one token covers at most.

    Attributes:
        longest: bytes of UTF-8, or characters if not `in_bytes`.
        uncounted: bytes that the vocabulary cannot write, so that none may come of them.
        swallowing: texts of added tokens that take in the white space beside them. Where a text holds one, no bound is
            known.
    """

    longest: int
    in_bytes: bool = True
    uncounted: bytes = b""
    swallowing: tuple[str, ...] = ()

    def at_least(self, text: str, enough: int) -> int:
        """Tokens that `text` certainly has if these are `enough` or more, else 0. Lone surrogates do no harm."""
        covered, wanted = 0, self.longest * enough
        if len(text) * (4 if self.in_bytes else 1) < wanted:
            return 0  # without a look at it
        if not self.in_bytes:
            covered = len(text)
        else:
            for at in range(0, len(text), _STRIDE):
                covered += len(text[at : at + _STRIDE].encode("utf-8", "replace").translate(None, self.uncounted))
                if covered > 2 * wanted:
                    break
        if covered < wanted or any(literal in text for literal in self.swallowing):
            return 0
        return -(-covered // self.longest)


def coverage_of(backend: Any) -> Coverage | None:
    """Of a `tokenizers.Tokenizer`; None where nothing is known."""
    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout:
        return None
    shrinks = _shrinks(_state(backend.normalizer))
    splits = _state(backend.pre_tokenizer)
    if shrinks is None or not _keeps(splits):
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    added = list(backend.get_added_tokens_decoder().values())
    in_bytes = "ByteLevel" in {part["type"] for part in (*_parts(_state(backend.normalizer)), *_parts(splits))}
    uncounted = b""
    if in_bytes:
        uncounted = bytes(b for b in range(256) if byte_level_piece(bytes([b])) not in vocab)
    elif not (model.byte_fallback and all(piece in vocab for piece in _BYTES)):
        return None
    literals = [token.content for token in added]
    swallowing = tuple(token.content for token in added if token.lstrip or token.rstrip)
    return Coverage(_longest(vocab, literals, in_bytes) * shrinks, in_bytes, uncounted, swallowing)


def _longest(pieces: Iterable[str], literals: Iterable[str], in_bytes: bool) -> int:
    """A piece of the byte-level alphabet has a character per byte; literals are plain text."""
    written = (len(text.encode("utf-8", "replace")) if in_bytes else len(text) for text in literals)
    return max(max(map(len, pieces), default=1), max(written, default=1), 1)


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _parts(state: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A component, or those of a sequence."""
    if state is None:
        return []
    inner = state.get("normalizers", state.get("pretokenizers"))
    return [state] if inner is None else [part for one in inner for part in _parts(one)]


def _shrinks(state: Mapping[str, Any] | None) -> int | None:
    """Times that a text can be longer than its normal form; None: unknown."""
    times = 1
    for part in _parts(state):
        if part["type"] == "Replace":
            old, new = part.get("pattern", {}).get("String"), part.get("content", "")
            if old is None or len(new) < len(old) or len(new.encode()) < len(old.encode()):
                return None
        elif part["type"] in _SHRINKS:
            times *= _SHRINKS[part["type"]]
        else:
            return None
    return times


def _keeps(state: Mapping[str, Any] | None) -> bool:
    """Whether cutting leaves everything in place."""
    for part in _parts(state):
        drops = part.get("behavior", "Removed") == "Removed" if part["type"] in ("Split", "Punctuation") else False
        if drops or not (part["type"] in _KEEPING or part["type"] in ("Split", "Punctuation")):
            return False
    return True
