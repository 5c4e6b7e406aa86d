"""A completion request: one or many prompts, each an engine request of its own, answered as one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.base.errors import EngineError, InputError
from penstock.core.sampling import SamplingParams
from penstock.engine.stream import Delta, Stream
from penstock.server.compression import TO_COMPRESS, check_compression, compress_prompt
from penstock.server.context import Asker, Prompt, Server
from penstock.server.errors import WireError, wire_error
from penstock.server.logprobs import LogprobWriter, prompt_logprobs
from penstock.server.schema.openai import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from penstock.server.sse import DONE, ChunkWriter, encoder, frame
from penstock.server.turns import (
    FINISHES,
    Caller,
    Meter,
    Options,
    asker_of,
    check_model,
    check_stream_options,
    make_call,
    new_id,
    sampling_defaults,
)

log = logging.getLogger("penstock.server")
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, where a completion request says nothing; null fills the context."""


async def start(caller: Caller, body: CompletionRequest) -> Completing:
    """Check, encode, admit and submit every prompt; if one fails, none runs on.

    Raises InputError, RefusedError, EngineError. The caller must read what it gets, or abort it.
    """
    server = caller.server
    model = check_model(server, body.model)
    check_stream_options(body.stream, body.stream_options)
    params, scoring = _params(server, body)
    options = Options(
        stream=bool(body.stream), priority=body.priority, cache_salt=body.cache_salt, timeout_s=body.timeout,
        tpot_slo_ms=body.tpot_slo_ms,
    )  # fmt: skip
    request_id = new_id("cmpl-")
    asks = params.prompt_logprobs is not None
    check_compression(server, body.prompt_compression, echo=bool(body.echo), prompt_logprobs=asks)
    asker = asker_of(caller, body.timeout)
    prompts = await _prompts(server, body, asker)
    if body.prompt_compression is not None:
        prompts = [await compress_prompt(server, prompt, body.prompt_compression, asker) for prompt in prompts]
    streams: list[Stream] = []
    try:
        for i, prompt in enumerate(prompts):
            engine_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
            call = make_call(caller, prompt, params, options, "completions", engine_id)
            streams.append(await server.service.submit(call))
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return Completing(server, body, model, request_id, prompts, streams, params.n, scoring=scoring)


