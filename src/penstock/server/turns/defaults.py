"""What requests that name no sampling parameters get, for every route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.sampling import SamplingParams
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


def shown_defaults(server: Server) -> dict[str, Any]:
    """For the page's empty fields. `silent`: what a request that names none of FIELDS gets; `beside`: what is left for
    the others once it names one; `whose`: "model", "mild" (`text.defaults.MILD`) or "neutral"."""
    found = found_defaults(server)

    def whole(values: dict[str, Any]) -> dict[str, Any]:
        plain = {name: getattr(SamplingParams(), name) for name in FIELDS}
        return {name: values.get(name, value) for name, value in plain.items()} | {
            "max_tokens": values.get("max_tokens")
        }

    own = any(name in found.values for name in FIELDS)
    return {
        "silent": whole(found.values),
        "beside": whole(found.beside(FIELDS)),
        "whose": "mild" if found.mild else "model" if own else "neutral",
    }
