"""What a request asks of prompt compression: checked, and turned into numbers of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ConfigError, InputError
from penstock.compress import CONTEXT_TRANSFORMS
from penstock.core.compression import PromptCompression
from penstock.core.protocols import ContextTransform

KEEP_LAST = 64
MAX_SEGMENT_TOKENS = 1024
MAX_COARSE = 100.0
_FIELD = "prompt_compression"


def read_options(given: PromptCompression | Mapping[str, Any]) -> PromptCompression:
    """As an object of a request, or made already. Raises InputError."""
    if isinstance(given, PromptCompression):
        return given
    try:
        return msgspec.convert(dict(given), PromptCompression, strict=True)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InputError(f"{_FIELD}: {str(error).replace('`', '')}", param=_FIELD) from None


def make_transform(options: PromptCompression) -> ContextTransform:
    """The transform, once all that can be judged without the prompt is in order. Raises InputError."""
    try:
        kind = CONTEXT_TRANSFORMS.get(options.method)
    except ConfigError:
        names = ", ".join(CONTEXT_TRANSFORMS.names())
        raise _wrong("method", f"must be one of {names}, not {options.method[:40]!r}") from None
    if (options.rate is None) == (options.target_tokens is None):
        raise _wrong("rate", "give either rate or target_tokens")
    if options.rate is not None and not 0 < options.rate <= 1:
        raise _wrong("rate", f"must be above 0 and at most 1 (1 keeps everything), not {options.rate:g}")
    if options.target_tokens is not None and options.target_tokens < 1:
        raise _wrong("target_tokens", f"must be at least 1, not {options.target_tokens}")
    if options.context is not None and not options.context:
        raise _wrong("context", "is empty; give the text that may be compressed, or leave it out")
    if options.context is not None and options.messages is not None:
        raise _wrong("messages", "and context exclude each other; give one of them")
    if options.messages is not None and not options.messages:
        raise _wrong("messages", "is an empty list; name at least one message, or leave it out")
    if options.keep_last is not None and options.keep_last < 0:
        raise _wrong("keep_last", f"must be at least 0, not {options.keep_last}")
    for name in ("unit", "segment_tokens", "coarse", "seed"):
        if getattr(options, name) is not None and name not in kind.options:
            own = ", ".join(sorted(kind.options))
            raise _wrong(name, f"is no option of {options.method}; it has {own}")
    if options.unit is not None and options.unit not in kind.units:
        raise _wrong("unit", f"must be one of {', '.join(kind.units)} for {options.method}, not {options.unit[:40]!r}")
    if options.segment_tokens is not None and not 1 <= options.segment_tokens <= MAX_SEGMENT_TOKENS:
        raise _wrong("segment_tokens", f"must be from 1 to {MAX_SEGMENT_TOKENS}, not {options.segment_tokens}")
    if options.coarse is not None and not 1 <= options.coarse <= MAX_COARSE:
        raise _wrong("coarse", f"must be from 1 to {MAX_COARSE:g}, not {options.coarse:g}")
    made: ContextTransform = kind(options)
    return made


def keep_last(options: PromptCompression) -> int:
    """Tokens at the end of the compressible part that stay."""
    if options.keep_last is not None:
        return options.keep_last
    return KEEP_LAST if options.context is None and options.messages is None else 0


def target(options: PromptCompression, num_tokens: int, num_context: int) -> int:
    """How many of `num_context` compressible tokens stay, of a prompt of `num_tokens`. Raises InputError."""
    if options.target_tokens is None:
        assert options.rate is not None
        return math.ceil(round(options.rate * num_context, 6))  # 0.1 * 30 is a little more than 3
    if options.target_tokens > num_tokens:
        raise _wrong(
            "target_tokens",
            f"is {options.target_tokens}, but the prompt has only {num_tokens} tokens; ask for fewer, or leave "
            "prompt_compression out",
        )
    fixed = num_tokens - num_context
    if num_context and options.target_tokens <= fixed:
        raise _wrong(
            "target_tokens",
            f"is {options.target_tokens}, but {fixed} of the prompt's {num_tokens} tokens stay as they are (question, "
            f"template): at least {fixed + 1} are possible",
        )
    if not num_context and options.target_tokens < num_tokens:
        raise _wrong(
            "target_tokens",
            f"is {options.target_tokens}, but nothing of the prompt's {num_tokens} tokens may be compressed; name a "
            "context, or a smaller keep_last",
        )
    return options.target_tokens - fixed


def _wrong(name: str, why: str) -> InputError:
    return InputError(f"{_FIELD}.{name} {why}", param=f"{_FIELD}.{name}")
