"""Versions of a message in the page: editing and regenerating keep what was there. And what empty parameters say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.server.live import LiveServer
from penstock.text.defaults import MILD, Wanted
from tests.api.chromium import Chromium
from tests.api.conftest import ask, needs_browser, reload
from tests.api.test_page_chat import answered, asked, click, say
from tests.api.watch import Endings

SHOWN = "[...document.querySelectorAll('.turn')].map((t) => t.querySelector('.markdown, .text').textContent.trim())"
PAGERS = "[...document.querySelectorAll('.pager')].map((p) => p.textContent)"
FIELDS = ("temperature", "top_p", "top_k", "min_p")


def turn_to(page: Chromium, n: int, direction: str, expected: list[str]) -> None:
    page.run(f"document.querySelectorAll('.pager')[{n}].querySelector('[aria-label=\"{direction}\"]').click()")
    assert page.run(SHOWN) == expected


@pytest.fixture
def edited(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> Chromium:
    """one A two B; then the first message as one! C."""
    for text, answer in (("one", "A"), ("two", "B")):
        say(monkeypatch, answer)
        ask(page, text, system="")
        page.until(f"{SHOWN}.includes({answer!r})")
    answered(page, 4)
    say(monkeypatch, "C")
    click(page, ".turn.user:first-child .actions button", "Edit")
    ask(page, "!")
    page.until(f"{SHOWN}.includes('C')")
    answered(page, 2)
    return page


@needs_browser
def test_an_edited_message_keeps_what_was_there(edited: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    page = edited
    assert page.run(SHOWN) == ["one!", "C"]
    assert page.run(PAGERS) == ["‹2/2›"]
    turn_to(page, 0, "Earlier version", ["one", "A", "two", "B"])
    scripts = say(monkeypatch, "D")
    ask(page, "three")
    answered(page, 6)
    assert [text for _, text in asked(scripts)] == ["one", "A", "two", "B", "three"], "only what is shown is sent"
    turn_to(page, 0, "Later version", ["one!", "C"])
    reload(page)
    page.until(f"{PAGERS}.length === 1")
    assert page.run(SHOWN) == ["one!", "C"]
    turn_to(page, 0, "Earlier version", ["one", "A", "two", "B", "three", "D"])
    reload(page)
    page.until(f"{PAGERS}.length === 1")
    assert page.run(SHOWN) == ["one", "A", "two", "B", "three", "D"], "the version that was shown last"


@needs_browser
def test_versions_stand_within_versions(edited: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    page = edited
    turn_to(page, 0, "Earlier version", ["one", "A", "two", "B"])
    for answer in ("B2", "B3"):
        say(monkeypatch, answer)
        click(page, ".turn.model:last-child .actions button", "Regenerate")
        page.until(f"{SHOWN}.includes({answer!r})")
        answered(page, 4)
    assert page.run(PAGERS) == ["‹1/2›", "‹3/3›"]
    turn_to(page, 1, "Earlier version", ["one", "A", "two", "B2"])
    turn_to(page, 0, "Later version", ["one!", "C"])
    turn_to(page, 0, "Earlier version", ["one", "A", "two", "B2"])
    turn_to(page, 1, "Earlier version", ["one", "A", "two", "B"])
    say(monkeypatch, "E")
    click(page, ".turn.user:first-child .actions button", "Edit")
    ask(page, "?")
    page.until(f"{SHOWN}.includes('E')")
    assert page.run(PAGERS) == ["‹3/3›"]
    turn_to(page, 0, "Earlier version", ["one!", "C"])
    turn_to(page, 0, "Earlier version", ["one", "A", "two", "B"])
    assert page.run(PAGERS) == ["‹1/3›", "‹1/3›"]


@needs_browser
def test_an_edit_that_fails_makes_no_version(edited: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    page = edited
    kept = "localStorage.getItem(Object.keys(localStorage).find((key) => key.startsWith('penstock-chat-')))"
    before = page.run(kept)
    click(page, ".turn.user:first-child .actions button", "Edit")
    monkeypatch.undo()
    ask(page, "?", temperature="-3")
    page.until("document.querySelector('.turn.model .error')")
    assert page.run(PAGERS) == ["‹2/2›"]
    assert page.run(kept) == before
    page.run("document.getElementById('prompt').value = ''; document.getElementById('temperature').value = ''")
    page.forgive("400 (Bad Request)")


@needs_browser
def test_versions_are_turned_by_keys_and_said(edited: Chromium) -> None:
    page = edited
    focus = "document.activeElement.getAttribute('aria-label')"
    assert page.run("document.querySelector('.pager').getAttribute('role')") == "group"
    assert page.run("document.querySelector('.pager').getAttribute('aria-label')") == "Version 2 of 2"
    assert page.run("document.querySelectorAll('.pager button:disabled').length") == 1
    page.run("document.querySelector('.pager button').focus()")
    page.press("ArrowLeft", 37)
    assert page.run(SHOWN) == ["one", "A", "two", "B"]
    page.until("document.getElementById('said').textContent === 'Version 1 of 2'")
    assert page.run(focus) == "Later version", "where it can go on"
    page.press("ArrowLeft", 37)
    page.press("ArrowRight", 39)
    assert page.run(SHOWN) == ["one!", "C"]
    assert page.run(focus) == "Earlier version"
    page.press("Enter", 13)
    assert page.run(SHOWN) == ["one", "A", "two", "B"]


@needs_browser
def test_versions_are_exported_and_deleted(edited: Chromium) -> None:
    page = edited
    page.run("""{
        URL.createObjectURL = (blob) => {
            blob.text().then((text) => { window.saved = text; });
            return 'about:blank#';
        };
        HTMLAnchorElement.prototype.click = function () { window.named = this.download; };
    }""")
    click(page, "#history-open")
    click(page, "#history-export")
    [chat] = json.loads(page.until("window.saved"))
    assert page.run("window.named") == "penstock-history.json"
    assert [turn["text"] for turn in chat["turns"]] == ["one!", "C"]
    assert chat["turns"][0]["others"][1] is None
    assert [turn["text"] for turn in chat["turns"][0]["others"][0]] == ["one", "A", "two", "B"]
    click(page, "#chats li:first-child .quiet", "Delete")
    assert page.run("document.getElementById('history-export').disabled")
    assert page.run("Object.keys(localStorage).filter((key) => key.startsWith('penstock-chat-'))") == []
    page.run("document.getElementById('history').close()")
    assert page.run(PAGERS) == []


@needs_browser
def test_a_text_and_its_completion_are_one_version(page: Chromium, shown: LiveServer) -> None:
    endings = Endings(shown)
    page.run("document.getElementById('tab-completion').click()")
    ask(page, "Once", max_tokens="4", seed="1")
    answered(page, 1)
    endings.wait()
    for i, (button, more) in enumerate((("Regenerate", ""), ("Edit", " upon"))):
        click(page, ".turn.model .actions button", button)
        if more:
            ask(page, more)
        page.until(f"{PAGERS}[0] === '‹{i + 2}/{i + 2}›'")
        endings.wait()
    given = "document.querySelector('.turn.model .given').textContent"
    assert page.run(given) == "Once upon"
    page.run("document.querySelector('.pager button').click()")
    assert (page.run(given), page.run(PAGERS)) == ("Once", ["‹2/3›"])
    page.run("document.getElementById('seed').value = ''")


# -- what empty fields say -------------------------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize(
    ("said", "mode", "empty", "beside"),
    [
        ({}, "auto", {**MILD, "top_k": 0}, [1, 1, 0, 0]),
        ({"top_k": 20, "temperature": 0.6}, "auto", {"temperature": 0.6, "top_p": 1, "top_k": 20, "min_p": 0}, None),
        ({"top_k": 20}, "vllm", {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0}, None),
    ],
)
def test_empty_fields_say_what_the_server_does(
    page: Chromium,
    shown: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, Any],
    mode: str,
    empty: dict[str, float],
    beside: list[float] | None,
) -> None:
    """And it does so: the server's own parameters are compared with the fields."""
    assert shown.server is not None
    parts = shown.server.parts
    front = parts["front"]
    parts["front"] = replace(front, generation_config=said, sampling=Wanted(mode))
    placeholders = f"{list(FIELDS)}.map((id) => Number(document.getElementById(id).placeholder))"
    scripts = say(monkeypatch, "yes")

    def compare(fields: list[float]) -> None:
        assert page.run(placeholders) == fields
        ask(page, "Hello")
        page.until("!document.querySelector('.busy')")
        used = scripts.asked[-1].params
        filled = page.run(f"{list(FIELDS)}.map((id) => document.getElementById(id).value)")
        assert [getattr(used, name) for name in FIELDS] == [
            float(value) if value else field for value, field in zip(filled, fields, strict=True)
        ]

    try:
        silent = [empty[name] for name in FIELDS]
        page.until(f"JSON.stringify({placeholders}) === JSON.stringify({silent})")
        compare(silent)
        answered(page, 2)
        page.run(
            "{ const t = document.getElementById('top_p'); t.value = '0.5'; t.dispatchEvent(new Event('input')); }"
        )
        compare(silent if beside is None else beside)
        answered(page, 4)
    finally:
        parts["front"] = front


@needs_browser
def test_the_longest_answer_is_the_models_where_it_says_one(page: Chromium, shown: LiveServer) -> None:
    assert shown.server is not None
    parts = shown.server.parts
    front = parts["front"]
    placeholder = "document.getElementById('max_tokens').placeholder"
    assert page.until(placeholder) == "what fits"
    parts["front"] = replace(front, generation_config={"max_new_tokens": 77})
    try:
        page.until(f"{placeholder} === '77'")
        page.run("document.getElementById('tab-completion').click()")
        assert page.run(placeholder) == "128"
    finally:
        parts["front"] = front
