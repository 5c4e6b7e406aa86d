"""A real server on a real socket: the bundled model, the engine as a process of its own; and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.launch.bundled import bundled_model
from penstock.server.live import LiveServer
from tests.api.chromium import Chromium, find

READY = "document.getElementById('state')?.textContent === 'ready'"
ANSWERED = "document.querySelector('.turn.model:last-child .facts')"
AXE = Path(__file__).resolve().parents[1] / "data" / "axe" / "axe.js"
needs_browser = pytest.mark.skipif(find() is None, reason="no Chromium here (apt-get install chromium)")


def ask(page: Chromium, text: str, **fields: str) -> None:
    """As a user would, with some fields filled in."""
    for name, value in fields.items():
        page.run(f"document.getElementById({name!r}).value = {value!r}")
    page.type("#prompt", text)
    page.press("Enter", 13)


def reload(page: Chromium) -> None:
    page.run("window.old = true")
    page.reload()
    page.until(f"!window.old && {READY}")


def axe(page: Chromium) -> Any:
    """What axe-core's rules, best practices too, have against what is shown now."""
    page.run(AXE.read_text(encoding="utf-8") + ";0")
    return page.run(
        "axe.run().then((r) => r.violations.map((v) => [v.id, v.nodes.map((n) => n.html + n.failureSummary)]))"
    )


def bundled() -> str:
    path = bundled_model("nano")
    assert path is not None
    return str(path)


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """Shared by tests that leave no traces; tests that need settings of their own start one themselves.

    The reference operations, because texts are compared: with `blas` a near tie falls by what else is in the batch.
    """
    config = serve_from_kwargs(model=bundled(), port=0, ops="ref", max_model_len=512, num_gpu_blocks_override=256)
    with LiveServer(config) as server:
        yield server


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def shown() -> Iterator[LiveServer]:
    """What the tests of pages look at: the engine is in a thread, so that they can change what it says."""
    from tests.api.watch import small

    with small() as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    path = find()
    assert path is not None, "tests that take a browser are marked needs_browser"
    with Chromium(path) as running:
        yield running


@pytest.fixture
def page(browser: Chromium, shown: LiveServer) -> Iterator[Chromium]:
    """The page of `shown`, ready, nothing kept. Afterwards nothing has complained, or was asked of anybody else."""
    browser.look(1280, 900)
    browser.fresh(shown.url + "/")
    browser.until(READY)
    yield browser
    assert browser.complaints == []
    asked = {url.split("/")[2] for url in browser.requested if not url.startswith("data:")}
    assert asked <= {shown.url.split("/")[2]}
    assert asked or not isinstance(browser, Chromium), "others tell of requests as long as their page remembers them"
    browser.leave()