def _params(server: Server, body: CompletionRequest) -> tuple[SamplingParams, bool]:
    """The parameters, and whether only the prompt is looked at: `echo` with `max_tokens` 0, as evaluators send it."""
    scoring = bool(body.echo) and body.max_tokens == 0
    asked = DEFAULT_MAX_TOKENS if isinstance(body.max_tokens, UnsetType) else body.max_tokens
    params = body.sampling(sampling_defaults(server), max_tokens=1 if scoring else asked, logprobs=body.logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise InputError(
            "prompt_logprobs do not come in a stream; leave stream out, or use echo with logprobs",
            param="prompt_logprobs",
        )
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    return params, scoring


async def _prompts(server: Server, body: CompletionRequest, asker: Asker) -> list[Prompt]:
    """Raises InputError naming the prompt, and as `Service.encode_all`."""
    given = body.prompt
    fit = None if body.prompt_compression is None else TO_COMPRESS
    encode = partial(
        server.service.encode_all, add_special_tokens=body.add_special_tokens is not False, fit=fit, asker=asker
    )
    if isinstance(given, str):
        return await encode([given], ["prompt"])
    if not given:
        raise InputError("prompt is an empty list; it must have at least one text or token id", param="prompt")
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [Prompt([i for i in given if isinstance(i, int)])]
    if len(kinds) > 1:
        raise InputError("prompt must be a list of texts, of token ids, or of lists of token ids", param="prompt")
    most = server.config.max_prompts
    if len(given) > most:
        raise InputError(f"prompt has {len(given)} prompts; at most {most} are possible", param="prompt")
    names = [f"prompt[{i}]" for i in range(len(given))]
    if kinds == {str}:
        return await encode([text for text in given if isinstance(text, str)], names)
    return [Prompt(item, param=name) for item, name in zip(given, names, strict=True) if isinstance(item, list)]


@dataclass
class _Choice:
    """One sample of one prompt, so far."""

    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: CompletionLogprobs | None = None
    offset: int = 0
    opened: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class _New:
    """What one delta adds to a choice, as it goes to the client."""

    text: str
    logprobs: CompletionLogprobs | None
    token_ids: list[int]


class Completing:
    """A completion request under way. Leaving `frames` early, or cancelling `answer`, aborts all of it."""

    def __init__(
        self, server: Server, body: CompletionRequest, model: str, request_id: str, prompts: list[Prompt],
        streams: list[Stream], n: int, *, scoring: bool,
    ) -> None:  # fmt: skip
        self.id = request_id
        self._server = server
        self._body = body
        self._model = model
        self._created = int(time.time())
        self._prompts = prompts
        self._streams = streams
        self._n = n
        self._scoring = scoring
        self._meter = Meter(streams, speculates=server.speculates)
        tokenizer = server.service.tokenizer
        self._writer = LogprobWriter(tokenizer, body.logprobs or 0, as_ids=bool(body.return_tokens_as_token_ids))
        self._choices = [_Choice(i) for i in range(len(prompts) * n)]

    @property
    def too_slow(self) -> bool:
        most = self._server.config.max_stream_chars
        return sum(stream.unread_chars for stream in self._streams) > most

    def abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    # -- what is new ---------------------------------------------------------------------------------------------

    async def _news(self) -> AsyncGenerator[list[tuple[_Choice, _New]], None]:
        """Raises WireError once a prompt has ended badly; the others are then given up."""
        try:
            async with aclosing(merged(self._streams)) as news:
                async for i, deltas in news:
                    self._meter.count(self._streams[i], deltas)
                    yield [self._take(i, delta) for delta in deltas]
                    failed = self._meter.failure(deltas)
                    if failed is not None:
                        raise failed
        except EngineError as error:
            raise self._meter.engine_failure(error) from None
        finally:
            self.abort()

    def _take(self, i: int, delta: Delta) -> tuple[_Choice, _New]:
        choice = self._choices[i * self._n + delta.index]
        new = _New("", None, [])
        if not choice.opened:
            choice.opened = True
            if self._body.echo:
                self._echo(i, choice, new)
        if not self._scoring:
            new.text += delta.text
            new.token_ids = delta.token_ids
            if delta.logprobs is not None and delta.token_ids:
                written, choice.offset = self._writer.completion(delta.token_ids, delta.logprobs, choice.offset)
                new.logprobs = _joined(new.logprobs, written)
        if delta.finish_reason in FINISHES:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return choice, new

    def _echo(self, i: int, choice: _Choice, new: _New) -> None:
        prompt = self._prompts[i]
        new.text = prompt.text if prompt.text is not None else self._decoded(prompt.ids)
        entries = self._streams[i].output.prompt_logprobs
        if self._body.logprobs is not None and entries is not None:
            new.logprobs, choice.offset = self._writer.completion(prompt.ids, entries, 0)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._server.service.need_tokenizer().decode(ids, skip_special_tokens=False)

    # -- one answer ----------------------------------------------------------------------------------------------

    async def answer(self) -> Completion:
        """Raises WireError."""
        async with aclosing(self._news()) as news:
            async for fresh in news:
                for choice, new in fresh:
                    choice.text.append(new.text)
                    choice.token_ids += new.token_ids
                    choice.logprobs = _joined(choice.logprobs, new.logprobs)
        return Completion(
            id=self.id, created=self._created, model=self._model, choices=[self._whole(c) for c in self._choices],
            usage=self._meter.usage(),
        )  # fmt: skip

    def _whole(self, choice: _Choice) -> CompletionChoice:
        i, body = choice.index // self._n, self._body
        entries = self._streams[i].output.prompt_logprobs if body.prompt_logprobs is not None else None
        return CompletionChoice(
            index=choice.index,
            text="".join(choice.text),
            logprobs=choice.logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if body.return_token_ids else UNSET,
            prompt_token_ids=self._prompts[i].ids if body.return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(entries) if entries is not None else UNSET,
        )

    # -- a stream ------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error after the beginning is one of them."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        running = options is not None and bool(options.continuous_usage_stats) and with_usage
        head = {
            "id": self.id, "object": "text_completion", "created": self._created, "model": self._model,
            "system_fingerprint": None,
        }  # fmt: skip
        chunks = ChunkWriter(head, with_usage=with_usage)
        first = set(range(len(self._choices))) if self._body.return_token_ids else set()
        try:
            async with aclosing(self._news()) as news:
                async for fresh in news:
                    out = []
                    for choice, new in fresh:
                        if not (new.text or new.logprobs or choice.finish_reason or self._body.return_token_ids):
                            continue
                        encoded = self._part(choice, new, opening=choice.index in first)
                        first.discard(choice.index)
                        out.append(chunks.chunk(encoded, self._meter.usage() if running else None))
                    if out:
                        yield b"".join(out)
            if with_usage:
                yield chunks.chunk(b"", self._meter.usage())
        except Exception as error:
            yield frame(told(error).body())
        yield DONE

    def _part(self, choice: _Choice, new: _New, *, opening: bool) -> bytes:
        if new.logprobs is None and choice.finish_reason is None and not self._body.return_token_ids:
            text = encoder.encode(new.text)
            ends = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
            return b'{"index":%d,"text":%b%b' % (choice.index, text, ends)
        part = CompletionChoice(
            index=choice.index, text=new.text, logprobs=new.logprobs, finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason, token_ids=new.token_ids if self._body.return_token_ids else UNSET,
            prompt_token_ids=self._prompts[choice.index // self._n].ids if opening else UNSET,
        )  # fmt: skip
        return encoder.encode(part)


def told(error: Exception) -> WireError:
    """As `wire_error`; what nobody expected goes to the log."""
    answer = wire_error(error)
    if answer.code == "internal_error":
        log.error("a stream failed", exc_info=error)
    return answer


def _joined(a: CompletionLogprobs | None, b: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if a is None or b is None:
        return a or b
    a.tokens += b.tokens
    a.token_logprobs += b.token_logprobs
    a.top_logprobs += b.top_logprobs
    a.text_offset += b.text_offset
    return a


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """News of several streams as it comes, with the stream's place. Raises the first error of any of them."""
    if len(streams) == 1:
        async with aclosing(streams[0].deltas()) as only:  # type: ignore[type-var]
            async for deltas in only:
                yield 0, deltas
        return
    # One place each: what a slow reader has not taken stays with its request and comes in one piece.
    queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(maxsize=len(streams))

    async def pump(i: int) -> None:
        last: BaseException | None = None
        try:
            async for deltas in streams[i].deltas():
                await queue.put((i, deltas))
        except Exception as error:
            last = error
        await queue.put((i, last))

    tasks = [asyncio.create_task(pump(i)) for i in range(len(streams))]
    try:
        left = len(streams)
        while left:
            i, news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                left -= 1
            else:
                yield i, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
