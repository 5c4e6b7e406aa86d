"""Hints: what clients and orchestrators know of keys and values that the engine cannot know.

The field `kv_hints` is a list of actions, or the envelope of vLLM's and SGLang's proposals around one:

    [{"action": "retain", "ttl": "5m"}]
    {"protocol_version": "0.1", "message_id": "...", "actions": [{"action_id": "...", "action_type": "retain",
     "action_version": "1.0", "payload": {"ttl": "5m"}}]}

A hint changes what is kept and where, never a token. Source: vLLM's request for comments 53421 (the envelope), SGLang's
27574 (the actions); Anthropic's `cache_control` says the same of blocks of content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.base.errors import InputError

ACTIONS: Mapping[str, frozenset[str]] = {
    "retain": frozenset(("ttl", "tokens", "messages")),
    "pin": frozenset(("ttl", "tokens", "messages")),
    "demote": frozenset(("from_token",)),
    "prefetch": frozenset(),
    "share": frozenset(),
    "pause": frozenset(("expected",)),
}
"""Actions and their fields."""
MIN_TTL_S, MAX_TTL_S, DEFAULT_TTL_S = 1.0, 86400.0, 300.0
MAX_HINTS = 8
WHOLE = -1
"""In place of a number of tokens: all that there will be."""
_TTL = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(s|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_ENVELOPE = frozenset(("protocol_version", "message_id", "actions"))
_ACTION = frozenset(("action_id", "action_type", "action_version", "payload"))
_NAMES = ("action_type", "action")


class KVHint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One action on the blocks of one request.

    Attributes:
        action: a name in ACTIONS.
        ttl_s: seconds on the engine's clock for which `retain` and `pin` hold, from the end of the request on. Of
            `pause`: how long the tools that the answer calls are expected to take; 0: as long as they did before.
        num_tokens: they hold for the blocks within so many tokens, `demote` for those behind; WHOLE: for all.
    """

    action: str
    ttl_s: float = 0.0
    num_tokens: int = WHOLE


class AskedHint(msgspec.Struct, frozen=True):
    """A hint as it was written. `num_messages`: instead of tokens, where `messages` were given. `param`: its name."""

    hint: KVHint
    num_messages: int | None = None
    param: str = "kv_hints"


def read_hints(given: Any, param: str = "kv_hints") -> list[AskedHint]:
    """What the field says. Raises InputError that names the field within it."""
    where, actions = param, given
    if isinstance(given, Mapping):
        _only(given, _ENVELOPE, param)
        where, actions = f"{param}.actions", given.get("actions")
        version = given.get("protocol_version", "0.1")
        if not isinstance(version, str) or not version.startswith("0."):
            raise InputError(f"{param}.protocol_version must be 0.1, not {_show(version)}",
                             param=f"{param}.protocol_version")  # fmt: skip
    if given is None:
        return []
    if not isinstance(actions, list | tuple):
        raise InputError(f"{where} must be a list of actions, such as [{{\"action\": \"retain\", \"ttl\": \"5m\"}}]",
                         param=where)  # fmt: skip
    if len(actions) > MAX_HINTS:
        raise InputError(f"{where} has {len(actions)} actions; at most {MAX_HINTS} are possible", param=where)
    found = [_hint(action, f"{where}[{n}]") for n, action in enumerate(actions)]
    names = [asked.hint.action for asked in found]
    if "prefetch" in names and ({"retain", "pin", "demote", "pause"} & set(names)):
        raise InputError(f"{where} prefetches and keeps at once: a request that only loads blocks has none of its own; "
                         "send the other hints with the request that follows", param=where)  # fmt: skip
    return found


def _hint(action: Any, where: str) -> AskedHint:
    if not isinstance(action, Mapping):
        raise InputError(f"{where} must be an object with the field action", param=where)
    field = _NAMES["action" in action]
    name = action.get(field)
    if not isinstance(name, str) or name not in ACTIONS:
        raise InputError(f"{where}.{field} must be one of {', '.join(ACTIONS)}, not {_show(name)}",
                         param=f"{where}.{field}")  # fmt: skip
    if field == "action_type":
        _only(action, _ACTION, where)
        payload, at = action.get("payload") or {}, f"{where}.payload"
        if not isinstance(payload, Mapping):
            raise InputError(f"{at} must be an object", param=at)
    else:
        payload, at = {key: value for key, value in action.items() if key != "action"}, where
    _only(payload, ACTIONS[name], at, f" of {name}")
    number = _whole(payload, "from_token" if name == "demote" else "tokens", at)
    messages = _whole(payload, "messages", at)
    if number is not None and messages is not None:
        raise InputError(f"{at} has both tokens and messages; give one of them", param=f"{at}.messages")
    ttl_s = read_ttl(payload.get("ttl"), f"{at}.ttl") if "ttl" in ACTIONS[name] else 0.0
    if payload.get("expected") is not None:
        ttl_s = read_ttl(payload["expected"], f"{at}.expected")
    if name == "demote" and number is None:
        number = 0
    return AskedHint(KVHint(name, ttl_s, WHOLE if number is None else number), messages, where)


def read_ttl(given: Any, param: str) -> float:
    """Seconds of a time to live: a number of them, or a text such as 30s, 5m, 1h. Raises InputError."""
    if given is None:
        return DEFAULT_TTL_S
    match = _TTL.fullmatch(given) if isinstance(given, str) else None
    if match is not None:
        seconds = float(match[1]) * _SECONDS[match[2]]
    elif isinstance(given, int | float) and not isinstance(given, bool):
        seconds = float(given)
    else:
        raise InputError(f"{param} must be a number of seconds, or a text such as 30s, 5m or 1h, not {_show(given)}",
                         param=param)  # fmt: skip
    if not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise InputError(
            f"{param} must be from {MIN_TTL_S:g} to {MAX_TTL_S:g} seconds, not {_show(given)}", param=param
        )
    return seconds


def plain(asked: Iterable[AskedHint]) -> list[KVHint]:
    """Hints of a prompt that is no conversation. Raises InputError for those that count its messages."""
    asked = list(asked)
    for one in asked:
        if one.num_messages is not None:
            raise InputError(f"{one.param}.messages needs a conversation; give tokens", param=f"{one.param}.messages")
    return [one.hint for one in asked]


def _whole(given: Mapping[str, Any], name: str, where: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise InputError(f"{where}.{name} must be a whole number from 0, not {_show(value)}", param=f"{where}.{name}")
    return value


def _only(given: Mapping[str, Any], known: frozenset[str], where: str, whose: str = "") -> None:
    for name in given:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise InputError(f"{where}.{str(name)[:40]} is no field{whose}; possible: {listed}",
                             param=f"{where}.{str(name)[:40]}")  # fmt: skip


def _show(value: Any) -> str:
    return repr(value)[:60]
