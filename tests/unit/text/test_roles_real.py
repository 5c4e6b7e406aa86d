"""Under no published template is anything of a conversation lost without a word: it is shown, or refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from penstock.base.errors import InputError
from penstock.text.roles import known_roles
from penstock.text.template import render_chat
from tests.unit.text.published import NAMES, template

SHAPES = (
    "u", "su", "du", "sua", "ssu", "sdu", "dsu", "ddu", "sssu", "usu", "udu", "uasu", "suasu", "uaus", "suads", "us",
    "uc", "uct", "uctau", "suctau", "ucttau", "fu", "ufu", "uf", "uxu", "ut", "uau", "susau", "duadu",
)  # fmt: skip
ROLES = {"u": "user", "s": "system", "d": "developer", "a": "assistant", "c": "assistant", "t": "tool",
         "f": "function", "x": "critic"}  # fmt: skip


def conversation(shape: str, kind: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages, and what each of them says."""
    out: list[dict[str, Any]] = []
    said = []
    for n, letter in enumerate(shape):
        word = f"word{n}said"
        message: dict[str, Any] = {"role": ROLES[letter], "content": word}
        if kind == "parts":
            message["content"] = [{"type": "text", "text": word}, {"type": "text", "text": word + "too"}]
        if letter == "c":
            function = {"name": word, "arguments": '{"a": 1}'}
            message["tool_calls"] = [{"id": "call12345", "type": "function", "function": function}]
            message["content"] = None
        elif kind == "nulls":
            message |= {"tool_calls": None, "name": None, "refusal": None, "function_call": None}
        if letter == "t":
            message |= {"tool_call_id": "call12345", "name": "f"}
        out.append(message)
        said.append(word)
        if letter != "c" and kind == "parts":
            said.append(word + "too")
    return out, said


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["text", "parts", "nulls"])
def test_everything_is_shown_or_refused(name: str, kind: str) -> None:
    source, taken = template(name), list[str]()
    for shape in SHAPES:
        messages, said = conversation(shape, kind)
        try:
            text = render_chat(source, known_roles(source, messages))
        except InputError:
            continue
        lost = [word for word in said if word not in text]
        assert not lost, (shape, lost)
        taken.append(shape)
    assert "u" in taken
    assert not {"fu", "ufu", "uf", "uxu"} & set(taken), "nobody's roles"


def test_what_is_taken_under_which_template() -> None:
    def takes(name: str, shape: str) -> bool:
        source = template(name)
        try:
            return bool(render_chat(source, known_roles(source, conversation(shape, "text")[0])))
        except InputError:
            return False

    for shape in ("su", "du", "ssu", "sdu", "usu", "uasu", "uct", "uctau"):
        assert takes("qwen2.5.tokenizer_config.json", shape), shape
    for shape in ("su", "du", "ssu", "sdu"):
        assert takes("smollm3.chat_template.jinja", shape), shape
    for shape in ("su", "ssu", "sdu", "dsu"):
        assert takes("mistralrs_llama2.json", shape), f"{shape}: several become the one that it takes"
    for name, shape in product(("mistralrs_llama2.json", "smollm3.chat_template.jinja"), ("usu", "suads")):
        assert not takes(name, shape), (name, shape)
    for shape in ("uc", "uct"):
        assert not takes("mistralrs_chatml.json", shape), "it would show the result of a call that nobody made"
