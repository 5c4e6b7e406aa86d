"""RWKV's World vocabulary: bytes, and always the longest token that fits.

Source: Peng et al., Eagle and Finch (RWKV-5/6), arXiv 2404.05892, section "RWKV World Tokenizer".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.base.errors import ModelError
from penstock.text.coverage import Coverage
from penstock.text.piece_backend import PieceBackend
from penstock.text.token_bytes import TokenBytes, byte_level, byte_level_piece
from penstock.text.tokenizer import Tokenizer

END_OF_TEXT = 0

_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|([\\'\"nrt]))")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}


def world_tokenizer(tokens: Mapping[int, bytes], eos_id: int | None = END_OF_TEXT) -> Tokenizer:
    """The tokenizer of a World vocabulary, id -> bytes. Id 0 ends a text and has no spelling: no text encodes to it.

    Pieces are written in the byte-level alphabet (`Ġthe`). Raises: ModelError if a byte is no token, so that some text
    could not be written.
    """
    missing = set(range(256)) - {token[0] for token in tokens.values() if len(token) == 1}
    if missing:
        raise ModelError(f"the vocabulary has no token for {len(missing)} of the 256 bytes, first {min(missing)}")
    longest_match = _LongestMatch({token: i for i, token in sorted(tokens.items(), reverse=True)})
    pieces = {i: byte_level_piece(token) for i, token in tokens.items()}
    table = TokenBytes(pieces.get, byte_level)
    backend = PieceBackend(pieces, table, lambda text, *_: longest_match.encode(text.encode("utf-8")),
                           coverage=Coverage(max(map(len, tokens.values()))))  # fmt: skip
    return Tokenizer(backend, eos_ids=[] if eos_id is None else [eos_id])


def byte_tokenizer() -> Tokenizer:
    """256 tokens, each the byte of its id; nothing ends a text."""
    return world_tokenizer({byte: bytes([byte]) for byte in range(256)}, eos_id=None)


class _LongestMatch:
    def __init__(self, ids: Mapping[bytes, int]) -> None:
        self._ids = ids
        lengths: dict[bytes, set[int]] = {}
        for token in ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {head: sorted(found, reverse=True) for head, found in lengths.items()}
        """Lengths of the tokens that begin with these two bytes (or are this one), longest first."""

    def encode(self, data: bytes) -> list[int]:
        ids, lengths = self._ids, self._lengths
        out: list[int] = []
        at, end = 0, len(data)
        while at < end:
            size = 1
            for candidate in lengths.get(data[at : at + 2], ()):
                if data[at : at + candidate] in ids:
                    size = candidate
                    break
            out.append(ids[data[at : at + size]])
            at += size
        return out


def unescaped(text: str) -> bytes:
    """Bytes of a World token as GGUF files spell it: as Python's `repr` of bytes, without the quotes.

    Raises: ModelError. Source: `_set_vocab_rwkv_world` of llama.cpp's convert_hf_to_gguf.py.
    """
    plain = _ESCAPE.sub(lambda m: chr(int(m[1], 16)) if m[1] else _LETTERS.get(m[2], m[2]), text)
    if "\\" in _ESCAPE.sub("", text):
        raise ModelError(f"the token {text[:40]!r} is not spelled as bytes")
    try:
        return plain.encode("latin-1")
    except UnicodeEncodeError:
        raise ModelError(f"the token {text[:40]!r} is not spelled as bytes") from None
