"""What requests that name no sampling parameters get, for every route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.text.defaults import FIELDS, Defaults
from penstock.text.defaults import sampling_defaults as find_defaults

if TYPE_CHECKING:
    from penstock.server.context import Server


def sampling_defaults(server: Server, body: object = None) -> dict[str, Any]:
    """Our fields and their values for what `body`, a request, leaves open (`text.defaults`)."""
    named = [name for name in FIELDS if getattr(body, name, None) is not None]
    return found_defaults(server).beside(named)


def found_defaults(server: Server) -> Defaults:
    """Found once per generation_config."""
    front = server.parts.get("front")
    if front is None:
        return Defaults({})
    known = server.parts.get("defaults")
    if known is None or known[0] is not front.generation_config:
        found = find_defaults(front.generation_config, server.service.limits, front.sampling)
        known = server.parts["defaults"] = (front.generation_config, found)
    defaults: Defaults = known[1]
    return defaults
