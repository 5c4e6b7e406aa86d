"""The tables of parts in the docs say what the registries say."""

from __future__ import annotations

from tools.interfaces import PAGE, written


def test_the_page_of_interfaces_lists_what_is_registered() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run python tools/interfaces.py"
