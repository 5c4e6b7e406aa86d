"""One chat turn, whatever front end asked for it: OpenAI's chat, Responses, Anthropic's messages.

    caller = caller_of(request)                                # who asks, when
    turn = await begin(caller, Conversation(...), "chat")      # checked, admitted, running
    async for pieces in turn.pieces(): ...                     # or: answers = await turn.answers()
    turn.usage()

Both ways read the same events, so what is streamed adds up to what is answered at once.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from starlette.requests import Request

from penstock.base.errors import EngineError, InputError, RefusedError
from penstock.core.compression import PromptCompression
from penstock.core.output import RequestMetrics
from penstock.core.sampling import SamplingParams
from penstock.engine.stream import Delta, Stream
from penstock.server.context import ANYONE, Asker, Call, Prompt, Server, Tenant
from penstock.server.errors import WireError, wire_error
from penstock.server.parsing import check_tools, lead_for, params_for, parser_for
from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.server.schema.decode import renamed
from penstock.server.schema.openai import CompletionTokensDetails, PromptTokensDetails, Usage
from penstock.server.transport.inner import PRIORITY
from penstock.server.turns.compression import TO_COMPRESS, check_compression, compress_chat
from penstock.server.turns.defaults import sampling_defaults

if TYPE_CHECKING:
    from penstock.server.parsing import OutputParser

MAX_PRIORITY = 2**31
MAX_TIMEOUT_S = 7 * 86400
MAX_TPOT_SLO_MS = 60_000
PROMPT_TAIL = 64
"""Tokens of a prompt's end that show whether it has opened a thought."""


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks, and when (seconds). `request_id` is the client's own word for it, or ours; it may repeat."""

    server: Server
    request_id: str = ""
    tenant: Tenant = ANYONE
    arrival_s: float = 0.0
    priority: int = 0
    """Of requests that name none."""
    timeout_s: float | None = None
    """The header X-Request-Timeout, in seconds; the field `timeout` goes before it."""


def caller_of(request: Request) -> Caller:
    server: Server = request.app.state.server
    state = request.scope["state"]
    return Caller(
        server=server, request_id=state["request_id"], tenant=state["tenant"],
        arrival_s=state.get("received_s") or server.service.clock.now(), timeout_s=_timeout_s(request),
        priority=request.scope.get(PRIORITY, 0),
    )  # fmt: skip


def asker_of(caller: Caller, timeout_s: float | None = None) -> Asker:
    """`timeout_s`: the request's own. Raises InputError."""
    limit_s = caller.timeout_s if timeout_s is None else timeout_s
    if limit_s is not None and not 0 < limit_s <= MAX_TIMEOUT_S:
        raise InputError(
            f"timeout must be above 0 and at most {MAX_TIMEOUT_S} seconds, not {limit_s:g}", param="timeout"
        )
    return Asker(caller.tenant, caller.arrival_s, limit_s)


