"""Roles that a chat template does not know are refused by name; developer is system where only that is known."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import InputError
from penstock.text.roles import known_roles

ECHO = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
DROPS = "{% for m in messages %}{% if m['role'] == 'user' %}U{{ m['content'] }}{% elif m.role == 'assistant' %}A" \
    "{{ m['content'] }}{% endif %}{% endfor %}"  # fmt: skip
RAISES = "{% for m in messages %}{% if m['role'] not in ['user', 'assistant', 'system'] %}{{ raise_exception('no') }}" \
    "{% endif %}{{ m['content'] }}{% endfor %}"  # fmt: skip
RICH = "{% for m in messages %}{% if m['role'] in ['developer', 'ipython', 'tool'] %}D{% endif %}{{ m['content'] }}" \
    "{% endfor %}"  # fmt: skip


def say(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": "x"} for role in roles]


@pytest.mark.parametrize(("template", "role", "known"), [
    (ECHO, "wizard", "system, user, assistant, tool"), (ECHO, "content", "system, user"), (ECHO, "role", "system"),
    (ECHO, "System", "system"), (DROPS, "system", "user, assistant"), (DROPS, "tool", "user, assistant"),
    (DROPS, "developer", "user, assistant"), (DROPS, "wizard", "user, assistant"), (RAISES, "wizard", "system, user"),
    (RICH, "function", "system, developer, user, assistant, tool"),
])  # fmt: skip
def test_what_nobody_would_read_is_refused(template: str, role: str, known: str) -> None:
    with pytest.raises(InputError, match=f"'{role}'; it knows {known}") as caught:
        known_roles(template, say("user", role, "user"))
    assert caught.value.param == "messages[1].role"


def test_what_is_known_is_left_as_it_is() -> None:
    for template, roles in (
        (ECHO, ("system", "user", "assistant", "tool")), (RAISES, ("system", "user", "assistant")),
        (RICH, ("developer", "user", "ipython", "tool", "assistant")), (DROPS, ("user", "assistant")),
    ):  # fmt: skip
        assert known_roles(template, say(*roles)) == say(*roles)
    odd: list[Any] = [3, {"role": None}, {}, {"role": "x" * 65}]
    assert known_roles(ECHO, odd) == odd, "the reader of messages says what is wrong"


def test_developer_is_system_where_only_that_is_known() -> None:
    assert known_roles(ECHO, say("developer", "user")) == say("system", "user")
    assert known_roles(RAISES, say("user", "developer")) == say("user", "system")
    assert known_roles(RICH, say("developer")) == say("developer")
