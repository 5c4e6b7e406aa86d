"""`cache_control` of Anthropic's requests: blocks up to a breakpoint are retained for five minutes or an hour.

The order of a prompt is tools, system, messages. What a breakpoint on tools or on the system text ends with is where
the first message begins, since templates put tools before or behind the system text.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.base.errors import InputError
from penstock.core.kv_hints import KVHint
from penstock.server.anthropic.input import chat_messages
from penstock.server.schema.messages import MessagesRequest
from penstock.server.turns.hints import Bound
from penstock.text.boundaries import other_text

MAX_BREAKPOINTS = 4
TTL_S = {"5m": 300.0, "1h": 3600.0}
_TEXTS = ("text", "thinking")

Path = tuple[str | int, ...]


class _Place(NamedTuple):
    """A text of a request, or a mark: `path` leads to the object or list that holds it under `key`."""

    path: Path
    key: str | int


def bounds(body: MessagesRequest) -> list[Bound]:
    """What is to be retained, at most one for each time to live, and up to where. Raises InputError."""
    if body.cache_control is None and not _is_marked([*(body.tools or []), body.system, body.messages]):
        return []  # most requests: all of their blocks are looked at, and nothing is made for each
    marks: list[tuple[int, float]] = []  # (how many texts lie before it, seconds)
    places: list[_Place] = []
    for step in _walk(body):
        if isinstance(step, _Place):
            places.append(step)
        else:
            marks.append((len(places), step))
    if body.cache_control is not None:  # "automatic caching": at the end
        marks.append((len(places), _ttl_s(body.cache_control, "cache_control")))
    if len(marks) > MAX_BREAKPOINTS:
        raise InputError(f"cache_control stands at {len(marks)} blocks; at most {MAX_BREAKPOINTS} are possible",
                         param="cache_control")  # fmt: skip
    last = {ttl_s: max(at for at, own in marks if own == ttl_s) for _, ttl_s in marks}
    return [Bound(KVHint("retain", ttl_s), _changed(body, places[at:])) for ttl_s, at in last.items()]


def _is_marked(items: Sequence[Any]) -> bool:
    for item in items:
        if isinstance(item, dict):
            if item.get("cache_control") is not None or _is_marked((item.get("content"),)):
                return True
        elif isinstance(item, list) and _is_marked(item):
            return True
    return False


def _walk(body: MessagesRequest) -> Iterator[_Place | float]:
    """Texts and marks (seconds) in the order of the prompt. Raises InputError."""
    before = [mark for i, tool in enumerate(body.tools or []) for mark in _mark(tool, "tools", i)]
    if isinstance(body.system, list):
        for i, block in enumerate(body.system):
            before += _mark(block, "system", i)
    yield from before
    for i, message in enumerate(body.messages):
        content = message.get("content")
        if isinstance(content, str):
            yield _Place((i,), "content")
        elif isinstance(content, list):
            yield from _blocks(content, (i, "content"), f"messages[{i}].content")


def _blocks(blocks: Sequence[Any], path: Path, where: str) -> Iterator[_Place | float]:
    for j, block in enumerate(blocks):
        if not isinstance(block, dict):
            continue
        inner = block.get("content")
        if isinstance(inner, list):
            yield from _blocks(inner, (*path, j, "content"), f"{where}[{j}].content")
        for key in (*_TEXTS, *(("content",) if isinstance(inner, str) else ())):
            if isinstance(block.get(key), str) and block[key]:
                yield _Place((*path, j), key)
        yield from _mark(block, where, j)


def _mark(block: Any, where: str, at: int) -> list[float]:
    given = block.get("cache_control") if isinstance(block, dict) else None
    return [] if given is None else [_ttl_s(given, f"{where}[{at}].cache_control")]


def _ttl_s(given: Any, where: str) -> float:
    if not isinstance(given, dict) or given.get("type") != "ephemeral":
        raise InputError(f'{where} must be {{"type": "ephemeral"}}, with "ttl": "5m" or "1h" or without',
                         param=where)  # fmt: skip
    for name in given:
        if name not in ("type", "ttl", "scope"):
            raise InputError(f"{where}.{str(name)[:40]} is no field; possible: type, ttl", param=where)
    ttl = given.get("ttl", "5m")
    if ttl not in TTL_S:
        raise InputError(f"{where}.ttl must be 5m or 1h, not {str(ttl)[:40]!r}", param=f"{where}.ttl")
    return TTL_S[ttl]


def _changed(body: MessagesRequest, behind: Sequence[_Place]) -> list[dict[str, Any]] | None:
    """Chat's messages of the same request, the first of these texts another one; None without any."""
    if not behind:
        return None
    path, key = behind[0]
    messages = copy.copy(body.messages)
    messages[int(path[0])] = copy.deepcopy(messages[int(path[0])])
    at: Any = messages
    for step in path:
        at = at[step]
    at[key] = other_text(at[key])
    return chat_messages(msgspec.structs.replace(body, messages=messages))[0]
