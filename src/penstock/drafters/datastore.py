"""The file that `penstock datastore` writes and the drafter `rest` maps: tokens of texts, and their suffix array.

Layout, little-endian: 128 bytes of header (magic, version, vocabulary, number of tokens, fingerprint of the tokenizer,
SHA-256 of all that follows it), tokens int32 [n], suffixes int32 [n]. `SEPARATOR` ends every text. Suffixes are in the
order of their first `ORDERED` tokens, and that is as far as anybody looks.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError, InputError, ModelError
from penstock.formats.files import file_size, quoted, unreadable

I32 = npt.NDArray[np.int32]

MAGIC = b"PSTREST\x00"
VERSION = 1
SEPARATOR = -1
ORDERED = 16
MAX_TOKENS = 2**31 - 1
_HEADER = struct.Struct("<8sIIQ32s32s40x")
_PART_BYTES = 8 << 20
_PROBE = (
    "The quick brown fox didn't jump: 1,234.5 km + 67% of £89; naïve Straße, Привет мир, 日本語, مرحبا, 🙂👍🏽\n\n"
    'def f(x_1, *args):\n\treturn {\'key\': [x_1 ** 2, None], "b": 0x1F}  # TODO\n    <p class="a">&amp;</p>\r\n'
    "internationalisation unbelievably  two  spaces   three ABCdefGHI camelCase snake_case https://a.b/c?d=e&f#g"
)


class Datastore(NamedTuple):
    """`tokens` [n] and `suffixes` [n], mapped; starts[t] ... starts[t + 1]: the suffixes whose first token is t."""

    tokens: I32
    suffixes: I32
    starts: list[int]

    def find(self, pattern: Sequence[int]) -> tuple[int, int]:
        """The range of suffixes that begin with `pattern`, of 1 to `ORDERED` tokens; (0, 0): none."""
        first, wanted = pattern[0], list(pattern[1:])
        if not 0 <= first < len(self.starts) - 1:
            return 0, 0
        low, end = self.starts[first], self.starts[first + 1]
        if not wanted:
            return low, end
        low = self._bound(low, end, wanted, after=False)
        if low == end or self._at(low, len(wanted)) != wanted:
            return 0, 0
        step = 1  # most patterns are rare: their end is near
        while low + step < end and self._at(low + step, len(wanted)) == wanted:
            step *= 2
        return low, self._bound(low + step // 2, min(low + step, end), wanted, after=True)

    def _bound(self, low: int, high: int, wanted: list[int], *, after: bool) -> int:
        """The first place in [low, high) that does not sort before `wanted`; `after`: that sorts behind it."""
        while low < high:
            middle = (low + high) // 2
            found = self._at(middle, len(wanted))
            if found < wanted or (after and found == wanted):
                low = middle + 1
            else:
                high = middle
        return low

    def _at(self, place: int, count: int) -> list[int]:
        begin = int(self.suffixes[place]) + 1
        found: list[int] = self.tokens[begin : begin + count].tolist()
        return found

    def follow(self, place: int, skipped: int, count: int) -> list[int]:
        """At most `count` tokens behind the first `skipped` of a suffix, within its text."""
        begin = int(self.suffixes[place]) + skipped
        found: list[int] = self.tokens[begin : begin + count].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found


def fingerprint(encode: Callable[[str], list[int]]) -> bytes:
    """32 bytes that tell tokenizers apart: what they make of one text with something of everything in it."""
    return hashlib.sha256(np.array(encode(_PROBE), "<i4").tobytes()).digest()


def suffix_array(tokens: I32) -> I32:
    """Suffixes of `tokens` [n] (SEPARATOR allowed) in the order of their first `ORDERED` tokens, equal ones as they
    stand. Source: Manber and Myers (1993), prefix doubling."""
    ranks = tokens.astype(np.int64) - SEPARATOR + 1
    order = np.argsort(ranks, kind="stable")
    known = 1
    while known < ORDERED:
        behind = np.zeros_like(ranks)
        behind[: max(len(ranks) - known, 0)] = ranks[known:]
        keys = ranks * (int(ranks.max(initial=0)) + 1) + behind
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        steps = np.concatenate([[1], ordered[1:] != ordered[:-1]])[: len(ordered)]
        ranks[order] = np.cumsum(steps)
        known *= 2
    return order.astype(np.int32)


def write(path: Path, texts: Iterable[Sequence[int]], vocab_size: int, mark: bytes) -> int:
    """Write the datastore of `texts` (token ids); `mark`: `fingerprint` of their tokenizer. Returns how many tokens.

    Raises InputError if there are none or too many, ModelError if the file cannot be written; it then stays as it was.
    """
    parts = [np.array([*text, SEPARATOR], np.int32) for text in texts if len(text)]
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise InputError(f"a datastore has 1 to {MAX_TOKENS} tokens, these texts have {len(tokens)}", param="text")
    body = tokens.astype("<i4").tobytes() + suffix_array(tokens).astype("<i4").tobytes()
    head = _HEADER.pack(MAGIC, VERSION, vocab_size, len(tokens), mark, hashlib.sha256(body).digest())
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(head)
            file.write(body)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ModelError(f"cannot write {quoted(path)}: {error.strerror or error}") from error
    return len(tokens)


def read(path: Path, vocab_size: int, mark: bytes | None) -> Datastore:
    """Map a datastore. `mark`: fingerprint of the model's tokenizer; None: it has none, and the vocabulary decides.

    Raises ConfigError, in one sentence, if it is missing, broken or of another tokenizer. Reads the file once.
    """
    try:
        size = file_size(path)
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size or not head.startswith(MAGIC):
                raise _refused(path, "is no datastore")
            _, version, own_vocab, count, own_mark, digest = _HEADER.unpack(head)
            if version != VERSION:
                raise _refused(path, f"has version {version} of the format, {VERSION} is read")
            if own_vocab != vocab_size or mark not in (None, own_mark):
                raise _refused(path, "was made with another tokenizer than this model's")
            if not 0 < count <= MAX_TOKENS or size != _HEADER.size + 8 * count:
                raise _refused(path, f"is damaged: {size} bytes do not hold {count} tokens")
            found = hashlib.sha256()
            while data := file.read(_PART_BYTES):
                found.update(data)
    except ModelError as error:
        raise ConfigError(f"speculative_config: datastore: {error}", field="speculative_config") from None
    except OSError as error:
        message = f"speculative_config: datastore: {unreadable(path, error)}"
        raise ConfigError(message, field="speculative_config") from None
    if found.digest() != digest:
        raise _refused(path, "is damaged: its checksum does not fit")
    both = np.memmap(path, "<i4", mode="r", offset=_HEADER.size, shape=(2, count))
    tokens, suffixes = np.asarray(both[0]), np.asarray(both[1])
    if tokens.min() < SEPARATOR or tokens.max() >= vocab_size or suffixes.min() < 0 or suffixes.max() >= count:
        raise _refused(path, "is damaged: it names tokens or places that do not exist")
    counts = np.bincount(tokens + 1, minlength=vocab_size + 1)
    return Datastore(tokens, suffixes, np.cumsum(counts).tolist())


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"speculative_config: datastore: {quoted(path)} {why}; make one with `penstock datastore build`",
        field="speculative_config",
    )
