# ruff: noqa: E501
"""Nothing that a model writes acts, loads or looks like the page: a corpus of attacks, in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.server.live import LiveServer
from penstock.server.parsing.events import CallArguments, CallStart, Content, Reasoning
from tests.api.chromium import Chromium
from tests.api.conftest import READY, ask, needs_browser, reload
from tests.api.scripted import Scripts

pytestmark = needs_browser
HIT = "window.hacked = 1"
ALLOWED = re.compile("a|blockquote|br|button|code|del|div|em|h[1-6r]|ins|kbd|li|mark|ol|p|pre|small|span|strong|sub|sup|"
                     "table|tbody|td|th|thead|tr|u|ul")  # fmt: skip
ATTRIBUTES = set("align aria-label class href rel role start tabindex target title type".split())  # noqa: SIM905
HTML = [
    f"<script>{HIT}</script>",
    f"<SCRIPT SRC=//evil.example/x.js>{HIT}</SCRIPT>",
    f"<img src=x onerror='{HIT}'>",
    "<img src='https://evil.example/pixel.png'>",
    "<img srcset='https://evil.example/pixel.png 1x'>",
    f"<svg onload='{HIT}'></svg>",
    f"<svg><script>{HIT}</script></svg>",
    f"<svg><animate onbegin='{HIT}' attributeName=x dur=1s></svg>",
    "<svg><image href='https://evil.example/pixel.png'/></svg>",
    "<svg><use href='https://evil.example/x.svg#a'/></svg>",
    f"<math><mtext><table><mglyph><style><img src=x onerror='{HIT}'></style></mglyph></table></mtext></math>",
    f"<math><annotation-xml encoding='text/html'><script>{HIT}</script></annotation-xml></math>",
    f"<form><math><mtext></form><form><mglyph><style></math><img src=x onerror='{HIT}'>",
    f"<noscript><p title='</noscript><img src=x onerror={HIT!r}>'></noscript>",
    f"<template><img src=x onerror='{HIT}'></template>",
    f"<iframe src='javascript:{HIT}'></iframe>",
    f"<iframe srcdoc='<script>parent.{HIT}</script>'></iframe>",
    "<object data='https://evil.example/x'></object><embed src='https://evil.example/x'>",
    f"<a href='javascript:{HIT}'>x</a>",
    f"<a href='java&#10;script:{HIT}'>x</a>",
    f"<a href='&#x6a;avascript&colon;{HIT}'>x</a>",
    f"<a href=' \x01javascript:{HIT}'>x</a>",
    f"<a href='data:text/html,<script>{HIT}</script>'>x</a>",
    "<a href='vbscript:x'>x</a><a href='/admin/shutdown'>x</a><a href='//evil.example'>x</a><a href='file:///x'>x</a>",
    f"<a href='https://example.com' onclick='{HIT}' onmouseover='{HIT}' style='position:fixed;inset:0' id=state ping=//evil.example>x</a>",
    "<style>body { display: none } @import url(https://evil.example/x.css);</style>",
    "<link rel=stylesheet href='https://evil.example/x.css'><meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<base href='https://evil.example/'>",
    "<form action='https://evil.example'><input name=key><button formaction='javascript:window.hacked=1'>x</button></form>",
    "<form id=x></form><input form=x autofocus onfocus='window.hacked=1'><select autofocus onfocus='window.hacked=1'>",
    "<details open ontoggle='window.hacked=1'><summary>x</summary></details>",
    "<video src='https://evil.example/x.mp4' autoplay><source onerror='window.hacked=1'></video><audio src=x onerror='window.hacked=1'>",
    "<body onload='window.hacked=1'><div style='background:url(https://evil.example/x)' class='tip key-form main'>x</div>",
    "<p class='tip key-form main'>x</p><code class='main language-x'>x</code>",
    "<p id=prompt name=getElementById>x</p><img name=body><form name=cookie></form>",
    "<marquee onstart='window.hacked=1'>x</marquee><dialog open>x</dialog><portal src=//evil.example></portal>",
    "<xmp><img src=x onerror='window.hacked=1'></xmp><textarea><img src=x onerror='window.hacked=1'></textarea>",
    "<!--><img src=x onerror='window.hacked=1'>--><![CDATA[><img src=x onerror='window.hacked=1'>]]>",
    "<div><x-custom onclick='window.hacked=1'>x</x-custom><slot name=x></slot></div>",
]
MARKDOWN = [
    "[x](javascript:window.hacked=1)",
    "[x](JaVaScRiPt:window.hacked=1)",
    "[x](java&#115;cript:window.hacked=1)",
    "[x](javascript&colon;window.hacked=1)",
    "[x](<java\tscript:window.hacked=1>)",
    "[x](data:text/html;base64,PHNjcmlwdD53aW5kb3cuaGFja2VkPTE8L3NjcmlwdD4=)",
    "[x](/admin/shutdown) [y](//evil.example) [z](?key=1)",
    "[x][1]\n\n[1]: javascript:window.hacked=1",
    "<javascript:window.hacked=1>",
    "![x](https://evil.example/pixel.png)",
    '![x](https://evil.example/pixel.png "title")',
    '![x](x" onerror="window.hacked=1)',
    "![<img src=x onerror=window.hacked=1>](x)",
    "[![x](https://evil.example/pixel.png)](https://evil.example/?secret)",
    "![x][1]\n\n[1]: https://evil.example/pixel.png",
    '[x](https://example.com "a\\" onclick=\\"window.hacked=1")',
    '[x](https://example.com/"onmouseover="window.hacked=1)',
    '```"><img src=x onerror=window.hacked=1>\ncode\n```',
    "```html\n<img src=x onerror=window.hacked=1>\n</code></pre><img src=x onerror=window.hacked=1>\n```",
    "`<img src=x onerror=window.hacked=1>`",
    "| <img src=x onerror=window.hacked=1> | b |\n|---|---|\n| <script>window.hacked=1</script> | c |",
    "# <svg onload=window.hacked=1>",
    "<br onclick=window.hacked=1><kbd style=position:fixed>x</kbd><sub/onclick=window.hacked=1>",
    "&lt;img src=x onerror=window.hacked=1&gt;",
    "\\<img src=x onerror=window.hacked=1\\>",
    "<!-- <img src=x onerror=window.hacked=1> --><?php <img src=x onerror=window.hacked=1> ?>",
]
FOUND = """(() => {
    const box = document.getElementById('attacked'), bad = [];
    for (const node of box.querySelectorAll('*')) {
        const attributes = [...node.attributes].map((a) => a.name);
        bad.push([node.localName, attributes, node.namespaceURI, node.getAttribute('href') || '', node.className]);
    }
    return bad;
})()"""


@pytest.fixture
def bare(browser: Chromium, shown: LiveServer) -> Iterator[Chromium]:
    """The page without its policy: what is tried here has only the sanitiser in its way."""
    browser.call("Page.setBypassCSP", enabled=True)
    browser.fresh(shown.url + "/")
    browser.until(READY)
    yield browser
    browser.call("Page.setBypassCSP", enabled=False)
    browser.leave()


def harmless(page: Chromium, shown: LiveServer, what: str) -> None:
    for name, attributes, space, href, classes in page.run(FOUND):
        assert ALLOWED.fullmatch(name), f"{what}: <{name}>"
        assert space.endswith("xhtml"), what
        assert set(attributes) <= ATTRIBUTES, what
        assert not href or href.startswith(("https://", "http://", "mailto:")), what
        assert not {"tip", "key-form", "main"} & set(classes.split()), what
    assert page.run("window.hacked") is None, what
    assert all(url.startswith((shown.url, "data:")) for url in page.requested), what


def test_html_is_sanitised(bare: Chromium, shown: LiveServer) -> None:
    for attack in HTML:
        for text in (attack, f"<p>{attack}", f"<table><tr><td>{attack}", f"<ul><li><a>{attack}"):
            bare.run(f"""import('/page/markdown.js').then(async ({{ sanitise }}) => {{
                document.getElementById('attacked')?.remove();
                const box = document.createElement('div');
                box.id = 'attacked';
                box.append(sanitise({json.dumps(text)}));
                document.querySelector('main').append(box);
                for (const node of box.querySelectorAll('*')) node.click();
                await new Promise((done) => setTimeout(done, 5));
            }})""")
            harmless(bare, shown, text)


def test_markdown_is_sanitised(bare: Chromium, shown: LiveServer) -> None:
    bare.run("document.addEventListener('click', (e) => e.target.closest('a') && e.preventDefault())")
    for attack in MARKDOWN + HTML:
        for text in (attack, f"* {attack}", f"> {attack}", f"text {attack} text"):
            bare.run(f"""import('/page/markdown.js').then(async ({{ MarkdownView }}) => {{
                document.getElementById('attacked')?.remove();
                const box = document.createElement('div'), view = new MarkdownView(), text = {json.dumps(text)};
                box.id = 'attacked';
                box.append(view.element);
                document.querySelector('main').append(box);
                for (let i = 1; i < text.length; i += 5) {{ view.text = text.slice(0, i); view.draw(); }}
                view.end(text);
                for (const node of box.querySelectorAll('*')) node.click();
                await new Promise((done) => setTimeout(done, 5));
            }})""")
            harmless(bare, shown, text)
    assert bare.run("location.href") == shown.url + "/"


def test_the_corpus_would_be_seen(bare: Chromium, shown: LiveServer) -> None:
    """Without a sanitiser it acts, so the tests above can fail."""
    bare.run("""new Promise((done) => {
        const box = document.createElement('div');
        box.id = 'attacked';
        document.querySelector('main').append(box);
        box.innerHTML = "<img src=x onerror='window.hacked = 1'>";
        setTimeout(done, 200);
    })""")
    assert bare.run("window.hacked") == 1
    with pytest.raises(AssertionError):
        harmless(bare, shown, "an image")


@pytest.mark.parametrize("part", ["answer", "thoughts", "call", "tool", "user", "file", "saved"])
def test_every_place_of_a_conversation_is_safe(page: Chromium, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """With the page's policy on: nothing acts, and nothing is asked of anybody else (the fixture looks)."""
    attack = "\n\n".join(HTML + MARKDOWN)
    events: list[Any] = {
        "thoughts": [Reasoning(attack), Content("x")],
        "call": [CallStart(0, "call_a", attack), CallArguments(0, attack)],
        "tool": [CallStart(0, "call_a", "f"), CallArguments(0, "{}")],
    }.get(part, [Content(attack if part in ("answer", "saved") else "x")])
    scripts = Scripts(events, finish="stop")
    monkeypatch.setattr("penstock.server.openai.chat.begin", scripts.begin)
    if part == "file":
        page.run(f"""{{
            const given = new DataTransfer(), field = document.getElementById('files');
            given.items.add(new File([{json.dumps(attack)}], {json.dumps(HTML[2])}));
            field.files = given.files;
            field.dispatchEvent(new Event('change'));
        }}""")
        page.until("document.querySelectorAll('#attached li').length")
    ask(page, attack if part == "user" else "Hello")
    page.until("document.querySelectorAll('.turn.model').length === 1 && !document.querySelector('.busy')")
    if part == "tool":
        page.run(f"document.querySelector('.results textarea').value = {json.dumps(attack)}")
        page.run("document.querySelector('.results button').click()")
        page.until("document.querySelectorAll('.turn.model').length === 2 && !document.querySelector('.busy')")
    if part == "saved":
        reload(page)
        page.until("document.querySelector('.turn.model')")
    page.run("for (const box of document.querySelectorAll('details')) box.open = true")
    page.run("new Promise((done) => setTimeout(done, 100))")
    assert page.run("window.hacked") is None
    assert (
        page.run(
            "document.querySelectorAll('main :is(img, script, style, iframe, video, object, embed, form form)').length"
        )
        == 0
    )
    links = page.run("[...document.querySelectorAll('#log a')].map((a) => a.getAttribute('href') ?? 'http:')")
    assert all(link.startswith(("http:", "https:", "mailto:")) for link in links)
