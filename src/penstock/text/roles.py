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


def known_roles(template: str, messages: Sequence[Any], param: str = "messages") -> Sequence[Any]:
    """The messages, with `developer` as `system` where only that is known.

    What is no message at all is left to whoever reads them. Raises: InputError for a role that the template does not
    know, with those it knows.
    """
    roles = dict.fromkeys(_role(message) for message in messages)
    if "developer" in roles and not knows(template, "developer") and knows(template, "system"):
        messages = [m | {"role": "system"} if _role(m) == "developer" else m for m in messages]
        del roles["developer"]
    for role in roles:
        if role and not knows(template, role):
            at = next(i for i, message in enumerate(messages) if _role(message) == role)
            known = ", ".join(name for name in ROLES if knows(template, name))
            raise InputError(
                f"{param}[{at}].role: this model's chat template does not know {role[:64]!r}; it knows {known}",
                param=f"{param}[{at}].role",
            )
    return messages


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
    return (named or role in ("system", "tool")) and _shows(template, role)


@lru_cache(maxsize=256)
def _shows(template: str, role: str) -> bool:
    """Whether the text of a message appears in any of a few conversations."""
    probe = unused_marks([template], 1)[0] + "x"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
    last = {"role": role, "content": probe}
    for messages in ([last, turns[0]], [last], [turns[0], last], [*turns, last], [*turns, last, turns[0]]):
        with suppress(InputError):  # this template takes no such conversation
            if probe in render_chat(template, messages):
                return True
    return False
