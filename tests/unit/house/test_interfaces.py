"""The tables of parts in the docs say what the registries say."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.generated import write_or_check
from tools.interfaces import PAGE, written


def test_the_page_of_interfaces_lists_what_is_registered() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run python tools/interfaces.py"


def test_a_check_writes_nothing_and_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.md"
    assert write_or_check(target, lambda: "new", ["--check"]) == 1
    assert not target.exists()
    assert "page.md is not up to date: run python tools/" in capsys.readouterr().err
    assert write_or_check(target, lambda: "new", []) == 0
    assert target.read_text() == "new"
    assert write_or_check(target, lambda: "new", ["--check"]) == 0
    assert write_or_check(target, lambda: "other", ["--check"]) == 1
    assert target.read_text() == "new"
