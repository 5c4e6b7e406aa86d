"""The page at /: what it is made of, and that it works in a browser."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from penstock.server.live import LiveServer
from penstock.server.routes.page import FOLDER, files
from penstock.server.turns.logprobs import TokenTexts, Written
from penstock.text.detokenize import IncrementalDetokenizer
from tests.api.chromium import Chromium
from tests.api.conftest import ANSWERED, READY, ask, needs_browser
from tests.api.watch import Endings, small

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script><b>'


# -- without a browser -----------------------------------------------------------------------------------------------


def test_the_page_needs_no_key_and_its_policy_forbids_everything_foreign() -> None:
    with small(api_key="sesame") as server:
        for path in ("/", *(f"/page/{name}" for name in files())):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert "require-trusted-types-for 'script'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "sesame" not in answer.text
        assert httpx.get(server.url + "/internal/state").status_code == 401


def test_what_the_page_asks_for_exists(shown: LiveServer) -> None:
    html = httpx.get(shown.url + "/").text
    wanted = set(re.findall(r'(?:src|href)="(page/[^"]+)"', html))
    for name, (content, _, _) in files().items():
        if name.endswith(".js") and "/" not in name:
            wanted |= {"page/" + other for other in re.findall(r'from "\./([^"]+)"', content.decode())}
    assert len(wanted) >= 15
    for path in wanted:
        assert httpx.get(f"{shown.url}/{path}").status_code == 200, path


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    """Of what is ours. What others wrote is vendored as it is, and the policy and the browser tests hold it."""
    for name, (content, _, _) in files().items():
        if name.startswith("vendor/"):
            continue
        text = content.decode()
        assert set(re.findall(r"(?:https?:)?//[a-z][\w.]+", text)) <= {"http://www.w3.org"}, name
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text), name
    for name in ("index.html", "docs.html"):
        html = files()[name][0].decode()
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/", "/page"])
def test_only_the_pages_files_are_served(shown: LiveServer, path: str) -> None:
    answer = httpx.get(shown.url + path)
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_an_unchanged_file_is_not_sent_again(shown: LiveServer) -> None:
    first = httpx.get(shown.url + "/page/style.css")
    again = httpx.get(shown.url + "/page/style.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_package_contains_the_page() -> None:
    assert {"index.html", "style.css", "main.js", "icon.svg"} <= set(files())
    known = (".html", ".css", ".js", ".svg", ".txt", ".json")
    assert all(path.suffix in known for path in FOLDER.rglob("*") if path.is_file())


# -- in a browser ----------------------------------------------------------------------------------------------------


@needs_browser
def test_a_chat_comes_into_the_page(page: Chromium, shown: LiveServer) -> None:
    endings = Endings(shown)
    ask(page, "Tell me a story about a mill.", max_tokens="24", seed="3", temperature="1")
    page.until(ANSWERED)
    output = endings.wait()
    assert page.run("document.querySelector('.turn.user .text').textContent") == "Tell me a story about a mill."
    said = page.run("document.querySelector('.turn.model .text:not(.given)').textContent")
    assert said.split() == output.outputs[0].text.split() != []
    facts = page.run(f"{ANSWERED}.textContent")
    assert f"{len(output.outputs[0].token_ids)} tokens" in facts
    assert f"prompt {len(output.prompt_token_ids)}, {output.num_cached_tokens} cached" in facts
    assert "TTFT" in facts
    ask(page, "And then?")
    page.until("document.querySelectorAll('.turn.model .facts').length === 2")
    assert len(endings.wait().prompt_token_ids) > len(output.prompt_token_ids), (
        "the second turn has the first before it"
    )


@needs_browser
def test_parameters_reach_the_model(page: Chromium, shown: LiveServer) -> None:
    endings = Endings(shown)
    page.run("document.getElementById('settings').open = true")
    ask(page, "Once upon a time", max_tokens="7", system="You are a miller.", stops="\\n\nzzz", top_k="5", top_p="0.9")
    page.until(ANSWERED)
    with_system = len(endings.wait().prompt_token_ids)
    orders = [e["params"]["request"] for e in page.events if e.get("method") == "Network.requestWillBeSent"]
    sent = json.loads(next(order["postData"] for order in orders if order["method"] == "POST"))
    assert (sent["max_tokens"], sent["top_k"], sent["top_p"]) == (7, 5, 0.9)
    assert sent["stop"] == ["\n", "zzz"]
    assert sent["messages"][0] == {"role": "system", "content": "You are a miller."}
    assert "seed" not in sent
    page.run("document.getElementById('new').click()")
    ask(page, "Once upon a time", system="")
    page.until(ANSWERED)
    assert len(endings.wait().prompt_token_ids) < with_system


@needs_browser
def test_probabilities_are_shown_by_colour_and_by_keys(page: Chromium, shown: LiveServer) -> None:
    endings = Endings(shown)
    page.run("document.getElementById('tab-completion').click(); document.getElementById('probs').click()")
    ask(page, "Once upon a time", max_tokens="12", temperature="0.7", seed="5", stops="")
    page.until(ANSWERED)
    tokens = page.run("[...document.querySelectorAll('.tokens .token')].map((t) => [t.textContent, t.className])")
    assert 1 < len(tokens) <= 12
    assert "".join(text for text, _ in tokens) == endings.wait().outputs[0].text
    assert all(re.fullmatch(r"token p[0-4]", kind) for _, kind in tokens)
    assert len({kind for _, kind in tokens}) > 1
    page.run("document.querySelector('.tokens').focus()")
    page.press("ArrowRight", 39)
    page.press("ArrowRight", 39)
    assert not page.run("document.getElementById('tip').hidden")
    rows = page.run("[...document.querySelectorAll('#tip tr')].map((r) => r.innerText.trim().split(/\\s+/).at(-2))")
    assert len(rows) >= 5
    assert page.run("document.querySelectorAll('#tip tr.chosen').length") == 1
    assert page.run("document.querySelector('.tokens .on').dataset.at") == "1"
    page.press("Escape", 27)
    assert page.run("document.getElementById('tip').hidden")


@needs_browser
def test_a_text_is_cut_where_its_tokens_end(page: Chromium) -> None:
    cases = [
        ("Once upon", ["Once", " upon"], ["Once", " upon"]),
        (" boy named", ["b", "oy", "named"], [" b", "oy", " named"]),
        ("\U0001f600!", ["\ufffd", "\ufffd", "!"], ["", "", "\U0001f600!"]),
        ("aa", ["a", "a"], ["a", "a"]),
        ("", ["x"], [""]),
    ]
    for text, tokens, parts in cases:
        script = f"import('/page/tokens.js').then((m) => m.split({json.dumps(text)}, {json.dumps(tokens)}))"
        assert page.run(script) == parts


@needs_browser
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_what_the_model_says_never_becomes_markup(
    page: Chromium, monkeypatch: pytest.MonkeyPatch, kind: str, probabilities: bool
) -> None:
    pieces = [HOSTILE[:20], HOSTILE[20:], *[""] * 40]

    def say(self: Any, ids: object) -> str:
        said: str = next(self.__dict__.setdefault("said", iter(pieces)))
        return said

    monkeypatch.setattr(IncrementalDetokenizer, "add", say)
    monkeypatch.setattr(IncrementalDetokenizer, "add_one", say)
    key = json.dumps(HOSTILE).encode()
    hostile = Written(HOSTILE, key, b'{"token":' + key + b',"logprob":', b',"bytes":[]')
    monkeypatch.setattr(TokenTexts, "__getitem__", lambda self, token_id: hostile)
    page.run(f"document.getElementById('tab-{kind}').click()")
    if probabilities:
        page.run("document.getElementById('probs').click()")
    ask(page, HOSTILE, max_tokens="6", stops="", system="")
    page.until(ANSWERED)
    assert page.run("document.getElementById('log').textContent").count(HOSTILE) >= 2, "the user's and the model's"
    if probabilities:
        page.run("document.querySelector('.tokens').focus()")
        page.press("ArrowRight", 39)
        assert HOSTILE in page.run("document.getElementById('tip').textContent")
    assert page.run("document.querySelectorAll('main img, main script, .tip img').length") == 0
    assert page.run("window.hacked") is None


@needs_browser
def test_stop_ends_the_request_in_the_engine(page: Chromium, shown: LiveServer) -> None:
    endings = Endings(shown)
    page.run("document.getElementById('tab-completion').click()")
    ask(page, "One two three four", max_tokens="480", temperature="1")
    page.until("document.querySelector('.turn.model .text:not(.given)').textContent.length > 3")
    page.run("document.getElementById('stop').click()")
    facts = page.until(ANSWERED + ".textContent")
    output = endings.wait()
    if output.outputs[0].finish_reason == "abort":  # unless it was through already
        assert "stopped" in facts
    assert page.run("document.getElementById('stop').hidden")
    assert not page.run("document.getElementById('send').disabled")


@needs_browser
def test_an_error_is_shown_and_the_text_is_kept(page: Chromium) -> None:
    ask(page, "Hello", max_tokens="100000")
    said = page.until("document.querySelector('.turn.model .error')?.textContent")
    assert "max_tokens" in said
    assert page.run("document.getElementById('prompt').value") == "Hello"
    page.forgive("400 (Bad Request)")


@needs_browser
def test_the_engine_is_drawn_while_it_works(page: Chromium, shown: LiveServer) -> None:
    for _ in range(2):
        httpx.post(shown.url + "/v1/completions", timeout=60, json={
            "model": "nano", "prompt": "The river turns the wheel. " * 20, "max_tokens": 30, "ignore_eos": True,
        })  # fmt: skip
    page.until("document.querySelectorAll('#recent tr').length >= 2")
    page.until("document.querySelectorAll('#tree rect').length > 0")
    page.until("document.querySelector('#chart-tokens path').getAttribute('d').length > 20")
    page.until("document.querySelector('#chart-ttft path.dots').getAttribute('d').length > 5")
    assert page.run("document.querySelectorAll('#kv rect.cached').length") > 0
    assert page.run("document.querySelectorAll('#kv rect').length") == 128, "256 blocks, two a cell"
    page.until("document.getElementById('running').textContent.startsWith('0 of ')")  # it asks once a second
    assert "cached" in page.run("document.getElementById('kv-note').textContent")


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_it_fits_every_width_by_day_and_night(page: Chromium, width: int) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        page.look(width, 800, scheme, mobile=width < 500)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "it has to be moved sideways"
        colours.add(page.run("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


@needs_browser
def test_everything_can_be_reached_by_keyboard_and_has_a_name(page: Chromium) -> None:
    page.run("document.getElementById('settings').open = true; document.querySelector('.skip').focus()")
    reached = []
    for _ in range(26):
        page.press("Tab", 9)
        reached.append(page.run("document.activeElement.id"))
    assert {
        "tab-chat",
        "probs",
        "new",
        "history-open",
        "keys-open",
        "prompt",
        "attach",
        "send",
        "temperature",
        "seed",
        "system",
        "stops",
    } <= set(reached)
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles: dict[str, list[Any]] = {}
    for node in tree:
        if not node.get("ignored"):
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "textbox", "spinbutton", "checkbox", "tab"):
        assert roles[role], role
        assert all(roles[role]), f"a {role} without a name"


@needs_browser
def test_a_server_with_keys_is_asked_with_one(browser: Chromium) -> None:
    with small(api_key="sesame") as server:
        browser.look(1280, 900)
        browser.open(server.url + "/")
        browser.until("!document.getElementById('key-form').hidden")
        browser.type("#key", "wrong")
        browser.press("Enter", 13)
        browser.until("document.getElementById('key-note').textContent")
        browser.run("document.getElementById('key').value = ''")
        browser.type("#key", "sesame")
        browser.press("Enter", 13)
        browser.until(READY)
        assert browser.run("document.getElementById('key-form').hidden")
        ask(browser, "Hello", max_tokens="4")
        browser.until(ANSWERED)
        assert browser.run("document.querySelectorAll('.turn .error').length") == 0
        browser.leave()
