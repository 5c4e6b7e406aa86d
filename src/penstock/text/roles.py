"""Which roles a chat template knows: what another role says is lost, or stands under a name the model never saw."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from penstock.base.errors import InputError
from penstock.text.literals import unused_marks
from penstock.text.template import render_chat

ROLES = ("system", "developer", "user", "assistant", "tool")
_INSTRUCTIONS = ("system", "developer")
_BEFORE = (["user"], ["user", "assistant"], ["system", "user"], ["system", "user", "assistant"])
"""Turns after which instructions are looked for."""


def known_roles(template: str, messages: Sequence[Any], param: str = "messages") -> Sequence[Any]:
    """The messages, with `developer` as `system` where only that is known, and several of these in front as one where
    only one is shown.

    What is no message at all is left to whoever reads them. Raises: InputError for what the template would leave out
    without a word: a role that it does not know (with those it knows), a later system message, tool calls, results
    without a call.
    """
    roles = list(map(_role, messages))
    if "developer" in roles and not knows(template, "developer") and knows(template, "system"):
        messages = [
            m | {"role": "system"} if role == "developer" else m for m, role in zip(messages, roles, strict=True)
        ]
        roles = ["system" if role == "developer" else role for role in roles]
    for role in dict.fromkeys(roles):
        if role and not knows(template, role):
            at = roles.index(role)
            known = ", ".join(name for name in ROLES if knows(template, name))
            raise InputError(
                f"{param}[{at}].role: this model's chat template does not know {role[:64]!r}; it knows {known}",
                param=f"{param}[{at}].role",
            )
    lead = next((i for i, role in enumerate(roles) if role not in _INSTRUCTIONS), len(roles))
    _check_later(template, roles, lead, param)
    if "assistant" in roles or "tool" in roles:
        _check_calls(template, messages, roles, param)
    return _joined(template, messages, roles[:lead])


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    return role if isinstance(role, str) and len(role) <= 64 and isinstance(message, dict) else ""


def knows(template: str, role: str) -> bool:
    """Whether what a role says gets into the prompt, under a name that the model may have seen.

    User and assistant are left to the template, which refuses orders of turns in its own words; so is a tool that it
    names, since what it takes from one may depend on the call.
    """
    # In quotes, but not as a key: `message['content']` names no role.
    named = re.search(rf"(?<!\w\[)(?<!get\()['\"]{re.escape(role)}['\"]", template) is not None
    if role in ("user", "assistant") or (named and role == "tool"):
        return True
    return (named or role in ("system", "tool")) and bool(_shown(template, _anywhere(role)))


def _joined(template: str, messages: Sequence[Any], lead: Sequence[str]) -> Sequence[Any]:
    """Instructions in front, whose roles are `lead`, as one message where a second one would not be shown."""
    if len(lead) < 2 or _shown(template, [[lead[0], f"*{lead[1]}", "user"]]):
        return messages
    parts: list[Any] = []
    for message in messages[: len(lead)]:
        content = message.get("content")
        if not isinstance(content, str | list):
            return messages
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [messages[0] | {"content": parts}, *messages[len(lead) :]]


def _check_later(template: str, roles: Sequence[str], lead: int, param: str) -> None:
    """Raises InputError for instructions behind the beginning (`lead` of them) that would not be shown."""
    for role in _INSTRUCTIONS:
        if role not in roles[lead:]:
            continue
        at = roles.index(role, lead)
        tried = [[*before, f"*{role}", *behind] for before in _BEFORE for behind in ([], ["user"])]
        if _shown(template, tried) is False:
            raise InputError(
                f"{param}[{at}]: this model's chat template leaves out a {role} message there; put it first",
                param=f"{param}[{at}]",
            )


def _check_calls(template: str, messages: Sequence[Any], roles: Sequence[str], param: str) -> None:
    """Raises InputError for calls that would not be shown, or results that would not because they have no call."""
    called = False
    for at, role in enumerate(roles):
        calls = role == "assistant" and bool(messages[at].get("tool_calls"))
        if calls and not _shows_calls(template):
            where = f"{param}[{at}].tool_calls"
            raise InputError(f"{where}: this model's chat template does not show tool calls", param=where)
        called = calls or (called and role == "tool")
        if role == "tool" and not called and _shown(template, _anywhere("tool")) is False:
            raise InputError(
                f"{param}[{at}]: this model's chat template shows the result of a tool only behind its call; send the "
                "assistant's message with tool_calls before it",
                param=f"{param}[{at}]",
            )


def _anywhere(role: str) -> list[list[str]]:
    role, turns = f"*{role}", ["user", "assistant"]
    return [[role, "user"], [role], ["user", role], [*turns, role], [*turns, role, "user"]]


def _shown(template: str, conversations: Sequence[Sequence[str]]) -> bool | None:
    """Whether the message marked by * is shown in any of these roles' conversations; None if none is taken."""
    return _tried(template, tuple(map(tuple, conversations)))


@lru_cache(maxsize=256)
def _tried(template: str, conversations: tuple[tuple[str, ...], ...]) -> bool | None:
    probe = unused_marks([template], 1)[0] + "x"
    found = None
    for roles in conversations:
        messages = [{"role": r.lstrip("*"), "content": probe if r[0] == "*" else "x"} for r in roles]
        with suppress(InputError):  # this template takes no such conversation
            if probe in render_chat(template, messages):
                return True
            found = False
    return found


@lru_cache(maxsize=256)
def _shows_calls(template: str) -> bool:
    """Whether a call's name appears, or this cannot be told; also if the template tells the model of tools: then what
    it shows of earlier calls is as the model was trained."""
    probe = unused_marks([template], 1)[0] + "x"
    call = {"id": "call00000", "type": "function", "function": {"name": probe, "arguments": {"a": "x"}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00000", "content": "x"},
        {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"},
    ]  # fmt: skip
    tool = {"type": "function", "function": {"name": probe, "description": "x", "parameters": {"type": "object"}}}
    taken = False
    for messages, tools in ((turns[:1], [tool]), *((turns[:n], None) for n in (2, 3, 4, 5))):
        with suppress(InputError):
            if probe in render_chat(template, messages, tools=tools):
                return True
            taken = taken or tools is None
    return not taken
