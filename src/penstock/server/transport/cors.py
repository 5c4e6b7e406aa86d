"""Which pages browsers may send requests from (CORS): those of `--allowed-origins`, and no others.

Source: WHATWG Fetch, section 3.2 (CORS protocol).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_EXPOSED = b"x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-limit-tokens, " \
    b"x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"  # fmt: skip


class Cors:
    """Outside of everything else: a preflight carries no key. Other origins are answered as if CORS did not exist."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._all = "*" in origins
        self._origins = {origin.rstrip("/").encode("latin-1", "replace") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is None or not (self._all or origin in self._origins):
            await self._app(scope, receive, send)
            return
        allowed = [
            (b"access-control-allow-origin", b"*" if self._all else origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        ]
        wanted = headers.get(b"access-control-request-method")
        if scope["method"] == "OPTIONS" and wanted is not None:
            allowed += [
                (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
                (b"access-control-max-age", b"600"),
                (b"x-request-id", b"req-" + secrets.token_hex(12).encode()),
            ]
            asked = headers.get(b"access-control-request-headers", b"")
            if asked and len(asked) <= 1024:
                allowed.append((b"access-control-allow-headers", asked))
            await send({"type": "http.response.start", "status": 204, "headers": allowed})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", []).extend(allowed)
            await send(message)

        await self._app(scope, receive, send_allowed)
