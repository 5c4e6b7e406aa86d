"""Requests that the server asks of itself: through the whole application, without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

    from penstock.server.call import Tenant

TENANT = "penstock.tenant"
"""Key of a scope that says who asks; no client can set it, so no key is asked for."""
OFFLINE_S = "penstock.offline_s"
"""Key of a scope: for how many seconds its requests are offline work (`core.request.Request`); absent: they are not."""


@dataclass
class Answer:
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def retry_after_s(self) -> float | None:
        """When the server says that trying again makes sense; None if it does not say."""
        try:
            return float(self.headers["retry-after"])
        except (KeyError, ValueError):
            return None


async def post(
    app: ASGIApp, path: str, body: bytes, tenant: Tenant, request_id: str, offline_s: float | None = None
) -> Answer:
    """Send a JSON body to one of our own paths. Cancelling it is the client going away."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
        TENANT: tenant,
        OFFLINE_S: offline_s,
    }
    answer = Answer()
    pieces: list[bytes] = []
    sent = False
    gone = asyncio.Event()

    async def receive() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in message["headers"]}
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    answer.body = b"".join(pieces)
    return answer
