"""/v1/chat/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.server.openai.chat import start
from penstock.server.schema.decode import read
from penstock.server.schema.extras import ACCEPTED, REFUSED
from penstock.server.schema.openai import ChatCompletion, ChatRequest
from penstock.server.transport.pieces import Pieces, PiecesResponse
from penstock.server.transport.sse import EventStream, unless_gone
from penstock.server.turns.asking import Caller, caller_of

_TOOLS = "is OpenAI's old name; write tools and tool_choice"
REFUSED_FIELDS = {
    **REFUSED,
    "functions": (([],), _TOOLS),
    "function_call": (("none",), _TOOLS),
    "audio": ((), "is not supported: this model writes text only"),
    "modalities": ((["text"],), 'may only be ["text"]: this model writes text only'),
    "web_search_options": ((), "is not supported: this server searches nothing"),
    "moderation": ((), "is not supported by this server"),
    "echo": ((False,), "is not supported in chats; /v1/completions has it"),
}


async def chat(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, ChatRequest, refused=REFUSED_FIELDS, accepted=ACCEPTED)
    if body.stream:
        return EventStream(await unless_gone(request, start(caller, body)))
    return PiecesResponse(await unless_gone(request, complete(caller, body)))


async def complete(caller: Caller, body: ChatRequest) -> Pieces:
    """The answer to a checked body, for callers that are no HTTP request too; cancelling aborts.

    Raises InputError, RefusedError, WireError, EngineError.
    """
    return await (await start(caller, body)).answer()


ROUTES: list[BaseRoute] = [Route("/v1/chat/completions", chat, methods=["POST"])]
DOCS = {("POST", "/v1/chat/completions"): ("Answer a conversation", ChatRequest, ChatCompletion)}
EXAMPLES = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}}
