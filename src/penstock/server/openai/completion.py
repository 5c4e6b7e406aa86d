"""A completion request: one or many prompts, each an engine request of its own, answered as one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from penstock.base.errors import EngineError, InputError
from penstock.core.kv_hints import plain, read_hints
from penstock.core.sampling import SamplingParams
from penstock.engine.stream import Delta, Stream
from penstock.server.call import Asker, Prompt
from penstock.server.context import Server
from penstock.server.errors import told
from penstock.server.schema.decode import renamed
from penstock.server.schema.openai import Completion, CompletionChoice, CompletionRequest
from penstock.server.transport.pieces import GAP, NUL, Pieces
from penstock.server.transport.sse import DONE, ChunkWriter, encoder, frame
from penstock.server.turns.asking import (
    Caller,
    Options,
    asker_of,
    check_model,
    check_stream_options,
    make_call,
    means_another,
    new_id,
)
from penstock.server.turns.compression import TO_COMPRESS, check_compression, compress_prompt
from penstock.server.turns.defaults import sampling_defaults
from penstock.server.turns.infill import fill_prompt
from penstock.server.turns.logprobs import Columns, LogprobWriter, TokenTexts, prompt_logprobs
from penstock.server.turns.modules import before, check_modules
from penstock.server.turns.truncation import check_truncation, to_cut, truncated
from penstock.server.turns.turn import FINISHES, Meter
from penstock.text.detokenize import IncrementalDetokenizer
from penstock.text.places import TokenPlaces

CHARS_PER_ID = 8
"""Of a token id in an answer, with what is around it; for the bound of slow readers."""
ECHO_TOKENS = 64
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
    form = body.form()
    options = Options(
        model=body.model,
        stream=bool(body.stream), priority=body.priority, tier=body.service_tier, cache_salt=body.cache_salt,
        timeout_s=body.timeout, tpot_slo_ms=body.tpot_slo_ms, ttft_slo_ms=body.ttft_slo_ms,
        reader=(body.expected_ttft_s, body.expected_tds),
        default_max_tokens=DEFAULT_MAX_TOKENS if isinstance(body.max_tokens, UnsetType) else None,
        cut_max_tokens=means_another(server, body.model, body.truncate_prompt_tokens),
        hints=plain(read_hints(body.kv_hints)),
    )  # fmt: skip
    request_id = new_id("cmpl-")
    asks = params.prompt_logprobs is not None
    check_compression(server, body.prompt_compression, echo=bool(body.echo), prompt_logprobs=asks)
    check_truncation(body.truncate_prompt_tokens, server.service.limits, body.prompt_compression)
    asker = asker_of(caller, body.timeout)
    room = server.service.limits.context[0] - (params.max_tokens or options.default_max_tokens or 1)
    others = {name: getattr(body, name) for name in ("prompt_compression", "truncate_prompt_tokens", "suffix")}
    modules = check_modules(server, body.prompt_cache, others)
    given, ends = await _prompts(server, body, asker)
    given = await before(server, given, modules, asker)
    prompts = [truncated(prompt, body.truncate_prompt_tokens, room) for prompt in given]
    if ends:
        params = msgspec.structs.replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ends])
    if body.prompt_compression is not None:
        prompts = [await compress_prompt(server, prompt, body.prompt_compression, asker) for prompt in prompts]
    streams: list[Stream] = []
    work = server.slices.work(caller.tenant)
    try:
        for i, prompt in enumerate(prompts):
            if i:
                await work.pause()
            engine_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
            call = make_call(caller, prompt, params, options, "completions", engine_id)
            with renamed({} if form is None else form.names):
                streams.append(await server.service.submit(call))
    except BaseException:
        for stream in streams:
            stream.abort()
        raise
    return Completing(server, body, model, request_id, prompts, streams, params.n, scoring=scoring)


def _params(server: Server, body: CompletionRequest) -> tuple[SamplingParams, bool]:
    """The parameters, and whether only the prompt is looked at: `echo` with `max_tokens` 0, as evaluators send it."""
    scoring = bool(body.echo) and body.max_tokens == 0
    asked = None if isinstance(body.max_tokens, UnsetType) else body.max_tokens
    params = body.sampling(sampling_defaults(server, body), max_tokens=1 if scoring else asked, logprobs=body.logprobs)
    if body.stream and body.prompt_logprobs is not None:
        raise InputError(
            "prompt_logprobs do not come in a stream; leave stream out, or use echo with logprobs",
            param="prompt_logprobs",
        )
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
    return params, scoring


async def _prompts(server: Server, body: CompletionRequest, asker: Asker) -> tuple[list[Prompt], list[int]]:
    """The prompts, and ids that end a gap that is filled in. Raises InputError, and as `Service.encode_all`."""
    if not body.suffix:
        return await _plain_prompts(server, body, asker), []
    if not isinstance(body.prompt, str):
        raise InputError("suffix needs a prompt that is one text", param="suffix")
    prompt, ends = await fill_prompt(server, body.prompt, body.suffix, asker, param="prompt")
    return [prompt], ends


async def _plain_prompts(server: Server, body: CompletionRequest, asker: Asker) -> list[Prompt]:
    """Raises InputError naming the prompt, and as `Service.encode_all`."""
    given = body.prompt
    fit = to_cut(body.truncate_prompt_tokens, server.service.limits)
    fit = fit if body.prompt_compression is None else TO_COMPRESS
    encode = partial(
        server.service.encode_all,
        fit=fit,
        asker=asker,
        add_special_tokens=body.add_special_tokens is not False and not body.prompt_cache,
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
    echoed: Columns = field(default_factory=Columns)
    """Those of the prompt, shared by its samples."""
    logprobs: Columns | None = None
    begins: int = 0
    """Where generated text begins in the answer's."""
    places: TokenPlaces | None = None
    opened: bool = False
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class _New:
    """What one delta adds to a choice, as it goes to the client."""

    text: str
    logprobs: Columns | None = None
    token_ids: list[int] = field(default_factory=list)
    echoed: Columns | None = None


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
        self._meter = Meter(streams, speculates=server.speculates, scoring=scoring)
        self._writer = LogprobWriter(TokenTexts.of(server, body.return_tokens_as_token_ids), body.logprobs or 0)
        self._choices = [_Choice(i) for i in range(len(prompts) * n)]
        self._echoes: dict[int, Columns] = {}
        self._work = server.slices.work(streams[0].call.tenant)
        if body.return_token_ids:
            for stream in streams:
                stream.chars_per_token = CHARS_PER_ID

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
                    yield [await self._take(i, delta) for delta in deltas]
                    failed = self._meter.failure(deltas)
                    if failed is not None:
                        raise failed
        except EngineError as error:
            raise self._meter.engine_failure(error) from None
        finally:
            self.abort()

    async def _take(self, i: int, delta: Delta) -> tuple[_Choice, _New]:
        choice = self._choices[i * self._n + delta.index]
        new = _New("")
        if not choice.opened:
            choice.opened = True
            if self._body.echo:
                await self._echo(i, choice, new)
        if not self._scoring:
            new.text += delta.text
            new.token_ids = delta.token_ids
            if delta.logprobs is not None and delta.token_ids:
                if choice.logprobs is None or self._body.stream:
                    choice.logprobs = Columns(follows=new.echoed is not None)
                new.logprobs = choice.logprobs
                choice.places = choice.places or self._places(i, choice.begins)
                self._writer.completion(choice.logprobs, delta.token_ids, delta.logprobs, choice.places)
        if delta.finish_reason in FINISHES:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            if self._scoring:  # nothing was asked for, so nothing stopped
                choice.finish_reason, choice.stop_reason = "length", None
        return choice, new

    async def _echo(self, i: int, choice: _Choice, new: _New) -> None:
        prompt = self._prompts[i]
        new.text = prompt.text if prompt.text is not None else self._decoded(prompt.ids)
        choice.begins = len(new.text)
        entries = self._streams[i].prompt_logprobs
        if self._body.logprobs is None:
            return
        if i not in self._echoes:
            columns, places = Columns(), self._prompt_places(prompt)
            for at in range(0, len(prompt.ids), ECHO_TOKENS):
                await self._work.pause()
                part = slice(at, at + ECHO_TOKENS)
                self._writer.completion(columns, prompt.ids[part], entries[part], places)
            self._echoes[i] = columns
        choice.echoed = new.echoed = self._echoes[i]

    def _prompt_places(self, prompt: Prompt) -> TokenPlaces | None:
        tokenizer = self._server.service.tokenizer
        if tokenizer is None:
            return None
        return TokenPlaces(tokenizer, IncrementalDetokenizer(tokenizer, skip_special_tokens=False), text=prompt.text)

    def _places(self, i: int, begins: int) -> TokenPlaces | None:
        tokenizer, body = self._server.service.tokenizer, self._body
        if tokenizer is None:
            return None
        skip, spaces = body.skip_special_tokens is not False, body.spaces_between_special_tokens is not False
        detokenizer = IncrementalDetokenizer(tokenizer, skip, spaces, self._prompts[i].ids)
        return TokenPlaces(tokenizer, detokenizer, begins)

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._server.service.need_tokenizer().decode(ids, skip_special_tokens=False)

    # -- one answer ----------------------------------------------------------------------------------------------

    async def answer(self) -> Pieces:
        """Completion, as JSON. Raises WireError."""
        async with aclosing(self._news()) as news:
            async for fresh in news:
                for choice, new in fresh:
                    choice.text.append(new.text)
                    choice.token_ids += new.token_ids
        parts: list[bytes | bytearray] = []
        told = [await self._told(i) for i in range(len(self._prompts))]
        choices = [self._whole(choice, told[choice.index // self._n], parts) for choice in self._choices]
        return Pieces(
            Completion(
                id=self.id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=(usage := self._meter.usage()),
                system_fingerprint=(self._server.weight_version and usage.weight_version) or None,
            ),
            parts,
        )

    async def _told(self, i: int) -> tuple[bytes, bytearray]:
        """What every sample of a prompt repeats of it, as JSON: its ids and its log-probabilities, if asked for."""
        ids, entries = b"", bytearray()
        if self._body.return_token_ids:
            await self._work.pause()
            ids = encoder.encode(self._prompts[i].ids)
        if self._body.prompt_logprobs is not None:
            texts = TokenTexts.of(self._server, as_ids=False)
            for entry in prompt_logprobs(texts, self._streams[i].prompt_logprobs):
                await self._work.pause()
                entries += (b"," if entries else b"[") + entry
            entries += b"]"
        return ids, entries

    def _whole(
        self, choice: _Choice, told: tuple[bytes, bytearray], parts: list[bytes | bytearray]
    ) -> CompletionChoice:
        """`parts` gets what its gaps stand for."""
        logprobs: Any = None
        if choice.logprobs is not None or choice.echoed.tokens:
            logprobs = msgspec.Raw(Columns.object(*[2 * NUL] * 4))
            own = choice.logprobs or Columns()
            for pair in zip(choice.echoed.parts(), own.parts(), strict=True):
                parts += pair
        body = self._body
        if body.return_token_ids:
            parts += [encoder.encode(choice.token_ids), told[0]]
        if body.prompt_logprobs is not None:
            parts.append(told[1])
        return CompletionChoice(
            index=choice.index,
            text="".join(choice.text),
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=GAP if body.return_token_ids else UNSET,
            prompt_token_ids=GAP if body.return_token_ids else UNSET,
            prompt_logprobs=GAP if body.prompt_logprobs is not None else UNSET,
        )

    # -- a stream ------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error after the beginning is one of them."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        running = options is not None and bool(options.continuous_usage_stats) and with_usage
        head = {
            "id": self.id, "object": "text_completion", "created": self._created, "model": self._model,
            "system_fingerprint": self._server.weight_version,
        }  # fmt: skip
        chunks = ChunkWriter(head, with_usage=with_usage)
        first = set(range(len(self._choices))) if self._body.return_token_ids else set()
        try:
            async with aclosing(self._news()) as news:
                async for fresh in news:
                    out = []
                    for choice, new in fresh:
                        if not (
                            new.text
                            or new.logprobs
                            or new.echoed
                            or choice.finish_reason
                            or self._body.return_token_ids
                        ):
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
        asked = new.logprobs is not None or new.echoed is not None
        if not asked and choice.finish_reason is None and not self._body.return_token_ids:
            text = encoder.encode(new.text)
            ends = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
            return b'{"index":%d,"text":%b%b' % (choice.index, text, ends)
        logprobs: Any = None
        if asked:
            both = zip((new.echoed or Columns()).parts(), (new.logprobs or Columns()).parts(), strict=True)
            logprobs = msgspec.Raw(Columns.object(*[bytes(a + b) for a, b in both]))
        part = CompletionChoice(
            index=choice.index, text=new.text, logprobs=logprobs, finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason, token_ids=new.token_ids if self._body.return_token_ids else UNSET,
            prompt_token_ids=self._prompts[choice.index // self._n].ids if opening else UNSET,
        )  # fmt: skip
        return encoder.encode(part)


async def merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """News of several streams as it comes, with the stream's place. Raises the first error of any of them.

    Nothing is taken before the reader asks: what a slow one has not taken stays with its request, where it counts.
    """
    if len(streams) == 1:
        async with aclosing(streams[0].deltas()) as only:  # type: ignore[type-var]
            async for deltas in only:
                yield 0, deltas
        return
    ready: dict[int, None] = {}
    news = asyncio.Event()

    def tell(i: int) -> None:
        ready[i] = None
        news.set()

    for i, stream in enumerate(streams):
        stream.listen(partial(tell, i))
    left = set(range(len(streams)))
    while left:
        await news.wait()
        news.clear()
        while ready:
            i = next(iter(ready))
            del ready[i]
            if i not in left:
                continue
            while deltas := streams[i].fresh():
                yield i, deltas
            if streams[i].final is not None:
                left.discard(i)
