"""What requests that name no sampling parameters get, for every route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.text.defaults import sampling_defaults as find_defaults

if TYPE_CHECKING:
    from penstock.server.context import Server


def sampling_defaults(server: Server) -> dict[str, Any]:
    """Our fields and their values (`text.defaults`). Found once per generation_config."""
    front = server.parts.get("front")
    if front is None:
        return {}
    known = server.parts.get("defaults")
    if known is None or known[0] is not front.generation_config:
        found = find_defaults(front.generation_config, server.service.limits, front.sampling)
        known = server.parts["defaults"] = (front.generation_config, found)
    return dict(known[1])
