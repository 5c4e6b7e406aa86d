"""/v1/messages: Anthropic's API. Errors have its shape by their path (`server.errors`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.core.kv_hints import read_hints
from penstock.core.sampling import SamplingParams
from penstock.server.anthropic.breakpoints import TTL_S, bounds
from penstock.server.anthropic.events import BlockWriter, stop_of
from penstock.server.anthropic.input import (
    chat_messages,
    chat_tool_choice,
    chat_tools,
    form,
    template_kwargs,
)
from penstock.server.encoding import PromptFit
from penstock.server.errors import told
from penstock.server.parsing import check_tools, shown
from penstock.server.schema.decode import read
from penstock.server.schema.forms import REFUSED_IN_MESSAGES, Form
from penstock.server.schema.messages import (
    CacheCreation,
    CountRequest,
    MessageObject,
    MessagesRequest,
    MessageUsage,
    TokenCount,
)
from penstock.server.transport.sse import EventStream, as_json, frame, unless_gone
from penstock.server.turns.asking import Caller, Conversation, Options, asker_of, caller_of, check_model
from penstock.server.turns.defaults import sampling_defaults
from penstock.server.turns.hints import bounds_of
from penstock.server.turns.turn import Turn, begin

_SERVER_SIDE = "is not supported: this server runs no tools"
REFUSED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    **REFUSED_IN_MESSAGES,
    "container": ((), _SERVER_SIDE),
    "mcp_servers": (([],), _SERVER_SIDE),
    "n": ((1,), "is not supported: a message has one answer"),
    "stop": ((), "is OpenAI's name; write stop_sequences"),
    "max_completion_tokens": ((), "is OpenAI's name; write max_tokens"),
}
ACCEPTED = frozenset(
    (
        "metadata", "service_tier", "context_management", "inference_geo", "speed", "diagnostics",
        "user_profile_id", "workspace_id", "betas",
    )
)  # fmt: skip
"""Fields that Anthropic's clients send and that have no meaning for one model on one machine."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "ignore_eos", "stop_token_ids", "repetition_detection",
)  # fmt: skip


async def messages(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, MessagesRequest, refused=REFUSED_FIELDS, accepted=ACCEPTED)
    run = await unless_gone(request, start(caller, body))
    if body.stream:
        return EventStream(run)
    return as_json(await unless_gone(request, run.answer()))


async def start(caller: Caller, body: MessagesRequest) -> MessageRun:
    """Raises InputError, RefusedError, EngineError. The caller must read what it gets, or abort it."""
    model = check_model(caller.server, body.model)
    bound = form(body)
    asked = _conversation(body, _params(caller, body, bound))
    asked.names = {**asked.names, **(bound.names if bound is not None else {})}
    asked.options = Options(
        model=body.model,
        stream=bool(body.stream), priority=body.priority, cache_salt=body.cache_salt, timeout_s=body.timeout,
        tpot_slo_ms=body.tpot_slo_ms, ttft_slo_ms=body.ttft_slo_ms, cut_max_tokens=True,
        reader=(body.expected_ttft_s, body.expected_tds),
    )  # fmt: skip
    asked.compression = body.prompt_compression
    asked.bounds = [*bounds(body), *bounds_of(read_hints(body.kv_hints), asked.messages)]
    turn = await begin(caller, asked, "messages", prefix="msg_")
    return MessageRun(turn, model, caller.server.config.max_stream_chars, body.max_tokens)


def _params(caller: Caller, body: MessagesRequest, bound: Form | None) -> SamplingParams:
    defaults = sampling_defaults(caller.server, body)
    given = {name: getattr(body, name) for name in _SAMPLING}
    given = {name: defaults.get(name) if value is None else value for name, value in given.items()}
    given = {name: value for name, value in given.items() if value is not None}
    asked = None if bound is None else bound.asked
    return SamplingParams(max_tokens=body.max_tokens, stop=body.stop_sequences, structured_outputs=asked, **given)