def _timeout_s(request: Request) -> float | None:
    given = request.headers.get("x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise InputError("X-Request-Timeout must be a number of seconds above 0", param="X-Request-Timeout")
    return seconds


@dataclass(kw_only=True)
class Options:
    """What a request says besides its prompt and sampling parameters. `timeout_s`: seconds from arrival; `tpot_slo_ms`:
    milliseconds that a token after the first should take on average. `default_max_tokens`: beats the model's own."""

    stream: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    tpot_slo_ms: float | None = None
    default_max_tokens: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Conversation:
    """A chat request of any front end, in OpenAI's shapes.

    Attributes:
        names: our field -> the client's, for errors ("max_tokens" -> "max_output_tokens", ...).
        param: how errors call the messages.
        prediction: text that the answer is likely to repeat.
        compression: how the prompt is to be made shorter.
    """

    messages: Sequence[Mapping[str, Any]]
    params: SamplingParams
    options: Options = field(default_factory=Options)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    param: str = "messages"
    prediction: str = ""
    compression: PromptCompression | None = None


@dataclass
class Piece:
    """News of one sample. `finish_reason` is OpenAI's word, with the last piece of a sample."""

    index: int
    events: list[Event]
    delta: Delta
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class CallAnswer:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """All of one sample."""

    index: int
    content: str = ""
    reasoning: str = ""
    calls: list[CallAnswer] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None

    def add(self, piece: Piece) -> None:
        for event in piece.events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.calls.append(CallAnswer(call_id, name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text
        self.token_ids += piece.delta.token_ids
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Turn:
    """A turn under way. Leaving `pieces` early, or cancelling `answers`, aborts it."""

    def __init__(
        self, call: Call, stream: Stream, parsers: list[OutputParser | None], *, speculates: bool = False
    ) -> None:
        self.call = call
        self.stream = stream
        self.id = call.request_id
        self.prompt: Prompt = call.prompt
        self._parsers = parsers
        self._called = [False] * len(parsers)
        self._meter = Meter([stream], speculates=speculates)

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What is new, until all samples have ended. Raises WireError (timeout, abort, a failed engine)."""
        failed: WireError | None = None
        try:
            async for deltas in self.stream.deltas():
                self._meter.count(self.stream, deltas)
                failed = failed or self._meter.failure(deltas)
                yield [self._piece(delta) for delta in deltas]
        except EngineError as error:
            raise self._meter.engine_failure(error) from None
        finally:
            self.stream.abort()  # does nothing if it has ended
        if failed is not None:
            raise failed

    def _piece(self, delta: Delta) -> Piece:
        parser = self._parsers[delta.index]
        if parser is None:
            events: list[Event] = [Content(delta.text)] if delta.text else []
        else:
            events = parser.feed(delta.text) if delta.text else []
            if delta.finish_reason is not None:
                events = [*events, *parser.finish()]
        if any(isinstance(e, CallStart) for e in events):
            self._called[delta.index] = True
        reason = delta.finish_reason if delta.finish_reason in FINISHES else None
        if reason == "stop" and self._called[delta.index]:
            reason = "tool_calls"
        return Piece(delta.index, events, delta, reason, delta.stop_reason)

    async def answers(self, look: Callable[[Piece], None] = lambda _: None) -> list[Answer]:
        """All samples, in order; `look` sees every piece as it comes. Raises WireError."""
        out = [Answer(i) for i in range(len(self._parsers))]
        async for pieces in self.pieces():
            for piece in pieces:
                out[piece.index].add(piece)
                look(piece)
        return out

    def usage(self) -> Usage:
        """So far."""
        return self._meter.usage()

    def abort(self) -> None:
        self.stream.abort()


FINISHES = ("stop", "length")
"""The engine's own words; what else ends a request is an error to its client."""


class Meter:
    """Counts tokens of one or more streams of a request, and says what a bad end means.

    `speculates`: the usage says how many guesses were right. `scoring`: what is generated goes to nobody.
    """

    def __init__(self, streams: Sequence[Stream], *, speculates: bool = False, scoring: bool = False) -> None:
        self._prompt = {s.request_id: len(s.request.prompt_token_ids) for s in streams}
        self._before = sum(s.call.prompt.compressed_from for s in streams if s.call is not None)
        self._cached: dict[str, int] = {}
        self._speculates = speculates
        self._scoring = scoring
        self._metrics: dict[str, RequestMetrics] = {}
        self.generated = 0

    def count(self, stream: Stream, deltas: list[Delta]) -> None:
        if not self._scoring:
            self.generated += sum(len(d.token_ids) for d in deltas)
        if stream.request_id not in self._cached:
            self._cached[stream.request_id] = stream.num_cached_tokens
            self._metrics[stream.request_id] = stream.metrics

    def usage(self) -> Usage:
        prompt = sum(self._prompt.values())
        cached = PromptTokensDetails(
            cached_tokens=sum(self._cached.values()), compressed_from=self._before if self._before else UNSET
        )
        return Usage(
            prompt_tokens=prompt, completion_tokens=self.generated, total_tokens=prompt + self.generated,
            prompt_tokens_details=cached, completion_tokens_details=self._guesses() if self._speculates else UNSET,
        )  # fmt: skip

    def _guesses(self) -> CompletionTokensDetails:
        """Right guesses behind the end of a sample are no part of it, so they count as rejected."""
        drafted = sum(m.num_draft_tokens for m in self._metrics.values())
        accepted = min(self.generated, sum(m.num_accepted_tokens for m in self._metrics.values()))
        return CompletionTokensDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        )

    def failure(self, deltas: list[Delta]) -> WireError | None:
        reasons = {d.finish_reason for d in deltas} - {None, *FINISHES}
        if "timeout" in reasons:
            return WireError(
                408, "the request took longer than its time limit", code="timeout", extra={"usage": self.usage()}
            )
        if "abort" in reasons:
            return WireError(503, "the request was aborted", code="aborted", extra={"usage": self.usage()})
        return None  # "error" comes with an EngineError of its own

    def engine_failure(self, error: EngineError) -> WireError:
        answer = wire_error(error)
        answer.extra = {"usage": self.usage()}
        return answer


async def begin(caller: Caller, asked: Conversation, endpoint: str, *, prefix: str = "chatcmpl-") -> Turn:
    """Check, encode, admit, submit. The caller must read the turn or abort it.

    Raises InputError, RefusedError, EngineError.
    """
    server, choice = caller.server, asked.tool_choice
    tools = check_tools(asked.tools, choice) or None
    parallel = asked.parallel_tool_calls
    check_compression(server, asked.compression, prompt_logprobs=asked.params.prompt_logprobs is not None)
    shown = None if choice == "none" else tools
    asker = asker_of(caller, asked.options.timeout_s)
    prompt = await server.service.encode_chat(
        asked.messages,
        tools=shown,
        chat_template=asked.chat_template,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        param=asked.param,
        fit=TO_COMPRESS if asked.compression is not None else None,
        asker=asker,
    )
    if asked.compression is not None:
        prompt = await compress_chat(server, prompt, asked.compression, asked, shown, asker)
    reference = await server.service.encode_reference(asked.prediction, param="prediction.content", asker=asker)
    ends = server.service.need_tokenizer().decode(prompt.ids[-PROMPT_TAIL:], skip_special_tokens=False)
    bound = asked.params.structured_outputs is not None
    kwargs = asked.chat_template_kwargs
    parsers = [
        parser_for(server, tools, choice, kwargs, prompt_text=ends, parallel=parallel, bound=bound)
        for _ in range(max(1, min(asked.params.n, server.service.limits.max_n)))  # what is more, `submit` refuses
    ]
    params = params_for(server, tools, choice, asked.params, parallel=parallel)
    call = make_call(caller, prompt, params, asked.options, endpoint, new_id(prefix))
    call.lead = lead_for(
        server, tools, choice, kwargs, prompt_text=ends, bound=bound, continued=asked.continue_final_message
    )
    call.reference = reference if server.speculates else []  # nobody would look at it
    with renamed(asked.names):
        stream = await server.service.submit(call)
    return Turn(call, stream, parsers, speculates=server.speculates)


def make_call(
    caller: Caller, prompt: Prompt, params: SamplingParams, options: Options, endpoint: str, request_id: str
) -> Call:
    """Raises InputError."""
    priority = caller.priority if options.priority is None else options.priority
    asker = asker_of(caller, options.timeout_s)
    if abs(priority) > MAX_PRIORITY:
        raise InputError(
            f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {str(priority)[:40]}", param="priority"
        )
    slo_ms = options.tpot_slo_ms
    if slo_ms is not None and not 0 < slo_ms <= MAX_TPOT_SLO_MS:
        raise InputError(
            f"tpot_slo_ms must be above 0 and at most {MAX_TPOT_SLO_MS:,} milliseconds, not {slo_ms:g}",
            param="tpot_slo_ms",
        )
    return Call(
        prompt=prompt,
        params=params,
        request_id=request_id,
        endpoint=endpoint,
        tenant=caller.tenant,
        priority=priority,
        cache_salt=options.cache_salt,
        deadline_s=asker.limit_s,
        arrival_s=caller.arrival_s,
        slo_tpot_s=None if slo_ms is None else slo_ms / 1000,
        default_max_tokens=options.default_max_tokens or sampling_defaults(caller.server).get("max_tokens"),
        stream=options.stream,
        facts={"http_request_id": caller.request_id, **compression_facts(prompt), **options.facts},
    )


def compression_facts(prompt: Prompt) -> dict[str, float]:
    """For the log."""
    if not prompt.compressed_from:
        return {}
    return {"compressed_from": prompt.compressed_from, "compression_ms": round(prompt.compression_s * 1000, 3)}


def new_id(prefix: str) -> str:
    """Unique, whatever clients send as X-Request-Id."""
    return prefix + secrets.token_hex(12)


def check_stream_options(stream: bool | None, options: object) -> None:
    """Raises InputError."""
    if options is not None and not stream:
        raise InputError("stream_options belong to a stream; set stream to true or leave them out",
                         param="stream_options")  # fmt: skip


def check_model(server: Server, name: str | None) -> str:
    """The name to answer under. Raises RefusedError (404) for a model that is not served here."""
    if not name:
        return server.model_name
    if name == server.model_name or name in server.aliases:
        return name
    served = ", ".join([server.model_name, *server.aliases])
    raise RefusedError(
        f"the model {name[:80]!r} is not served here; served is {served}",
        status=404, code="model_not_found", param="model",
    )  # fmt: skip
