"""/v1/completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.server.openai.completion import start
from penstock.server.schema.decode import read
from penstock.server.schema.extras import ACCEPTED, REFUSED
from penstock.server.schema.openai import Completion, CompletionRequest
from penstock.server.transport.pieces import Pieces, PiecesResponse
from penstock.server.transport.sse import EventStream, unless_gone
from penstock.server.turns.asking import Caller, caller_of


async def completions(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, CompletionRequest, refused=REFUSED, accepted=ACCEPTED)
    if body.stream:
        return EventStream(await unless_gone(request, start(caller, body)))
    return PiecesResponse(await unless_gone(request, complete(caller, body)))


async def complete(caller: Caller, body: CompletionRequest) -> Pieces:
    """The answer to a checked body, for callers that are no HTTP request too; cancelling aborts.

    Raises InputError, RefusedError, WireError, EngineError.
    """
    return await (await start(caller, body)).answer()


ROUTES: list[BaseRoute] = [Route("/v1/completions", completions, methods=["POST"])]
DOCS = {("POST", "/v1/completions"): ("Complete one or more prompts", CompletionRequest, Completion)}
EXAMPLES = {"/v1/completions": {"prompt": "Once upon a time", "max_tokens": 32}}
