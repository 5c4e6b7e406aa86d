"""Every command of docs/tutorials runs and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.tutorial import Block, Differs, Tutorial, blocks, missing, pattern

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "index"], ids=lambda p: p.stem)
def test_a_tutorial_does_what_it_says(page: Path, tmp_path: Path) -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
    with Tutorial(page.read_text(encoding="utf-8"), tmp_path) as tutorial:
        assert tutorial.run() >= 2


def test_the_index_names_every_tutorial() -> None:
    index = next(p for p in PAGES if p.stem == "index").read_text(encoding="utf-8")
    assert all(f"({p.name})" in index for p in PAGES if p.stem != "index")


def page(console: str, title: str = "") -> str:
    return f"```console{title}\n{console}\n```\n"


@pytest.mark.parametrize(
    ("console", "why"),
    [
        ("$ echo one\ntwo", "is not"),
        ("$ echo one\none\ntwo", "is not"),
        ("$ printf 'one\\ntwo\\n'\none", "is not"),
        ("$ false", "status 1"),
        ("$ exit 3", "ended the shell"),
        ("$ echo one >&2\n", ""),
        ("$ echo a b c\na ... c", ""),
        ("$ printf '1\\n2\\n3\\n'\n1\n...", ""),
        ("$ x=5\n$ echo $x\n5", ""),
    ],
)
def test_what_a_page_says_is_compared(console: str, why: str, tmp_path: Path) -> None:
    with Tutorial(page(console), tmp_path, timeout_s=20) as tutorial:
        if why:
            with pytest.raises(Differs, match=why):
                tutorial.run()
        else:
            assert tutorial.run() == console.count("$ ")


def test_another_terminal_stays_until_the_end(tmp_path: Path) -> None:
    serve = 'trap "echo bye > gone; exit" INT; echo up; while true; do sleep 0.1; done'
    text = page(f"$ bash -c '{serve}'\nup", ' title="server"') + page("$ test -e gone || echo not yet\nnot yet")
    with Tutorial(text, tmp_path, timeout_s=20) as tutorial:
        assert tutorial.run() == 2
    assert (tmp_path / "gone").read_text() == "bye\n"


def test_a_terminal_that_ends_or_says_nothing_is_noticed(tmp_path: Path) -> None:
    for command, why, timeout_s in (("echo down", "ended", 20), ("sleep 60", "there is only", 1)):
        text = page(f"$ {command}\nup", ' title="server"')
        with Tutorial(text, tmp_path, timeout_s) as tutorial, pytest.raises(Differs, match=why):
            tutorial.run()


def test_files_and_blocks() -> None:
    found = blocks('```python title="a/b.py"\nx = 1\n```\ntext\n```console\n$ one\nout\n$ two\n```\n')
    assert found[0] == Block("python", "a/b.py", "x = 1\n")
    assert found[1].commands() == [("one", "out\n"), ("two", "")]
    with pytest.raises(ValueError, match="begins with output"):
        Block("console", "", "out\n").commands()
    assert pattern("a.b ... c").fullmatch("a.b x c\n")
    assert not pattern("a.b").fullmatch("axb\n")
