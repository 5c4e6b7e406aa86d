"""Prompt compression put together: the request's options, the transform, the model that reads, and the prompt's text.

Its front ends are `LLM` (in the caller's thread) and the server (in one thread of its own, off the event loop).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.base.errors import ConfigError, InputError
from penstock.compress import DEFAULT_COMPRESSOR
from penstock.compress.locate import compressible, find_once, texts_of, tokens_within
from penstock.compress.options import keep_last, make_transform, target
from penstock.config import EngineConfig
from penstock.core.compression import ContextJob, PromptCompression, Span
from penstock.text.contents import CHANGED, chosen, find_contents
from penstock.text.encoding import TOO_LONG
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.launch.prompt_reader import PromptReader

MAX_TOKENS = 1 << 18
MAX_WINDOWS = 64
"""A prompt may be this many times as long as the compressor's window before it is compressed."""
NONE = "none"
_FIELD = "prompt_compression"


@dataclass(frozen=True)
class ChatSource:
    """The conversation that a prompt was made of. `render`: as for `text.template.render_chat`."""

    template: str
    messages: Sequence[Mapping[str, Any]]
    render: Mapping[str, Any]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ChatSource:
        """`options`: as for `text.template.encode_chat`."""
        named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        return cls(template, messages, {**options, **named})


@dataclass(frozen=True)
class Compressed:
    """`ids`: the prompt that the engine computes; `text`: what it spells. `seconds`: all that compressing took, the
    time waited for others excluded."""

    ids: list[int]
    text: str
    num_before: int
    seconds: float


