"""/docs: the interface to read and to try."""

from __future__ import annotations

import json

import httpx
import pytest

from penstock.server.live import LiveServer
from penstock.server.routes.page import files
from tests.api.chromium import Chromium
from tests.api.conftest import axe, needs_browser
from tests.api.watch import small


def test_the_files_need_no_key_and_what_they_ask_for_does() -> None:
    with small(api_key="sesame") as server:
        page = httpx.get(server.url + "/docs")
        assert (page.status_code, page.headers["content-type"].split(";")[0]) == (200, "text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert httpx.get(server.url + "/openapi.json").status_code == 401


def test_what_others_wrote_is_served_with_its_licence(shown: LiveServer) -> None:
    assert httpx.get(shown.url + "/page/vendor/swagger-ui.js").headers["content-type"].startswith("text/javascript")
    assert "Apache" in httpx.get(shown.url + "/page/vendor/LICENSE-swagger-ui-dist.txt").text
    assert len([name for name in files() if name.startswith("vendor/LICENSE-")]) == 4


def test_every_example_of_the_document_works(shown: LiveServer) -> None:
    document = httpx.get(shown.url + "/openapi.json").json()
    tried = 0
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        if "example" in body:
            answer = httpx.post(shown.url + path, json=body["example"], timeout=60)
            if path == "/classify":  # which wants another kind of model
                assert "no classifier's head" in answer.text
                continue
            assert answer.status_code == 200, (path, answer.text)
            tried += 1
    assert tried >= 9


def operation(path: str) -> str:
    return f"document.querySelector('.opblock-summary-path[data-path=\"{path}\"]')?.closest('.opblock')"


@needs_browser
@pytest.mark.parametrize("key", ["", "sesame"])
def test_an_operation_is_tried(browser: Chromium, key: str) -> None:
    with small(**({"api_key": key} if key else {})) as server:
        browser.look(1280, 900)
        browser.fresh(server.url + "/docs")
        if key:
            browser.until("!document.getElementById('key-form').hidden")
            browser.type("#key", "wrong")
            browser.press("Enter", 13)
            browser.until("document.getElementById('key-note').textContent")
            browser.run("document.getElementById('key').value = ''")
            browser.type("#key", key)
            browser.press("Enter", 13)
            browser.forgive("401 (Unauthorized)")
        block = operation("/v1/completions")
        browser.until(f"!!{block}")
        browser.run(f"{block}.querySelector('.opblock-summary-control').click()")
        browser.until(f"!!{block}.querySelector('.try-out__btn')")
        browser.run(f"{block}.querySelector('.try-out__btn').click()")
        browser.until(f"{block}.querySelector('.body-param__text')?.value.includes('Once upon a time')")
        browser.run(f"{block}.querySelector('.execute').click()")
        cell = block + ".querySelector('.live-responses-table tbody .response-col_"
        status = browser.until(f"{cell}status')?.textContent")
        assert status.startswith("200")
        said = browser.until(f"{cell}description pre')?.textContent")
        assert json.loads(said)["object"] == "text_completion"
        foreign = {url for url in browser.requested if not url.startswith((server.url, "data:", "blob:"))}
        assert foreign == set()
        assert [c for c in browser.complaints if "401" not in c] == []
        browser.leave()


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Chromium, shown: LiveServer, scheme: str) -> None:
    browser.look(1280, 900, scheme)
    browser.fresh(shown.url + "/docs")
    for path in ("/v1/completions", "/v1/responses/{response_id}"):
        browser.until(f"!!{operation(path)}")
        browser.run(f"{operation(path)}.querySelector('.opblock-summary-control').click()")
        browser.until(f"!!{operation(path)}.querySelector('.try-out__btn')")
        browser.run(f"{operation(path)}.querySelector('.try-out__btn').click()")
    browser.until("!!document.querySelector('.body-param__text[aria-label]')")
    assert axe(browser) == []
    browser.leave()


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits(browser: Chromium, shown: LiveServer, width: int) -> None:
    colours = set()
    browser.fresh(shown.url + "/docs")
    for scheme in ("light", "dark"):
        browser.look(width, 800, scheme, mobile=width < 500)
        browser.open(shown.url + "/docs")
        browser.until("document.querySelectorAll('.opblock').length > 20")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), "it has to be moved sideways"
        colours.add(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    browser.leave()
