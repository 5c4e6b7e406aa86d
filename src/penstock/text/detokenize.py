"""Ids that arrive a few at a time, as text that never has to be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.text.token_bytes import ByteStream
from penstock.text.tokenizer import Tokenizer

_PROMPT_TAIL = 6
"""Prompt tokens that can matter for the first generated text: a UTF-8 character has four bytes at most."""

_MAX_HELD = 64
"""Tokens the window stream waits for a character to complete before it lets the replacement character go."""


class IncrementalDetokenizer:
    """Text of one growing sequence. The deltas and `flush` together are `tokenizer.decode` of all ids.

    Costs are linear in the number of tokens, however they are split over calls. With `prompt_ids` the text continues
    the prompt's: a first generated token that begins with a space keeps it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream: ByteStream | WindowStream
        if tokenizer.table is not None:
            self._stream = tokenizer.table.stream()
        else:
            self._stream = WindowStream(
                lambda ids: tokenizer.decode(ids, skip_special_tokens, spaces_between_special_tokens)
            )
        tail = tokenizer.visible(prompt_ids[-_PROMPT_TAIL:], self._skip)
        if tail:
            self._stream.feed(tail)

    def add(self, ids: Iterable[int]) -> str:
        """Text that `ids` add; may be "" while a character is incomplete."""
        kept = self._tokenizer.visible(ids, self._skip)
        return self._stream.feed(kept) if kept else ""

    def add_one(self, token_id: int) -> str:
        """`add([token_id])`, for the newest token of every step."""
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        return self._stream.feed((token_id,))

    def skips(self, token_id: int) -> bool:
        """Whether the text never shows this token."""
        return self._skip and token_id in self._tokenizer.special_ids

    def flush(self) -> str:
        """The rest: incomplete bytes become replacement characters. Nothing may be added afterwards."""
        return self._stream.finish()


class WindowStream:
    """Streams any decoder by decoding a short window twice, with and without the newest tokens.

    For decoders that are not a table of bytes (WordPiece, no decoder at all). The window holds the tokens of the last
    piece of text as context, so a decoder that treats the first token of a text differently does so in both readings.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0
        """Tokens of the window whose text has been given out."""

    def feed(self, ids: Iterable[int]) -> str:
        out = ""
        for token_id in ids:
            self._ids.append(token_id)
            new = self._rest()
            if (new and not new.endswith("\ufffd")) or len(self._ids) - self._read >= _MAX_HELD:
                out += new
                # The first window has no context to drop: it begins where the text begins.
                self._ids = self._ids[self._read :]
                self._read = len(self._ids)
        return out

    def finish(self) -> str:
        rest = self._rest()
        self._ids, self._read = [], 0
        return rest

    def _rest(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]