class Compressor:
    """One per engine. Prompts are compressed one at a time, whoever calls; each result is a function of its prompt."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        """Loads the model now if it is not the bundled one. Raises ConfigError, field `prompt_compressor`."""
        self._name, self._ops = config.model.prompt_compressor, config.execution.ops
        self._tokenizer = tokenizer
        self._reader: PromptReader | None = None
        self._lock = threading.Lock()
        if self._name not in (DEFAULT_COMPRESSOR, NONE) and tokenizer is not None:
            self._load(tokenizer)

    @property
    def num_bytes(self) -> int:
        return 0 if self._reader is None else self._reader.num_bytes

    def check(self, options: PromptCompression, *, echo: bool = False, prompt_logprobs: bool = False) -> None:
        """All that can be judged without the prompt, in microseconds. Raises InputError."""
        make_transform(options)
        if self._name == NONE:
            raise InputError(
                "this engine compresses no prompts (prompt_compressor is none); leave prompt_compression out",
                param=_FIELD,
            )
        if self._tokenizer is None or self._tokenizer.table is None:
            raise InputError(
                "prompt_compression needs a tokenizer whose tokens are bytes, and this engine runs without one",
                param=_FIELD,
            )
        for given, name in ((echo, "echo"), (prompt_logprobs, "prompt_logprobs")):
            if given:
                raise InputError(
                    f"{name} tells of the prompt as it was sent, and prompt_compression sends another to the model; "
                    "leave one of them out (return_token_ids shows the prompt that was computed)",
                    param=name,
                )

    def compress(
        self, ids: Sequence[int], options: PromptCompression, *, chat: ChatSource | None = None, param: str = "prompt",
        check: Callable[[], None] = lambda: None,
    ) -> Compressed:  # fmt: skip
        """The prompt without what `options` let go. `check` is called before every step of the model; it may raise.

        Raises InputError for options that do not fit the prompt, EngineError if the model fails.
        """
        self.check(options)
        transform = make_transform(options)
        if chat is None and options.messages is not None:
            raise InputError(
                f"{_FIELD}.messages is for chats; name the text as {_FIELD}.context", param=f"{_FIELD}.messages"
            )
        with self._lock:
            check()
            began = time.perf_counter()
            tokenizer = self._tokenizer
            assert tokenizer is not None
            assert tokenizer.table is not None
            self._check_ids(ids, param)
            pieces = [tokenizer.table[i] for i in ids]
            spans = self._spans(pieces, ids, options, chat)
            num_context = sum(b - a for a, b in spans)
            kept = target(options, len(ids), num_context)
            if kept == num_context:
                return self._made(ids, len(ids), began)
            job = ContextJob(ids, texts_of(pieces), spans, kept)
            reader = self._ready(tokenizer, len(ids), param, check) if transform.reads else None
            places = set(transform.keep(job, reader))
            context = set(job.context())
            out = [token for i, token in enumerate(ids) if i in places or i not in context]
            assert len(out) == len(ids) - num_context + kept, "a transform keeps exactly what it is told to"
            return self._made(out, len(ids), began)

    def _made(self, ids: Sequence[int], num_before: int, began: float) -> Compressed:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return Compressed(list(ids), text, num_before, time.perf_counter() - began)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if len(ids) > MAX_TOKENS:
            raise InputError(
                f"{param} has {len(ids)} tokens; at most {MAX_TOKENS} can be compressed", param=param, code=TOO_LONG
            )
        assert self._tokenizer is not None
        size = self._tokenizer.vocab_size
        for n, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < size:
                raise InputError(f"{param}[{n}] must be a token id from 0 to {size - 1}", param=param)

    def _spans(
        self, pieces: Sequence[bytes], ids: Sequence[int], options: PromptCompression, chat: ChatSource | None
    ) -> list[Span]:
        """Compressible tokens. Special tokens and what the chat template writes never are."""
        assert self._tokenizer is not None
        if options.context is not None:
            spans = [find_once(pieces, options.context, f"{_FIELD}.context")]
        elif chat is not None:
            which = chosen(chat.messages, options.messages, f"{_FIELD}.messages")
            found = find_contents(chat.template, chat.messages, which, **chat.render)
            at = b"".join(pieces).find(found.text.encode("utf-8", "replace"))  # some tokenizers write a space first
            if at < 0:
                raise InputError(CHANGED, param=_FIELD)
            spans = tokens_within(pieces, [(a + at, b + at) for a, b in found.stretches])
        else:
            spans = [(0, len(ids))]
        fixed = self._tokenizer.special_ids | set(self._tokenizer.added_literals.values())
        return compressible(spans, ids, fixed, keep_last(options))

    def _ready(self, tokenizer: Tokenizer, num_tokens: int, param: str, check: Callable[[], None]) -> PromptReader:
        if self._reader is None:
            try:
                self._load(tokenizer)
            except ConfigError as error:
                raise InputError(f"{_FIELD}: {error}", param=_FIELD) from None
        reader = self._reader
        assert reader is not None
        if num_tokens > MAX_WINDOWS * reader.window:
            raise InputError(
                f"{param} has {num_tokens} tokens; the compressor {reader.name} takes at most "
                f"{MAX_WINDOWS * reader.window} ({MAX_WINDOWS} windows of {reader.window})",
                param=param, code=TOO_LONG,
            )  # fmt: skip
        reader.reset(check)
        return reader

    def _load(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError."""
        # A server's front end runs no other model, and most of them never this one.
        from penstock.launch.prompt_reader import PromptReader

        reader = PromptReader(self._name, self._ops)
        difference = _difference(tokenizer, reader.tokenizer)
        if difference is not None:
            raise ConfigError(
                f"prompt_compressor: it needs the model's tokenizer, and {self._name} has another ({difference}); "
                "start with prompt_compressor=MODEL, a small one of the same family",
                field="prompt_compressor",
            )
        self._reader = reader


def _difference(ours: Tokenizer, theirs: Tokenizer | None) -> str | None:
    """What tells two tokenizers apart; None for nothing."""
    if theirs is None:
        return "none at all"
    if ours.vocab_size != theirs.vocab_size:
        return f"{theirs.vocab_size} tokens instead of {ours.vocab_size}"
    for i in range(ours.vocab_size):
        if ours.id_to_piece(i) != theirs.id_to_piece(i):
            return f"token {i} is {theirs.id_to_piece(i)[:20]!r} instead of {ours.id_to_piece(i)[:20]!r}"
    return None
