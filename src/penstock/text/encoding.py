"""Encoding in steps that are small until it is certain that a text is worth encoding whole.

A text that certainly has more tokens than may be asked for is refused: by its vocabulary's coverage at no cost, else
by the tokens of pieces that are encoded apart and thrown away. What is returned is always of the whole text encoded
at once. The generators here yield, before each step, its size in characters; whoever drives them may stop there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from penstock.base.errors import InputError
from penstock.text.coverage import Coverage

T = TypeVar("T")
Steps = Generator[int, None, T]

TOO_LONG = "context_length_exceeded"
"""OpenAI's code, which clients look for to shorten and try again."""
PIECE_CHARS = 1 << 16
CUT_TOKENS = 256
"""Tokens by which cutting a text once may raise its count: far more than a word has."""
MAX_TEXT_BYTES = 4 << 20
"""Longest text that is encoded whole, in UTF-8, unless the most tokens are so many that ordinary text is longer."""
ORDINARY_BYTES = 8
"""Bytes of ordinary text per token, at most."""
NO_LIMIT = 1 << 40
"""Tokens that no text has."""


class TooManyTokens(Exception):
    """`at_least`: tokens that the text certainly has, or just has if `exact`.

    `before`: tokens of the texts before it; `param`: its name.
    """

    def __init__(self, at_least: int, *, exact: bool = False, before: int = 0, param: str = "") -> None:
        super().__init__(f"{'' if exact else 'at least '}{at_least} tokens")
        self.at_least, self.exact, self.before, self.param = at_least, exact, before, param


class Encoder(Protocol):
    """What is needed of a tokenizer. `coverage`: None if nothing is known of it."""

    coverage: Coverage | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def count(self, text: str) -> int: ...


def run(steps: Steps[T]) -> T:
    """All steps, one after the other."""
    try:
        while True:
            next(steps)
    except StopIteration as ended:
        result: T = ended.value
        return result


def one_step(size: int, work: Callable[..., T], *args: Any, **kwargs: Any) -> Steps[T]:
    """`work(*args, **kwargs)` as the only step."""
    yield size
    return work(*args, **kwargs)


def max_text_bytes(most: int) -> int:
    """Longest text that is encoded whole where `most` tokens are possible."""
    return max(MAX_TEXT_BYTES, ORDINARY_BYTES * most)


def encode_steps(tokenizer: Encoder, text: str, most: int, add_special_tokens: bool = True) -> Steps[list[int]]:
    """`tokenizer.encode(text, add_special_tokens)`. Raises: TooManyTokens for more than `most`, InputError."""
    yield from bounded(tokenizer, text, most)
    yield len(text)
    return checked(tokenizer.encode(text, add_special_tokens), most)


def checked(ids: list[int], most: int) -> list[int]:
    """`ids`. Raises: TooManyTokens if these are more than `most`."""
    if len(ids) > most:
        raise TooManyTokens(len(ids), exact=True)
    return ids


def bounded(tokenizer: Encoder, text: str, most: int) -> Steps[None]:
    """Raises TooManyTokens if it can be shown that `text` has more than `most` tokens, InputError if it is so long
    that it could not be encoded at all. Works no longer than encoding a text of `most` tokens takes."""
    _unseen(tokenizer, text, most)
    if len(text) > max_text_bytes(most) // 4:
        yield len(text) // 16  # only a look at it
        size = len(text.encode("utf-8", "replace"))
        if size > max_text_bytes(most):
            raise InputError(f"the text has {size} bytes; at most {max_text_bytes(most)} can be encoded", code=TOO_LONG)
    if len(text) > max(PIECE_CHARS, 4 * most):
        yield from _by_pieces(tokenizer, text, most)


def _unseen(tokenizer: Encoder, text: str, most: int) -> None:
    """Raises TooManyTokens if the vocabulary's coverage shows it."""
    if tokenizer.coverage is not None:
        certain = tokenizer.coverage.at_least(text, most + 1)
        if certain > most:
            raise TooManyTokens(certain)


def _by_pieces(tokenizer: Encoder, text: str, most: int) -> Steps[None]:
    """An eighth, and what cutting can add, is left to vocabularies that encode a part otherwise than the whole."""
    certain, coverage = 0, tokenizer.coverage
    strips = coverage is None or bool(coverage.swallowing)  # white space may vanish beside what comes behind it
    for at in range(0, len(text), PIECE_CHARS):
        piece = text[at : at + PIECE_CHARS]
        yield len(piece)
        certain += max(0, tokenizer.count(piece.strip() if strips else piece) - CUT_TOKENS)
        if certain > most + most // 8:
            raise TooManyTokens(certain)


def encode_all_steps(
    tokenizer: Encoder, texts: Sequence[str], params: Sequence[str], most: int, in_all: int,
    add_special_tokens: bool = True,
) -> Steps[list[list[int]]]:  # fmt: skip
    """As `encode_steps` for each text, as long as they have at most `in_all` tokens together; short ones share a step.

    `params`: how errors call them.
    """
    out: list[list[int]] = []
    shared = num = 0
    for i, (text, param) in enumerate(zip(texts, params, strict=True)):
        room = min(most, in_all - num)
        try:
            if len(text) > PIECE_CHARS:
                shared = 0
                out.append((yield from encode_steps(tokenizer, text, room, add_special_tokens)))
            else:
                _unseen(tokenizer, text, room)
                if shared < len(text):
                    shared = _together(texts, i)
                    yield shared
                shared -= len(text)
                out.append(checked(tokenizer.encode(text, add_special_tokens), room))
        except TooManyTokens as error:
            raise TooManyTokens(error.at_least, exact=error.exact, before=num, param=param) from None
        except InputError as error:
            raise InputError(str(error), param=param, code=error.code) from None
        num += len(out[-1])
    return out


def _together(texts: Sequence[str], first: int) -> int:
    """Characters of the texts from `first` on that fit one piece."""
    size = 0
    for text in texts[first:]:
        if size + len(text) > PIECE_CHARS:
            break
        size += len(text)
    return size
