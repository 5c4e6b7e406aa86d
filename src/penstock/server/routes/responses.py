"""/v1/responses: create, stream, retrieve, follow, cancel, delete, and what went in."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError, RefusedError
from penstock.core.kv_hints import read_hints
from penstock.server.encoding import PromptFit
from penstock.server.parsing import check_tools, shown
from penstock.server.parsing.custom import as_functions, read_tools
from penstock.server.responses.events import Item, replay
from penstock.server.responses.input import (
    Find,
    chat_messages,
    form,
    input_items,
)
from penstock.server.responses.run import Replayed, ResponseRun, event_frame
from penstock.server.responses.store import ResponseStore, Stored
from penstock.server.schema.decode import read
from penstock.server.schema.extras import ACCEPTED, REFUSED
from penstock.server.schema.responses import (
    InputItems,
    InputTokens,
    ResponseDeleted,
    ResponseObject,
    ResponsesRequest,
)
from penstock.server.transport.sse import EventStream, as_json, unless_gone
from penstock.server.turns.asking import Caller, Conversation, Options, asker_of, caller_of, check_model, means_another
from penstock.server.turns.defaults import sampling_defaults
from penstock.server.turns.hints import bounds_of
from penstock.server.turns.turn import begin

_REFUSED = {
    **REFUSED,
    "conversation": ((), "is not supported; use previous_response_id"),
    "prompt": ((), "is not supported: there are no stored prompts; write instructions and input"),
    "max_tokens": ((), "belongs to chat completions; here it is max_output_tokens"),
    "max_completion_tokens": ((), "belongs to chat completions; here it is max_output_tokens"),
    "messages": ((), "belongs to chat completions; here it is input"),
    "context_management": (([],), "is not supported: a conversation is never cut"),
}
_ACCEPTED = ACCEPTED | {"client_metadata", "stream_options"}
_INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")
MAX_METADATA = 16
MAX_PAGE = 100


async def create(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, ResponsesRequest, refused=_REFUSED, accepted=_ACCEPTED)
    run = await unless_gone(request, start(caller, body))
    if body.stream:
        return EventStream(run.reader())
    if body.background:
        return as_json(run.snapshot())
    return as_json(await unless_gone(request, run.wait()))


async def start(caller: Caller, body: ResponsesRequest) -> ResponseRun:
    """Check, encode, admit, submit. Raises InputError, RefusedError, EngineError."""
    server, store = caller.server, _store(caller)
    model = check_model(server, body.model)
    keep = body.store is not False
    _check(body, keep)
    asked, items = await _conversation(caller, body)
    turn = await begin(caller, asked, "responses", prefix="resp_")
    response = ResponseObject(
        id=turn.id,
        service_tier="default" if turn.call.offline_s is None else "flex",
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model,
        parallel_tool_calls=asked.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        reasoning={
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": body.reasoning.summary if body.reasoning else None,
        },
        store=keep,
        temperature=asked.params.temperature,
        text={"format": _format(body)},
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_p=asked.params.top_p,
        user=body.user,
        metadata=body.metadata or {},
    )
    tools = read_tools(body.tools, nested=False)
    return ResponseRun(turn, response, items, store, server.config.max_stream_chars, tools.custom, tools.spaces)


def _check(body: ResponsesRequest, keep: bool) -> None:
    """What this path cannot do is refused by name. Raises InputError."""
    if body.n not in (None, 1):
        raise InputError("n must be 1: a response has one answer", param="n")
    if body.background and not keep:
        raise InputError("background needs store: nobody could fetch the answer", param="background")
    if body.truncation not in (None, "disabled"):
        raise InputError("truncation must be disabled: an input is never cut", param="truncation")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise InputError("logprobs are given by /v1/chat/completions, not here", param="top_logprobs")
    if body.prompt_logprobs is not None:
        raise InputError("prompt_logprobs are given by /v1/completions, not here", param="prompt_logprobs")
    if body.response_format is not None:
        raise InputError("response_format belongs to chat completions; here it is text.format", param="response_format")
    for i, name in enumerate(body.include or ()):
        if name not in _INCLUDES:
            raise InputError(f"include[{i}] is {name[:60]!r}, which this server does not have", param=f"include[{i}]")
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA or any(len(k) > 64 or len(v) > 512 for k, v in metadata.items()):
        raise InputError(f"metadata may have {MAX_METADATA} keys of 64 and values of 512 characters", param="metadata")


async def _conversation(caller: Caller, body: ResponsesRequest) -> tuple[Conversation, list[Item]]:
    """The chat request that this one is, and its items with those it goes on from."""
    work = caller.server.slices.work(caller.tenant)
    own = input_items(body.input, _finder(caller))
    await work.pause()
    before: list[Item] = []
    if body.previous_response_id is not None:
        before = msgspec.json.decode(_stored(caller, body.previous_response_id, "previous_response_id").items)
    items = [*before, *own]
    params = body.sampling(sampling_defaults(caller.server, body), max_tokens=body.max_output_tokens, logprobs=None)
    asked_form = form(body)
    if asked_form is not None:
        params = msgspec.structs.replace(params, structured_outputs=asked_form.asked)
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning.effort)
    tools = read_tools(body.tools, nested=False)
    messages = chat_messages(items, body.instructions, num_stored=len(before))
    await work.pause()
    asked = Conversation(
        messages=messages,
        params=params,
        options=Options(
            model=body.model,
            stream=bool(body.stream),
            background=bool(body.background),
            priority=body.priority,
            tier=body.service_tier,
            cache_salt=body.cache_salt,
            timeout_s=body.timeout,
            tpot_slo_ms=body.tpot_slo_ms,
            ttft_slo_ms=body.ttft_slo_ms,
            reader=(body.expected_ttft_s, body.expected_tds),
            cut_max_tokens=means_another(caller.server, body.model, body.truncate_prompt_tokens),
        ),
        tools=tools.listed,
        tool_choice=as_functions(body.tool_choice, tools),
        grammars=tools.grammars,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        chat_template_kwargs=kwargs or None,
        names={
            "max_tokens": "max_output_tokens",
            "messages": "input",
            **tools.names,
            **(asked_form.names if asked_form else {}),
        },
        param="input",
        compression=body.prompt_compression,
        truncate=body.truncate_prompt_tokens,
        bounds=bounds_of(read_hints(body.kv_hints), messages),
    )
    return asked, items


# -- what is stored ----------------------------------------------------------------------------------------------


async def retrieve(request: Request) -> Response:
    caller, response_id = caller_of(request), request.path_params["response_id"]
    stream = request.query_params.get("stream", "").lower() in ("true", "1")
    after = _integer(request, "starting_after", -1, low=0) if stream else -1
    run = cast("ResponseRun | None", _store(caller).get_running(caller.tenant, response_id))
    if run is not None:
        return EventStream(run.reader(after)) if stream else as_json(run.snapshot())
    entry = _stored(caller, response_id)
    if not stream:
        return Response(entry.response, media_type="application/json")
    frames = list(entry.frames) or [event_frame(e) for e in replay(msgspec.json.decode(entry.response))]
    return EventStream(Replayed(frames[after + 1 :]))


async def delete(request: Request) -> Response:
    caller, response_id = caller_of(request), request.path_params["response_id"]
    store = _store(caller)
    run = store.get_running(caller.tenant, response_id)
    if run is not None:
        await run.cancel()
    if not store.delete(caller.tenant, response_id) and run is None:
        raise _unknown(response_id)
    return as_json(ResponseDeleted(id=response_id))


async def cancel(request: Request) -> Response:
    """What has ended already stays as it is."""
    caller, response_id = caller_of(request), request.path_params["response_id"]
    run = cast("ResponseRun | None", _store(caller).get_running(caller.tenant, response_id))
    if run is None:
        return Response(_stored(caller, response_id).response, media_type="application/json")
    await run.cancel()
    return as_json(run.response)


async def list_input(request: Request) -> Response:
    caller, response_id = caller_of(request), request.path_params["response_id"]
    entry = _stored(caller, response_id)
    items: list[Item] = msgspec.json.decode(entry.items)[: entry.num_input]
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InputError("order must be asc or desc", param="order")
    if order == "desc":
        items.reverse()
    after = request.query_params.get("after")
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise InputError(f"after: this response has no item {after[:80]!r}", param="after")
        items = items[at + 1 :]
    limit = _integer(request, "limit", 20, low=1, high=MAX_PAGE)
    page = items[:limit]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return as_json(InputItems(data=page, first_id=ends[0], last_id=ends[1], has_more=len(items) > limit))


async def count_input(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, ResponsesRequest, refused=_REFUSED, accepted=_ACCEPTED)
    check_model(caller.server, body.model)
    asked, _ = await _conversation(caller, body)
    service = caller.server.service
    tools = check_tools(asked.tools, asked.tool_choice)
    messages, shown_tools = shown(caller.server, asked.messages, tools, asked.tool_choice, asked.chat_template)
    counting = service.encode_chat(
        messages,
        tools=shown_tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        param="input",
        fit=PromptFit.to_count(service.limits),
        asker=asker_of(caller),
    )
    prompt = await unless_gone(request, counting)
    return as_json(InputTokens(input_tokens=len(prompt.ids)))


def _format(body: ResponsesRequest) -> dict[str, Any]:
    """As it was given."""
    given = body.text.format if body.text is not None else None
    plain: dict[str, Any] = {"type": "text"} if given is None else msgspec.to_builtins(given)
    return {name: value for name, value in plain.items() if value is not None}


def _store(caller: Caller) -> ResponseStore:
    store: ResponseStore = caller.server.parts["store"]
    return store


def _stored(caller: Caller, response_id: str, param: str | None = None) -> Stored:
    entry = _store(caller).get(caller.tenant, response_id)
    if entry is None:
        raise _unknown(response_id, param)
    return entry


def _finder(caller: Caller) -> Find:
    """Each response is decoded once, however often a request refers to it."""
    seen: dict[str, dict[str, Item]] = {}

    def find(item_id: str) -> Item | None:
        entry = _store(caller).get_maker(caller.tenant, item_id)
        if entry is None:
            return None
        if entry.id not in seen:
            seen[entry.id] = {item["id"]: item for item in msgspec.json.decode(entry.response)["output"]}
        return seen[entry.id][item_id]

    return find


def _unknown(response_id: str, param: str | None = None) -> RefusedError:
    return RefusedError(
        f"there is no stored response {response_id[:80]!r}: it never was, was deleted, or is too old",
        status=404, code="response_not_found", param=param or "response_id",
    )  # fmt: skip


def _integer(request: Request, name: str, default: int, *, low: int, high: int = 2**31) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not given.isascii() or not given.isdigit() or not low <= int(given[:12]) <= high:
        raise InputError(f"{name} must be an integer from {low} to {high}", param=name)
    return int(given)


ROUTES: list[BaseRoute] = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input, methods=["POST"]),
    Route("/v1/responses/{response_id}", retrieve, methods=["GET"]),
    Route("/v1/responses/{response_id}", delete, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/cancel", cancel, methods=["POST"]),
    Route("/v1/responses/{response_id}/input_items", list_input, methods=["GET"]),
]
_ONE = "/v1/responses/{response_id}"
DOCS: dict[tuple[str, str], tuple[str, type | None, type | None]] = {
    ("POST", "/v1/responses"): ("Answer a conversation (OpenAI's Responses API)", ResponsesRequest, ResponseObject),
    ("POST", "/v1/responses/input_tokens"): ("Count the tokens of an input", ResponsesRequest, InputTokens),
    ("GET", _ONE): ("A stored response, or one that runs", None, ResponseObject),
    ("DELETE", _ONE): ("Forget a stored response", None, ResponseDeleted),
    ("POST", _ONE + "/cancel"): ("Stop a response that runs", None, ResponseObject),
    ("GET", _ONE + "/input_items"): ("What went into a stored response", None, InputItems),
}
EXAMPLES = {
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 32},
    "/v1/responses/input_tokens": {"input": "Hello!"},
}
