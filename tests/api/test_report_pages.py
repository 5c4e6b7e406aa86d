"""Pages that `cap`, `eval`, `sim` and `study` write fit a phone: wide tables move within the page, not with it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.cli.cap_page import html_page
from penstock.eval.cap.report import Report
from penstock.report.page import render
from tests.api.chromium import Chromium
from tests.api.conftest import axe, needs_browser
from tests.command import penstock

pytestmark = needs_browser
BOARDS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TRACE = "synthetic:poisson?rate=20&requests=30&prompt=100&output=10&shared=64&groups=3"
SIM = ["--trace", TRACE, "--device", "h100-sxm"]
EVAL = ["--limit", "3", "--tasks", "needle?lengths=256&depths=0+1,lookup?pairs=10&positions=3", "--max-num-seqs", "16"]
LONG = "a_name_without_any_space_in_it_" * 6


def written(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.html"
    if kind.startswith("cap"):
        board = (BOARDS / f"board-{kind[4:]}.json").read_bytes()
        path.write_text(html_page(msgspec.json.decode(board, type=Report)), encoding="utf-8")
        return path
    if kind == "long":
        cells = [LONG] * 4
        text = render(
            "sheet.html", title=LONG, intro=[LONG], findings=[LONG], charts=(), tables=[(LONG, cells, [cells])],
            left_out=[LONG], setup=[LONG], foot=LONG,
        )  # fmt: skip
        path.write_text(text, encoding="utf-8")
        return path
    orders = {
        "eval": ["eval", "nano", *EVAL, "--html", str(path)],
        "sim": ["sim", *SIM, "--out", str(path)],
        "sim-many": [
            "sim",
            *SIM,
            "--scheduling-policy",
            "fcfs,prefill-first",
            "--max-num-seqs",
            "4,16",
            "--out",
            str(path),
        ],
        "study": ["study", "swap", "--scale", "0.05", "--out", str(path)],
    }
    done = penstock(*orders[kind])
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("kind", ["cap-selectors", "cap-codecs", "eval", "sim", "sim-many", "study", "long"])
def test_a_page_fits_390_pixels_and_axe_finds_nothing(browser: Chromium, tmp_path: Path, kind: str) -> None:
    browser.look(390, 844, mobile=True)
    browser.open(written(kind, tmp_path).as_uri())
    browser.run("for (const box of document.querySelectorAll('details')) box.open = true")
    wider = browser.run("""[...document.querySelectorAll('main *')]
        .filter((e) => !e.closest('.scroll table') && !e.closest('svg'))
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
        .map((e) => e.localName + '.' + e.className)""")
    assert wider == []
    assert browser.run("document.documentElement.scrollWidth") <= 390
    for scheme in ("light", "dark"):
        browser.look(1280, 900, scheme)
        assert axe(browser) == [], scheme
    browser.leave()
