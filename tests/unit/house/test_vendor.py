"""Libraries that the pages carry along are those of their lists, byte for byte, with their licences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tools.vendor import LANGUAGES, PACKAGES, ROOT, main, wrong

FOLDERS = sorted({package.folder for package in PACKAGES})


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_vendored_file_is_the_one_of_the_list(folder: str) -> None:
    assert wrong(ROOT / folder) == []
    listed = json.loads((ROOT / folder / "vendored.json").read_text("utf-8"))
    versions = {(entry["package"], entry["version"], entry["licence"]) for entry in listed}
    assert versions == {(p.name, p.version, p.licence) for p in PACKAGES if p.folder == folder}
    for package in (p for p in PACKAGES if p.folder == folder):
        mine = {entry["from"]: entry["file"] for entry in listed if entry["package"] == package.name}
        assert mine.items() >= package.files.items()
        assert (ROOT / folder / mine[package.text]).stat().st_size > 500, "the licence"


def test_a_file_that_was_changed_added_or_lost_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "vendor"
    shutil.copytree(ROOT / FOLDERS[0], folder)
    assert wrong(folder) == []
    entries = json.loads((folder / "vendored.json").read_text("utf-8"))
    changed, lost = (folder / entry["file"] for entry in entries[:2])
    changed.write_bytes(changed.read_bytes() + b"\n")
    lost.unlink()
    (folder / "more.js").write_text("")
    found = wrong(folder)
    assert found[0] == "more.js is not in the list"
    assert sorted(found[1:]) == sorted(
        [
            f"{lost.name} is not there",
            f"{changed.name} is not the file of {entries[0]['package']} {entries[0]['version']}",
        ]
    )


def test_the_tool_says_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "every vendored file" in capsys.readouterr().out


def test_the_page_knows_the_languages_that_are_there() -> None:
    script = (ROOT / "src/penstock/server/page/markdown.js").read_text("utf-8")
    table = script.partition("const LANGUAGES = ")[2].partition(";")[0]
    assert json.loads(table) == LANGUAGES
