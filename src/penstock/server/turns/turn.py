"""One chat turn, whatever front end asked for it: OpenAI's chat, Responses, Anthropic's messages.

    caller = caller_of(request)                                # who asks, when
    turn = await begin(caller, Conversation(...), "chat")      # checked, admitted, running
    async for pieces in turn.pieces(): ...                     # or: answers = await turn.answers()
    turn.usage()

Both ways read the same events, so what is streamed adds up to what is answered at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from penstock.base.errors import EngineError
from penstock.core.output import RequestMetrics
from penstock.engine.stream import Delta, Stream
from penstock.server.call import Call, Prompt
from penstock.server.errors import WireError, wire_error
from penstock.server.parsing import check_tools, lead_for, params_for, parser_for, shown
from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.server.parsing.tools import bound_by
from penstock.server.schema.decode import renamed
from penstock.server.schema.openai import CompletionTokensDetails, PromptTokensDetails, Usage
from penstock.server.tool_times import ToolUse
from penstock.server.turns.asking import Caller, Conversation, Options, asker_of, make_call, new_id
from penstock.server.turns.compression import TO_COMPRESS, check_compression, compress_chat
from penstock.server.turns.hints import in_tokens, written
from penstock.server.turns.modules import within
from penstock.server.turns.truncation import check_truncation, to_cut, truncated

if TYPE_CHECKING:
    from penstock.core.sampling import SamplingParams
    from penstock.server.parsing import OutputParser

PROMPT_TAIL = 64
"""Tokens of a prompt's end that show whether it has opened a thought."""


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
        self, call: Call, stream: Stream, parsers: list[OutputParser | None], *, speculates: bool = False,
        block_size: int = 0, paused: Callable[[Call, list[int], Sequence[ToolUse]], None] | None = None,
    ) -> None:  # fmt: skip
        """`block_size`: of the prefix cache; 0: there is none. `paused`: is told if the answer, the only one, ends in
        tool calls."""
        self._paused = paused
        self._uses: list[ToolUse] = []
        self._said: list[int] = []
        self._block_size = block_size
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
        uses = [ToolUse(e.id, e.name) for e in events if isinstance(e, CallStart)]
        if uses:
            self._called[delta.index] = True
        reason = delta.finish_reason if delta.finish_reason in FINISHES else None
        if reason == "stop" and self._called[delta.index]:
            reason = "tool_calls"
        if self._paused is not None:
            self._uses += uses
            self._said += delta.token_ids
            if reason == "tool_calls":
                self._paused(self.call, [*self.prompt.ids, *self._said], self._uses)
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

    def written(self, num_cached: int) -> dict[float, int]:
        """As `hints.written`: what the prefix cache has of the prompt now, and had not."""
        if not self._block_size or not self.stream.started:
            return {}
        return written(self.call.hints, len(self.prompt.ids), num_cached, self._block_size)

    def abort(self) -> None:
        self.stream.abort()


FINISHES = ("stop", "length", "repetition")
"""The engine's own words; what else ends a request is an error to its client."""


class Meter:
    """Counts tokens of one or more streams of a request, and says what a bad end means.

    `speculates`: the usage says how many drafts were right. `scoring`: what is generated goes to nobody.
    """

    def __init__(self, streams: Sequence[Stream], *, speculates: bool = False, scoring: bool = False) -> None:
        self._prompt = {s.request_id: len(s.request.prompt_token_ids) for s in streams}
        self._streams = streams
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
            prompt_tokens_details=cached, completion_tokens_details=self._drafts() if self._speculates else UNSET,
            **self._weights(), **self._times(),
        )  # fmt: skip

    def _times(self) -> dict[str, Any]:
        """Where the time went, if that was asked for: of several prompts, of the one whose first token came last."""
        call = self._streams[0].call
        if call is None or not call.tells_times or not self._metrics:
            return {}
        return times_told(max(self._metrics.values(), key=lambda m: m.first_token_s or 0.0))

    def _weights(self) -> dict[str, Any]:
        """The version of the weights: of the newest token, and of all if there are several."""
        told = [stream.weight_versions for stream in self._streams]
        samples = [runs for one in told for runs in one or ()]
        last = [runs[-1][2] for runs in samples if runs]
        if not last:
            return {}
        several = len({version for runs in samples for _, _, version in runs}) > 1
        return {"weight_version": last[-1]} | ({"weight_versions": samples} if several else {})

    def _drafts(self) -> CompletionTokensDetails:
        """Right drafts behind the end of a sample are no part of it, so they count as rejected."""
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


