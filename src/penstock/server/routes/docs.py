"""/openapi.json, and /docs: the same for people, on one page without assets."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.server.transport.sse import as_json


async def openapi_json(request: Request) -> Response:
    document = request.app.state.server.parts["docs"].document
    return as_json(document)


async def docs(request: Request) -> Response:
    page = request.app.state.server.parts["docs"].page
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return Response(page, media_type="text/html", headers={"content-security-policy": policy})


ROUTES: list[BaseRoute] = [
    Route("/openapi.json", openapi_json, methods=["GET"]),
    Route("/docs", docs, methods=["GET"]),
]
DOCS = {
    ("GET", "/openapi.json"): ("This interface as an OpenAPI 3.1 document", None, None),
    ("GET", "/docs"): ("The same as a page", None, None),
}
