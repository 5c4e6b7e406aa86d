"""Answers to clients of HTTP/1.0."""

from __future__ import annotations

from typing import Any


def as_http_1_0(cycle: Any) -> None:
    """An answer of unknown length then ends with its connection: HTTP/1.0 has no chunks (RFC 9112, section 6.1).

    `cycle`: uvicorn's, before its task has begun. Mutates.
    """
    cycle.waiting_for_100_continue = False
    send = cycle.send
    unbounded = False

    async def send_unchunked(message: Any) -> None:
        nonlocal unbounded
        if message["type"] == "http.response.start":
            unbounded = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if unbounded:
                cycle.chunked_encoding = False
        elif unbounded:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked
