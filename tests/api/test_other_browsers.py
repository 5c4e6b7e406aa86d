# ruff: noqa: F401
"""What the tests of the page, of /docs and of reports say of Chromium, of Firefox and WebKitGTK where they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from penstock.server.live import LiveServer
from tests.api.conftest import READY
from tests.api.test_docs_page import test_an_operation_is_tried
from tests.api.test_page import (
    test_a_chat_comes_into_the_page,
    test_a_server_with_keys_is_asked_with_one,
    test_an_error_is_shown_and_the_text_is_kept,
    test_probabilities_are_shown_by_colour_and_by_keys,
    test_stop_ends_the_request_in_the_engine,
    test_the_engine_is_drawn_while_it_works,
)
from tests.api.test_page_chat import (
    test_an_answer_is_regenerated_and_a_message_edited,
    test_an_answer_is_shown_while_it_comes,
    test_calls_are_shown_as_such_and_take_results,
    test_escape_stops_and_what_was_said_so_far_is_kept,
    test_history_survives_a_reload_and_is_deleted_for_good,
    test_markdown_is_drawn_with_coloured_code_and_copied_as_it_was_written,
    test_single_keys_work_and_can_be_turned_off,
    test_text_files_become_a_part_of_the_message,
)
from tests.api.test_page_versions import (
    edited,
    test_an_edited_message_keeps_what_was_there,
    test_versions_are_turned_by_keys_and_said,
)
from tests.api.test_report_pages import written
from tests.api.webdriver import Driver, Firefox, WebKit, watched
from tests.sampled import ALL, some

IN_BOTH = {
    "test_errors_and_violations_are_seen", "test_the_engine_is_drawn_while_it_works", "test_an_operation_is_tried",
    "test_an_answer_is_shown_while_it_comes", "test_history_survives_a_reload_and_is_deleted_for_good",
}  # fmt: skip
"""What rests on more than clicks: what watches the page, drawing, a page of others, streams, storage."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Chromium has run all of them. Of the others each runs `IN_BOTH`, and one of them the rest."""
    if "browser" in metafunc.fixturenames:
        name = metafunc.function.__name__
        kinds = [Firefox, WebKit] if ALL or name in IN_BOTH else [(Firefox, WebKit)[len(name) % 2]]
        metafunc.parametrize("browser", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param.missing:
        pytest.skip(request.param.missing)
    with watched(), request.param() as running:
        yield running


def test_errors_and_violations_are_seen(browser: Driver, shown: LiveServer) -> None:
    """Else the tests above would say nothing about them."""
    browser.fresh(shown.url + "/")
    browser.until(READY)
    assert browser.complaints == []
    browser.run("{ setTimeout(() => { throw new Error('a mistake'); }, 0); }")
    browser.run("document.body.append(Object.assign(new Image(), { src: 'https://evil.example/pixel.png' }))")
    until = time.monotonic() + 20
    for text in ("a mistake", "evil.example"):
        while not any(text in complaint for complaint in browser.complaints):
            assert time.monotonic() < until, browser.complaints
            time.sleep(0.05)


@pytest.mark.parametrize(("kind", "scheme"), some(product([Firefox, WebKit], ["light", "dark"])))
def test_they_fit_390_pixels_by_day_and_night(
    kind: type[Driver], scheme: str, shown: LiveServer, tmp_path: Path
) -> None:
    if kind.missing:
        pytest.skip(kind.missing)
    with watched(), kind(scheme) as browser:
        for width in (390, 1280):
            browser.look(width, 844, scheme)
            for url, there in (
                (shown.url + "/", READY),
                (shown.url + "/docs", "document.querySelectorAll('.opblock').length > 20"),
                (written("cap-selectors", tmp_path).as_uri(), "!!document.querySelector('table')"),
            ):
                browser.open(url)
                browser.until(there)
                assert browser.run("document.documentElement.scrollWidth <= innerWidth"), url
                dark = browser.run("Number(/\\d+/.exec(getComputedStyle(document.body).backgroundColor)[0]) < 128")
                assert dark == (scheme == "dark"), url
        assert browser.complaints == []
