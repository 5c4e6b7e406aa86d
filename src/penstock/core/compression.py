"""What a request may ask of prompt compression, and what a transform is given of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec


class PromptCompression(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The request field `prompt_compression`. Checked once, by `compress.options`, for every front end.

    Attributes:
        method: "selective-context", "llmlingua", or the baseline "random".
        rate: share of the compressible tokens that stays, above 0 and at most 1; the number is rounded up.
        target_tokens: instead of that, tokens of the whole prompt afterwards.
        context: the part of the prompt that may be compressed, word for word; it must stand there once.
        messages: in chats, indices of the messages that may be compressed (negative ones count from the end).
        keep_last: tokens at the end of the compressible part that stay; by default 64 if the request names neither
            `context` nor `messages`, so that a question at the end is safe, else 0.
        unit: what is dropped as one. selective-context (default "phrase") and random (default "token"): "token",
            "phrase" or "sentence"; llmlingua, in its first pass: "sentence" (default) or "paragraph".
        segment_tokens: llmlingua: tokens that are pruned at a time, behind what was kept before them (default 100).
        coarse: llmlingua: its first pass keeps whole units until they have this many times the tokens wanted
            (default 2; the paper's k).
        seed: random: another choice (default 0).
    """

    method: str
    rate: float | None = None
    target_tokens: int | None = None
    context: str | None = None
    messages: list[int] | None = None
    keep_last: int | None = None
    unit: str | None = None
    segment_tokens: int | None = None
    coarse: float | None = None
    seed: int | None = None


Span = tuple[int, int]
"""From the first to behind the last."""


@dataclass(frozen=True)
class ContextJob:
    """A prompt to compress. Tokens outside of `spans` stay.

    Attributes:
        ids: the whole prompt.
        texts: what each of its tokens spells; a part of a character is a replacement character.
        spans: the compressible tokens: ascending, not empty, without overlap.
        target: how many of them stay, 1 to all.
    """

    ids: Sequence[int]
    texts: Sequence[str]
    spans: Sequence[Span]
    target: int

    @property
    def num_context(self) -> int:
        """Compressible tokens."""
        return sum(end - start for start, end in self.spans)

    def context(self) -> Iterator[int]:
        """Places of the compressible tokens, in order."""
        for start, end in self.spans:
            yield from range(start, end)
