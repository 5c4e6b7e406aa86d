"""SentencePiece's compiled normalisation rules: replace the longest prefix that a rule knows, again and again.

`tokenizers` has these rules too, but looks at grapheme clusters and takes a rule only if it covers a whole cluster of
fewer than six bytes, or else a whole character; SentencePiece, which is the definition, knows no clusters.

Source: `normalizer.cc` of github.com/google/sentencepiece. The rules are a double-array trie as darts-clone stores it
(github.com/s-yata/darts-clone, `darts.h`), of units of 32 bits, in front of replacements that end with a NUL.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from penstock.base.errors import ModelError

_MAX_REPLACEMENT_BYTES = 1024
_MAX_KEPT = 1 << 16


class Charsmap:
    """Rules of one vocabulary. Raises: ModelError if they are broken, at once or where a text first needs them."""

    def __init__(self, blob: bytes) -> None:
        size = int.from_bytes(blob[:4], "little")
        if len(blob) < 8 or size % 4 or not 4 <= size < len(blob) - 3:
            raise ModelError("the normalisation rules are broken: their index is longer than they are")
        self._units = struct.unpack_from(f"<{size // 4}I", blob, 4)
        self._replacements = blob[4 + size :]
        self._kept: dict[bytes, str] = {}
        """Characters with which no rule begins."""

    def prefixes(self, text: str) -> Iterator[str]:
        """The normalised text, in the parts that rules and single characters make."""
        data = text.encode("utf-8")
        at, end = 0, len(data)
        while at < end:
            size = _char_bytes(data[at])
            char = data[at : at + size]
            kept = self._kept.get(char)
            if kept is not None:
                at += size
                yield kept
                continue
            length, value, stopped = self._longest(data, at)
            out = self._replacement(value) if length else char.decode("utf-8", "replace")
            if not length and stopped < at + size and len(self._kept) < _MAX_KEPT:
                self._kept[char] = out
            at += length or size
            yield out

    def _longest(self, data: bytes, start: int) -> tuple[int, int, int]:
        """(bytes of the longest rule that fits, 0 if none; its value; the byte at which the search ended)."""
        units = self._units
        length = value = 0
        try:
            node = _offset(units[0])
            for at in range(start, len(data)):
                node ^= data[at]
                unit = units[node]
                if unit & 0x800000FF != data[at]:
                    return length, value, at
                node ^= _offset(unit)
                if unit >> 8 & 1:
                    length, value = at + 1 - start, units[node] & 0x7FFFFFFF
        except IndexError:
            raise ModelError("the normalisation rules are broken: they point outside of their index") from None
        return length, value, len(data)

    def _replacement(self, value: int) -> str:
        end = self._replacements.find(b"\0", value, value + _MAX_REPLACEMENT_BYTES)
        if end < 0:
            raise ModelError("the normalisation rules are broken: a replacement does not end")
        return self._replacements[value:end].decode("utf-8", "replace")


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)


def _char_bytes(lead: int) -> int:
    """Bytes of a UTF-8 character that begins so; 1 for a byte that begins none."""
    return 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