def times_told(m: RequestMetrics) -> dict[str, float]:
    """Seconds under Groq's names, as far as they are known: `queue_time` + `prompt_time` is the TTFT as the server
    sees it."""
    marks = {"queue_time": (m.arrival_s, m.scheduled_s), "prompt_time": (m.scheduled_s, m.first_token_s),
             "completion_time": (m.first_token_s, m.finished_s), "total_time": (m.arrival_s, m.finished_s)}  # fmt: skip
    return {name: max(0.0, b - a) for name, (a, b) in marks.items() if a is not None and b is not None}


async def begin_text(
    caller: Caller, prompt: Prompt, params: SamplingParams, options: Options, endpoint: str, *, prefix: str,
    names: Mapping[str, str],
) -> Turn:  # fmt: skip
    """A turn without a conversation: admit and submit. `names`: our field -> the client's, for errors.

    Raises InputError, RefusedError, EngineError.
    """
    call = make_call(caller, prompt, params, options, endpoint, new_id(prefix))
    with renamed(names):
        stream = await caller.server.service.submit(call)
    return Turn(call, stream, [None] * params.n, speculates=caller.server.speculates)


async def begin(caller: Caller, asked: Conversation, endpoint: str, *, prefix: str = "chatcmpl-") -> Turn:
    """Check, encode, admit, submit. The caller must read the turn or abort it.

    Raises InputError, RefusedError, EngineError.
    """
    server, choice = caller.server, asked.tool_choice
    with renamed(asked.names):
        tools = check_tools(asked.tools, choice) or None
    parallel = asked.parallel_tool_calls
    check_compression(server, asked.compression, prompt_logprobs=asked.params.prompt_logprobs is not None)
    limits, max_tokens = server.service.limits, asked.params.max_tokens
    check_truncation(asked.truncate, limits, asked.compression)
    server.service.tool_times.answered(caller.tenant.name, asked.messages, server.service.clock.now())
    messages, shown_tools = shown(server, asked.messages, tools, choice, asked.chat_template)
    asked = replace(asked, messages=messages)
    asker = asker_of(caller, asked.options.timeout_s)

    async def encode(said: Sequence[Mapping[str, Any]]) -> Prompt:
        return await server.service.encode_chat(
            said,
            tools=shown_tools,
            chat_template=asked.chat_template,
            chat_template_kwargs=asked.chat_template_kwargs,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            param=asked.param,
            fit=TO_COMPRESS if asked.compression is not None else to_cut(asked.truncate, limits),
            asker=asker,
        )

    async def encode_other(said: Sequence[Mapping[str, Any]]) -> Prompt:
        return await encode(shown(server, said, tools, choice, asked.chat_template)[0])

    prompt = await encode(asked.messages)
    num_given = len(prompt.ids)
    prompt = truncated(prompt, asked.truncate, limits.context[0] - (max_tokens or 1))
    prompt = await within(server, prompt, asked.modules, asked.messages, encode_other)
    if asked.compression is not None:
        prompt = await compress_chat(server, prompt, asked.compression, asked, shown_tools, asker)
    reference = await server.service.encode_reference(asked.prediction, param="prediction.content", asker=asker)
    ends = server.service.need_tokenizer().decode(prompt.ids[-PROMPT_TAIL:], skip_special_tokens=False)
    bound = asked.params.structured_outputs is not None
    kwargs = asked.chat_template_kwargs
    parsers = [
        parser_for(server, tools, choice, kwargs, prompt_text=ends, parallel=parallel, bound=bound, raw=asked.grammars)
        for _ in range(max(1, min(asked.params.n, server.service.limits.max_n)))  # what is more, `submit` refuses
    ]
    with renamed(asked.names):
        params = params_for(server, tools, choice, asked.params, parallel=parallel, grammars=asked.grammars)
    call = make_call(caller, prompt, params, asked.options, endpoint, new_id(prefix))
    call.hints = await in_tokens(asked.bounds, prompt, encode_other, whole=len(prompt.ids) != num_given)
    call.lead = lead_for(
        server, tools, choice, kwargs, prompt_text=ends, bound=bound, continued=asked.continue_final_message
    )
    call.reference = reference if server.speculates else []  # nobody would look at it
    with renamed(asked.names), renamed(bound_by(tools, choice)):
        stream = await server.service.submit(call)
    info = server.client.info
    size = info.block_size if info is not None and info.caches_prefixes else 0
    waits = asked.params.n == 1 and any(hint.action == "pause" for hint in call.hints)
    return Turn(
        call, stream, parsers, speculates=server.speculates, block_size=size,
        paused=server.service.paused if waits else None,
    )  # fmt: skip
