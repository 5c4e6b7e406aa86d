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


FIRST = "{% if messages[0].role == 'system' %}S{{ messages[0].content }}{% endif %}{% for m in messages %}" \
    "{% if m.role == 'user' %}U{{ m.content }}{% elif m.role == 'assistant' %}A{{ m.content }}{% endif %}" \
    "{% endfor %}"  # fmt: skip


def test_several_system_messages_in_front_become_the_one_that_is_shown() -> None:
    asked = [{"role": "system", "content": "a"}, {"role": "developer", "content": [{"type": "text", "text": "b"}]}]
    found = known_roles(FIRST, [*asked, *say("user")])
    assert found[0]["role"] == "system"
    assert [part["text"] for part in found[0]["content"]] == ["a", "b"]
    assert found[1:] == say("user")
    assert known_roles(ECHO, [*say("system", "system", "user")]) == say("system", "system", "user")
    odd: list[Any] = [{"role": "system", "content": 3}, {"role": "system", "content": "b"}, *say("user")]
    assert known_roles(FIRST, odd) == odd, "the reader of messages says what is wrong"


def test_a_system_message_that_would_be_lost_is_refused() -> None:
    for roles, at in ((("user", "system", "user"), 1), (("system", "user", "assistant", "developer", "user"), 3)):
        with pytest.raises(InputError, match="leaves out") as caught:
            known_roles(FIRST, say(*roles))
        assert caught.value.param == f"messages[{at}]"
    assert known_roles(ECHO, say("user", "system")) == say("user", "system")


def test_calls_that_would_be_lost_are_refused() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said: list[Any] = [*say("user"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(InputError, match="does not show tool calls") as caught:
        known_roles(ECHO, said)
    assert caught.value.param == "messages[1].tool_calls"
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    shows = ECHO + "{% for m in messages %}" + calls + "{% endfor %}"
    assert known_roles(shows, said) == said
    tools = ECHO + "{% if tools %}{{ tools | tojson }}{% endif %}"
    assert known_roles(tools, said) == said, "a template for tools knows what it does"
    for nothing in (None, []):
        said[1] = {"role": "assistant", "content": "x", "tool_calls": nothing}
        assert known_roles(ECHO, said) == said
