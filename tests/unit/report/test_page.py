"""Pages from templates: whatever stands in a page's data is text there, wherever it stands."""

from __future__ import annotations

import io
from html.parser import HTMLParser

import pytest
from jinja2 import UndefinedError
from rich.console import Console

from penstock.report.chart import Area, Chart, Key, Line
from penstock.report.page import Cell, part, render
from penstock.report.tables import table

HOSTILE = """"><b class='x'>&amp;</b><!-- {{ 7 * 7 }}"""


class Reader(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.found = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += sum(value == HOSTILE for _, value in attrs)

    def handle_data(self, data: str) -> None:
        self.found += data.strip() == HOSTILE

    def handle_comment(self, data: str) -> None:
        raise AssertionError("no comment")


def chart() -> Chart:
    line = Line(HOSTILE, [0.0, 1.0], [0.0, 1.0], 0, [(0.5, 0.5, HOSTILE)])
    return Chart(HOSTILE, lambda _: HOSTILE, lambda _: HOSTILE, lines=[line, Line("x", [0.0], [0.0], 1)], note=HOSTILE,
                 marks=[(0.5, HOSTILE)])  # fmt: skip


def test_data_is_text_wherever_it_stands() -> None:
    drawn = Reader(chart().svg())
    assert "b" not in drawn.tags
    ticks = 3 + 6
    assert drawn.found == 2 + ticks + 1 + 1 + 1, "label, title, ticks, mark, line, dot"
    cells = [HOSTILE, Cell(HOSTILE, HOSTILE, HOSTILE, HOSTILE)]
    page = Reader(render(
        "sheet.html", title=HOSTILE, intro=[HOSTILE], findings=[HOSTILE], charts=[chart()], left_out=[HOSTILE],
        tables=[(HOSTILE, [HOSTILE], [cells])], setup=[HOSTILE], foot=HOSTILE,
    ))  # fmt: skip
    assert "b" not in page.tags
    assert page.found == 2 + 2 + drawn.found + 3 + 3 + 7, "each is there, whole"
    named = Reader(part("named", HOSTILE, HOSTILE) + part("legend", [Key(HOSTILE, 0)]))
    assert "b" not in named.tags
    assert named.found == 3


def test_what_a_template_misses_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="foot"):
        render("sheet.html", title="", intro=(), findings=(), charts=(), left_out=(), tables=(), setup=())


def test_a_chart_s_key_has_a_colour_once_and_only_where_there_are_two() -> None:
    one, two = Line("a", [0.0], [0.0], 9), Line("b", [0.0], [0.0], 1)
    assert Chart("", lines=[one]).key == []
    assert Chart("", lines=[one, two, one, Line("", [0.0], [0.0], 3)]).key == [Key("a", 1), Key("b", 1)]
    assert Chart("", areas=[Area("x", [], 2)]).key == [Key("x", 2, True)]


def test_tables_for_terminals() -> None:
    console = Console(width=40, file=io.StringIO())
    console.print(table(("name", "n"), [("a", "1"), ("bb", "22")], title="t"))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.rstrip() for line in shown] == ["t", " name   n", " a      1", " bb    22"]
    assert table(("", "", ""), left=2, head=False).columns[2].justify == "right"
