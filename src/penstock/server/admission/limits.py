"""What a tenant with limits has left, in the headers that clients know: OpenAI's, and Anthropic's on its paths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

OPENAI, ANTHROPIC = b"x-ratelimit-", b"anthropic-ratelimit-"
KINDS = ("limit", "remaining", "reset")
EXPOSED = tuple(
    name
    for what in ("requests", "tokens")
    for kind in KINDS
    for name in (f"x-ratelimit-{kind}-{what}", f"anthropic-ratelimit-{what}-{kind}")
)
"""For pages of other origins."""


@dataclass(frozen=True)
class Left:
    """Of one limit. `what`: requests (at once) or tokens (a minute); `reset_s`: seconds until requests are possible
    again, or until all tokens are there again."""

    what: str
    limit: int
    remaining: int
    reset_s: float


def limit_headers(lefts: list[Left], path: str, unix_s: float) -> list[tuple[bytes, bytes]]:
    """`unix_s`: the time now, since 1970."""
    out = []
    for left in lefts:
        values = {"limit": str(left.limit), "remaining": str(left.remaining)}
        if path.startswith("/v1/messages"):
            values["reset"] = _moment(unix_s + left.reset_s)
            out += [(f"{left.what}-{kind}", values[kind]) for kind in KINDS]
        else:
            values["reset"] = duration(left.reset_s)
            out += [(f"{kind}-{left.what}", values[kind]) for kind in KINDS]
    prefix = ANTHROPIC if path.startswith("/v1/messages") else OPENAI
    return [(prefix + name.encode(), value.encode()) for name, value in out]


def duration(seconds: float) -> str:
    """As OpenAI writes it: 0s, 20ms, 1s, 6m0s, 1h2m3s; rounded up, so that it is over by then."""
    if seconds <= 0:
        return "0s"
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if whole >= 60 else "") + f"{whole % 60}s"


def _moment(unix_s: float) -> str:
    """RFC 3339, in UTC, rounded up."""
    return datetime.fromtimestamp(math.ceil(unix_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
