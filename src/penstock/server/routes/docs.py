"""/openapi.json, which /docs shows to people."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.server.transport.sse import as_json


async def openapi_json(request: Request) -> Response:
    document = request.app.state.server.parts["docs"].document
    return as_json(document)


ROUTES: list[BaseRoute] = [
    Route("/openapi.json", openapi_json, methods=["GET"]),
]
DOCS = {
    ("GET", "/openapi.json"): ("This interface as an OpenAPI 3.1 document", None, None),
}
