"""A conversation in the page: Markdown, copying, editing, stopping, history, files, tools, keys and screen readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from penstock.server.live import LiveServer
from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from tests.api.chromium import Chromium
from tests.api.conftest import ANSWERED, ask, axe, needs_browser, reload
from tests.api.scripted import Scripts
from tests.api.watch import on_loop

pytestmark = needs_browser
TURNS = "document.querySelectorAll('.turn').length"
TEXT = """# The mill

It has a **wheel**, `water` and [a page](https://example.com/mill).

- [x] one
- [ ] two

| a | b |
|---|--:|
| 1 | 22 |

```python
def turn(wheel):
    return wheel + 1  # once
```

```nonsense
as it is
```
"""


def script(monkeypatch: pytest.MonkeyPatch, events: Sequence[Event], finish: str = "stop", **options: Any) -> Scripts:
    """What the model says from now on."""
    scripts = Scripts(events, finish=finish, **options)
    monkeypatch.setattr("penstock.server.openai.chat.begin", scripts.begin)
    return scripts


def say(monkeypatch: pytest.MonkeyPatch, text: str) -> Scripts:
    return script(monkeypatch, [Content(text[i : i + 7]) for i in range(0, len(text), 7)])


def asked(scripts: Scripts, n: int = -1) -> list[tuple[Any, Any]]:
    return [(message["role"], message.get("content")) for message in scripts.asked[n].messages]


def click(page: Chromium, selector: str, text: str = "") -> None:
    page.run(
        f"[...document.querySelectorAll({selector!r})].findLast((b) => b.textContent.startsWith({text!r})).click()"
    )


def answered(page: Chromium, turns: int) -> None:
    page.until(f"{TURNS} === {turns} && !document.querySelector('.busy') && {ANSWERED}")


def clipboard(page: Chromium) -> None:
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")


def test_markdown_is_drawn_with_coloured_code_and_copied_as_it_was_written(
    page: Chromium, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, TEXT)
    clipboard(page)
    ask(page, "Hello")
    answered(page, 2)
    page.until("document.querySelector('.hljs-keyword')")
    drawn = "document.querySelector('.turn.model .markdown')"
    found = {tag: page.run(f"{drawn}.querySelectorAll('{tag}').length") for tag in ("h1", "strong", "li", "td", "pre")}
    assert found == {"h1": 1, "strong": 1, "li": 2, "td": 2, "pre": 2}
    assert page.run(f"[...{drawn}.querySelectorAll('li')].map((li) => li.textContent.trim())") == ["☑ one", "☐ two"]
    link = page.run(f"(({{href, target, rel}}) => [href, target, rel])({drawn}.querySelector('a'))")
    assert link[:2] == ["https://example.com/mill", "_blank"]
    assert {"noopener", "noreferrer"} <= set(link[2].split())
    assert page.run(f"[...{drawn}.querySelectorAll('.code .bar span')].map((s) => s.textContent)") == [
        "python",
        "nonsense",
    ]
    click(page, ".turn.model .actions button", "Copy")
    assert page.until("window.copied") == TEXT
    page.run("document.querySelector('.code .bar button').click()")
    assert page.until("window.copied.startsWith('def') && window.copied").endswith("# once")
    click(page, ".turn.user .actions button", "Copy")
    page.until("window.copied === 'Hello'")


def test_copying_works_where_there_is_no_clipboard(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    """On plain http from another machine a browser gives none."""
    say(monkeypatch, "some words")
    page.run("""{
        Object.defineProperty(navigator, 'clipboard', { value: undefined });
        document.addEventListener('copy', () => { window.copied = document.activeElement.value; });
    }""")
    ask(page, "Hello")
    answered(page, 2)
    click(page, ".turn.model .actions button", "Copy")
    page.until("window.copied === 'some words'")
    page.until("document.getElementById('said').textContent.startsWith('Copied')")


def test_a_text_that_comes_in_pieces_is_drawn_as_the_whole_one(page: Chromium) -> None:
    same = page.run(f"""import('/page/markdown.js').then(({{ MarkdownView }}) => {{
        const text = {json.dumps(TEXT + TEXT + "[late][1]" + chr(10) * 2 + "[1]: https://example.com/late")};
        const grown = new MarkdownView(), whole = new MarkdownView();
        for (let i = 0; i < text.length; i += 3) {{ grown.text = text.slice(0, i); grown.draw(); }}
        grown.end(text);
        whole.end(text);
        const all = whole.element.innerHTML;
        return grown.element.innerHTML === all && all.includes('example.com/late');
    }})""")
    assert same


def test_an_answer_is_shown_while_it_comes(page: Chromium, shown: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    script(monkeypatch, [Content("One **two** "), Content("three"), Content(" and the end")], gate=gate)
    ask(page, "Hello")
    shown_so_far = page.until("(document.querySelector('.busy .markdown')?.textContent.includes('three')) && "
                              "document.querySelector('.busy .markdown').innerHTML")  # fmt: skip
    assert "<strong>two</strong> three" in shown_so_far
    assert not page.run("document.getElementById('stop').hidden")
    on_loop(shown, gate.set)
    answered(page, 2)
    assert page.run("document.querySelector('.turn.model .markdown').textContent.trim()") == "One two three and the end"


def test_an_answer_is_regenerated_and_a_message_edited(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = say(monkeypatch, "first")
    ask(page, "one", system="")
    answered(page, 2)
    ask(page, "two")
    answered(page, 4)
    assert asked(scripts) == [("user", "one"), ("assistant", "first"), ("user", "two")]
    scripts = say(monkeypatch, "other")
    click(page, ".turn.model:last-child .actions button", "Regenerate")
    page.until("document.querySelector('.turn.model:last-child .markdown').textContent.trim() === 'other'")
    answered(page, 4)
    assert asked(scripts) == [("user", "one"), ("assistant", "first"), ("user", "two")]
    click(page, ".turn.user:first-child .actions button", "Edit")
    assert not page.run("document.getElementById('editing').hidden")
    assert page.run("document.getElementById('prompt').value") == "one"
    page.press("Escape", 27)
    assert page.run("document.getElementById('editing').hidden")
    assert page.run("document.getElementById('prompt').value") == ""
    click(page, ".turn.user:first-child .actions button", "Edit")
    ask(page, "!")
    answered(page, 2)
    assert asked(scripts) == [("user", "one!")]


def test_an_edit_that_fails_leaves_the_conversation_as_it_was(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "first")
    ask(page, "one", system="")
    answered(page, 2)
    click(page, ".turn.user .actions button", "Edit")
    monkeypatch.undo()
    ask(page, "!", temperature="-3")
    page.until("document.querySelector('.turn.model .error')")
    assert page.run("document.getElementById('prompt').value") == "one!"
    page.run("document.getElementById('prompt').value = ''")
    scripts = say(monkeypatch, "second")
    ask(page, "two", temperature="")
    answered(page, 4)
    assert asked(scripts) == [("user", "one"), ("assistant", "first"), ("user", "two")]
    page.forgive("400 (Bad Request)")


def test_escape_stops_and_what_was_said_so_far_is_kept(page: Chromium, shown: LiveServer) -> None:
    ask(page, "Tell me a long story.", max_tokens="480", temperature="1")
    page.until("document.querySelector('.turn.model .markdown')?.textContent.length > 3")
    page.press("Escape", 27)
    facts = page.until(ANSWERED + ".textContent")
    page.until("document.getElementById('stop').hidden")
    said = page.run("document.querySelector('.turn.model .markdown').textContent")
    reload(page)
    page.until(f"{TURNS} === 2")
    assert page.run("document.querySelector('.turn.model .markdown').textContent") == said
    assert page.run(ANSWERED + ".textContent") == facts


# -- history ---------------------------------------------------------------------------------------------------------


def test_history_survives_a_reload_and_is_deleted_for_good(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = say(monkeypatch, "**an answer**")
    page.run("document.getElementById('settings').open = true")
    page.type("#system", "Be brief.")
    click(page, "#prompt-save")
    assert page.run("JSON.parse(localStorage.getItem('penstock-prompts'))") == ["Be brief."]
    ask(page, "first conversation")
    answered(page, 2)
    reload(page)
    page.until(f"{TURNS} === 2")
    assert page.run("document.querySelector('.turn.model strong').textContent") == "an answer"
    assert page.run("document.getElementById('system').value") == "Be brief."
    assert page.run("document.getElementById('prompts').selectedOptions[0].textContent") == "Be brief."
    ask(page, "and on")
    answered(page, 4)
    assert [role for role, _ in asked(scripts)] == ["system", "user", "assistant", "user"]
    click(page, "#new")
    ask(page, "second conversation")
    answered(page, 2)
    click(page, "#history-open")
    titles = "[...document.querySelectorAll('#chats .open')].map((b) => b.firstChild.textContent)"
    assert page.run(titles) == ["second conversation", "first conversation"]
    click(page, "#chats .open", "first")
    assert page.run(TURNS) == 4
    click(page, "#history-open")
    click(page, "#chats li:first-child .quiet", "Delete")
    assert len(page.run(titles)) == 1
    page.run("document.getElementById('history-delete').click()")
    assert len(page.run(titles)) == 1, "it asks first"
    page.run("document.getElementById('history-delete').click()")
    assert page.run(titles) == []
    page.run("document.getElementById('history').close()")
    assert page.run(TURNS) == 0
    kept = "[...Object.keys(localStorage), ...Object.keys(sessionStorage)].filter((k) => k.startsWith('penstock'))"
    assert page.run(kept) == []
    reload(page)
    assert page.run(TURNS) == 0


def test_an_answer_that_comes_while_everything_is_deleted_is_not_kept(page: Chromium) -> None:
    ask(page, "Tell me a long story.", max_tokens="480", temperature="1")
    page.until("document.querySelector('.turn.model .markdown')?.textContent.length > 3")
    page.run("{ const b = document.getElementById('history-delete'); b.click(); b.click(); }")
    page.until("document.getElementById('stop').hidden")
    assert page.run("Object.keys(localStorage)") == []
    assert page.run(TURNS) == 0


def test_history_is_bounded(page: Chromium) -> None:
    """In number and in characters; the oldest go."""
    left = page.run("""import('/page/store.js').then((store) => {
        const turns = (size) => [{ role: 'user', text: 'x'.repeat(size) }];
        const chat = (n, size) => ({ id: 'c' + n, when: n, kind: 'chat', turns: turns(size) });
        for (let n = 0; n < store.MOST_CHATS + 5; n += 1) store.save(chat(n, 10));
        const many = store.chats().map((c) => c.when);
        for (let n = 1000; n < 1005; n += 1) store.save(chat(n, store.MOST_CHARS / 3));
        const large = store.chats().map((c) => c.when), said = store.save(chat(2000, store.MOST_CHARS));
        return [many.length, many.at(-1), large, said, store.chats().length];
    })""")
    assert left[:2] == [100, 5]
    assert left[2] == [1004, 1003]
    assert "not kept" in left[3]
    assert left[4] == 2


# -- files, tools, thoughts, JSON ------------------------------------------------------------------------------------


def attach(page: Chromium, name: str, content: str) -> None:
    page.run(f"""{{
        const given = new DataTransfer();
        given.items.add(new File([{content}], {name!r}));
        const field = document.getElementById('files');
        field.files = given.files;
        field.dispatchEvent(new Event('change'));
    }}""")


def test_text_files_become_a_part_of_the_message(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = say(monkeypatch, "yes")
    attach(page, "notes.md", "'a ```` fence\\n'")
    page.until("document.querySelectorAll('#attached li').length === 1")
    for name, content, why in (
        ("wheel.png", "new Uint8Array([137, 80, 78, 71, 0])", "wheel.png is not text"),
        ("latin.txt", "new Uint8Array([0xe4, 0x20])", "latin.txt is not text in UTF-8"),
        ("big.log", "'x'.repeat(300000)", "big.log has 300 kB"),
    ):
        attach(page, name, content)
        assert page.until(f"document.getElementById('note').textContent.startsWith({why!r})")
    for name in ("one.txt", "two.txt"):
        attach(page, name, "'x'.repeat(262144)")
    page.until("document.getElementById('note').textContent.startsWith('With two.txt')")
    assert page.run("document.querySelectorAll('#attached li').length") == 2
    page.run("document.querySelector('#attached li:last-child button').click()")
    ask(page, "What is in it?", system="")
    answered(page, 2)
    assert asked(scripts) == [("user", "File notes.md:\n`````\na ```` fence\n`````\n\nWhat is in it?")]
    assert page.run("document.querySelector('.turn.user .chip').textContent").startswith("notes.md")
    assert page.run("document.getElementById('attached').hidden")


def test_calls_are_shown_as_such_and_take_results(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    events = [
        Reasoning("I look. <b>"),
        CallStart(0, "call_a", "weather"),
        CallArguments(0, '{"city":'),
        CallArguments(0, '"Bern"}'),
    ]
    scripts = script(monkeypatch, events, "tool_calls")
    ask(page, "How is it there?", system="", tools=json.dumps(tools))
    answered(page, 2)
    assert scripts.asked[-1].tools == tools
    assert page.run("document.querySelector('.call .what').textContent") == "Call of weather"
    assert page.run("document.querySelector('.call pre').textContent").strip() == '{\n  "city": "Bern"\n}'
    assert not page.run("document.querySelector('details.thoughts').open")
    assert page.run("document.querySelector('details.thoughts .text').textContent") == "I look. <b>"
    scripts = say(monkeypatch, "It rains.")
    page.type(".results textarea", '{"sky": "grey"}')
    click(page, ".results button", "Send result")
    answered(page, 4)
    call = {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
    sent = scripts.asked[-1].messages
    assert sent[1]["tool_calls"] == [call]
    assert (sent[2]["role"], sent[2]["tool_call_id"], sent[2]["content"]) == ("tool", "call_a", '{"sky": "grey"}')
    assert page.run("document.querySelectorAll('.results').length") == 0
    reload(page)
    page.until(f"{TURNS} === 4")
    assert page.run("document.querySelectorAll('.call, .turn.tool').length") == 2


def test_json_is_drawn_as_code(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, '{"name": "mill", "text": "``` and **stars**"}')
    ask(page, "Hello")
    answered(page, 2)
    shown = page.run("document.querySelector('.turn.model pre').textContent")
    assert json.loads(shown) == {"name": "mill", "text": "``` and **stars**"}
    assert "\n  " in shown
    say(monkeypatch, '{"id": 12345678901234567890}')
    ask(page, "Hello")
    answered(page, 4)
    assert (
        page.run("document.querySelector('.turn:last-child pre').textContent").strip() == '{"id": 12345678901234567890}'
    )


def test_a_schema_reaches_the_model_and_bad_json_is_told(page: Chromium, shown: LiveServer) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    schema["additionalProperties"] = False
    page.run("document.getElementById('format').value = 'json_schema'")
    ask(page, "Hello", schema="{", system="", max_tokens="100")
    assert "not JSON" in page.until("document.getElementById('note').textContent")
    assert page.until("document.getElementById('prompt').value") == "Hello"
    page.run("document.getElementById('prompt').value = ''")
    ask(page, "Hello", schema=json.dumps(schema))
    answered(page, 2)
    assert json.loads(page.run("document.querySelector('.turn.model pre').textContent")).keys() == {"n"}


def test_the_models_are_those_of_the_server(page: Chromium, shown: LiveServer) -> None:
    names = [model["id"] for model in httpx.get(shown.url + "/v1/models").json()["data"]]
    assert page.run("[...document.getElementById('model').options].map((o) => o.value)") == names


# -- keys and screen readers -----------------------------------------------------------------------------------------


def test_single_keys_work_and_can_be_turned_off(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "some words")
    clipboard(page)
    ask(page, "one")
    answered(page, 2)
    page.press("Escape", 27)
    assert page.run("document.activeElement.id") == "talk"
    page.press("c", 67)
    page.until("window.copied === 'some words'")
    page.press("?", 191)
    page.until("document.getElementById('keys').open")
    page.press("Escape", 27)
    page.until("!document.getElementById('keys').open")
    page.press("h", 72)
    page.until("document.getElementById('history').open")
    page.press("Escape", 27)
    page.press("/", 191)
    page.until("document.activeElement.id === 'prompt' && document.activeElement.value === ''")
    page.press("ArrowUp", 38)
    page.until("document.getElementById('prompt').value === 'one'")
    page.press("Escape", 27)
    page.press("Escape", 27)
    page.run("document.getElementById('single').click()")
    page.press("n", 78)
    assert page.run(TURNS) == 2
    page.run("document.getElementById('single').click()")
    page.press("n", 78)
    page.until(f"{TURNS} === 0")


def test_screen_readers_hear_the_whole_answer_once(page: Chromium, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, TEXT)
    page.run("""{
        window.heard = [];
        new MutationObserver(() => heard.push(document.getElementById('said').textContent))
            .observe(document.getElementById('said'), { childList: true });
    }""")
    ask(page, "Hello")
    answered(page, 2)
    page.until("window.heard.length === 2")
    assert page.run("window.heard") == ["The model answers", TEXT]
    assert page.run("document.getElementById('log').getAttribute('aria-live')") == "off"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_axe_finds_nothing(page: Chromium, monkeypatch: pytest.MonkeyPatch, scheme: str, width: int) -> None:
    """axe-core's rules, best practices too, over everything that can be on the page."""
    events = [Reasoning("Hm."), Content(TEXT), CallStart(0, "call_a", "weather"), CallArguments(0, '{"city": "Bern"}')]
    page.look(width, 900, scheme, mobile=width < 500)
    script(monkeypatch, events, "tool_calls")
    attach(page, "notes.md", "'some notes'")
    ask(page, "Hello", tools="[]")
    answered(page, 2)
    page.run("document.getElementById('format').value = 'json_schema'")
    page.run("document.getElementById('format').dispatchEvent(new Event('change'))")
    page.run("for (const box of document.querySelectorAll('details')) box.open = true")
    page.until("document.querySelector('.hljs-keyword')")
    attach(page, "more.md", "'more notes'")
    for opened in ("", "history", "keys"):
        page.run(f"document.getElementById({opened!r})?.showModal()")
        assert axe(page) == [], opened
        page.run(f"document.getElementById({opened!r})?.close()")
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "it has to be moved sideways"
