"""The playground at / and the interface at /docs. Their files need no key, as they hold no secrets."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.server.errors import WireError

FOLDER = Path(__file__).parent.parent / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'; "
# Nothing but the sanitiser may make markup of text.
_PAGE = _POLICY + "require-trusted-types-for 'script'; trusted-types dompurify"
# The viewer draws its icons from its own style sheet, and makes markup by itself.
_DOCS = _POLICY + "img-src 'self' data:"
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def files() -> dict[str, tuple[bytes, str, str]]:
    """path below the folder -> (content, media type, entity tag)."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in TYPES:
            content = path.read_bytes()
            tag = '"' + hashlib.blake2b(content, digest_size=12).hexdigest() + '"'
            found[path.relative_to(FOLDER).as_posix()] = (content, TYPES[path.suffix], tag)
    return found


def _file(request: Request, name: str, policy: str = _PAGE) -> Response:
    known = files().get(name)
    if known is None:
        raise WireError(404, f"there is nothing at {request.url.path}")
    content, kind, tag = known
    headers = HEADERS | {"etag": tag, "content-security-policy": policy}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


async def page(request: Request) -> Response:
    return _file(request, "index.html")


async def docs(request: Request) -> Response:
    return _file(request, "docs.html", _DOCS)


async def asset(request: Request) -> Response:
    return _file(request, request.path_params["name"])


ROUTES: list[BaseRoute] = [
    Route("/", page, methods=["GET"]),
    Route("/docs", docs, methods=["GET"]),
    Route("/page/{name:path}", asset, methods=["GET"]),
]
DOCS = {("GET", "/docs"): ("This interface as a page where it can be tried", None, None)}