def _conversation(body: CountRequest, params: SamplingParams) -> Conversation:
    """Raises InputError."""
    listed, prefilled = chat_messages(body)
    choice, parallel = chat_tool_choice(body.tool_choice)
    return Conversation(
        messages=listed,
        params=params,
        tools=chat_tools(body.tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs=template_kwargs(body),
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        names={"stop": "stop_sequences"},
    )


class MessageRun:
    """A message under way. Leaving `frames` early, or cancelling `answer`, aborts it."""

    def __init__(self, turn: Turn, model: str, max_stream_chars: int, max_tokens: int) -> None:
        self._turn = turn
        self._model = model
        self._max_tokens = max_tokens
        self._max_stream_chars = max_stream_chars
        self._writer = BlockWriter()
        self._stop: tuple[str | None, str | None] = (None, None)

    @property
    def too_slow(self) -> bool:
        return self._turn.stream.unread_chars > self._max_stream_chars

    def abort(self) -> None:
        self._turn.abort()

    def _message(self) -> MessageObject:
        return MessageObject(
            id=self._turn.id, model=self._model, content=self._writer.blocks, stop_reason=self._stop[0],
            stop_sequence=self._stop[1], usage=self._usage(),
        )  # fmt: skip

    def _usage(self) -> MessageUsage:
        usage = self._turn.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        kept = self._turn.written(cached)
        hour = sum(num for ttl_s, num in kept.items() if ttl_s >= TTL_S["1h"])
        made = sum(kept.values())
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached - made, output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached, cache_creation_input_tokens=made,
            cache_creation=CacheCreation(ephemeral_5m_input_tokens=made - hour, ephemeral_1h_input_tokens=hour),
            weight_version=usage.weight_version, weight_versions=usage.weight_versions,
        )  # fmt: skip

    def _room_was_less(self) -> bool:
        return self._turn.usage().completion_tokens < self._max_tokens

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Begins with the first token, when it is known what the cache had. Raises WireError."""
        async with aclosing(self._turn.pieces()) as pieces:
            begun = False
            async for listed in pieces:
                if not begun:
                    begun = True
                    yield {"type": "message_start", "message": self._message()}
                    yield {"type": "ping"}
                for piece in listed:
                    if piece.finish_reason is not None:
                        self._stop = stop_of(piece.finish_reason, piece.stop_reason, self._room_was_less())
                    for event in self._writer.feed(piece.events):
                        yield event
        for event in self._writer.finish():
            yield event

    async def answer(self) -> MessageObject:
        """Raises WireError."""
        async for _ in self._events():
            pass
        return self._message()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error after the beginning is one of them."""
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield _frame(event)
        except Exception as error:
            yield _frame(told(error).body("/v1/messages"))
            return
        delta = {"stop_reason": self._stop[0], "stop_sequence": self._stop[1]}
        yield _frame({"type": "message_delta", "delta": delta, "usage": self._usage()})
        yield _frame({"type": "message_stop"})


def _frame(event: dict[str, Any]) -> bytes:
    return frame(event, event["type"])


async def count_tokens(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, CountRequest, refused=REFUSED_FIELDS, accepted=ACCEPTED)
    check_model(caller.server, body.model)
    asked = _conversation(body, SamplingParams())
    service = caller.server.service
    tools = check_tools(asked.tools, asked.tool_choice)
    said, shown_tools = shown(caller.server, asked.messages, tools, asked.tool_choice, asked.chat_template)
    counting = service.encode_chat(
        said,
        tools=shown_tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        fit=PromptFit.to_count(service.limits),
        asker=asker_of(caller),
    )
    prompt = await unless_gone(request, counting)
    return as_json(TokenCount(input_tokens=len(prompt.ids)))


ROUTES: list[BaseRoute] = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
DOCS = {
    ("POST", "/v1/messages"): ("Answer a conversation (Anthropic's API)", MessagesRequest, MessageObject),
    ("POST", "/v1/messages/count_tokens"): ("Count the tokens of a conversation", CountRequest, TokenCount),
}
EXAMPLES = {
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello!"}]},
}
