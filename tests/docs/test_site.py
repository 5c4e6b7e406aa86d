"""The site that `make docs` builds: what is staged for it, and what the check of the built pages notices.

The build itself is a stage of the checks of its own: zensical is not among what the tests need.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_tool", ROOT / "tools" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


COLOURED = ("src/penstock/core/batch.py", "src/penstock/select")


@pytest.fixture(scope="module")
def staged(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the hundreds of sources that pages lead to, two are coloured; `make docs` does all."""
    out: Path = tmp_path_factory.mktemp("site") / "docs"
    make = site._source_html
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "_source_html", lambda path: make(path) if path in COLOURED else "")
        site.Staging(out).run()
    return out


def test_every_page_is_in_the_nav_once(site: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pages = set(site.Staging(Path("/nowhere")).pages.values())
    assert site.check_nav(pages) == []
    assert site.check_nav(pages | {"new.md"}) == ["zensical.toml: nav leaves out new.md"]
    assert site.check_nav(pages - {"tour.md"}) == ["zensical.toml: nav names tour.md, which is no page"]
    config = tmp_path / "zensical.toml"
    config.write_text('[project]\nnav = ["a.md", { "B" = ["b.md", { "again" = "a.md" }] }]\n', encoding="utf-8")
    monkeypatch.setattr(site, "CONFIG", config)
    assert site.check_nav({"a.md", "b.md"}) == ["zensical.toml: nav names a.md twice"]


def test_links_lead_to_staged_files(site: ModuleType, staged: Path) -> None:
    """Every link of a staged page, and every file of the repository that one leads to is there as a page."""
    count = 0
    for page in staged.rglob("*.md"):
        prose = "".join(site._CODE.split(page.read_text(encoding="utf-8"))[::2])
        for target in site._LINK.findall(prose):
            if ":" in target or target.startswith("#"):
                continue
            assert (page.parent / target.partition("#")[0]).resolve().is_file(), f"{page.name}: {target}"
            count += 1
    assert count > 1000


def test_links_are_turned_round_and_code_is_left_alone(site: ModuleType) -> None:
    staging = site.Staging(Path("/nowhere"))
    kept = "`[c](docs/tour.md)` [d](https://example.org) [e](#x)"
    text = f"[a](docs/tour.md#the-step) [b](src/penstock/core/batch.py) {kept}"
    turned = f"[a](tour.md#the-step) [b](source/src/penstock/core/batch.py.html) {kept}"
    assert staging.turned(text, "README.md", "index.md") == turned
    assert staging.sources == {"src/penstock/core/batch.py"}
    named = "see `docs/tour.md`, [`docs/tour.md`](docs/tour.md), `docs/nothing.md`"
    assert staging.turned(named, "CHANGELOG.md", "releases.md") == (
        "see [`docs/tour.md`](tour.md), [`docs/tour.md`](tour.md), `docs/nothing.md`"
    )
    fenced = "```\n[a](docs/tour.md)\n```\n"
    assert staging.turned(fenced, "README.md", "index.md") == fenced
    assert staging.turned("[t](../catalogue.tsv)", "docs/concepts/cap.md", "concepts/cap.md") == "[t](../catalogue.md)"
    with pytest.raises(SystemExit, match=r"links to nowhere\.md"):
        staging.turned("[a](nowhere.md)", "docs/tour.md", "tour.md")
    with pytest.raises(SystemExit, match="not in the repository"):
        staging.turned("[a](../../other/x.md)", "docs/tour.md", "tour.md")


def test_sources_and_the_catalogue_become_pages(staged: Path) -> None:
    batch = (staged / "source/src/penstock/core/batch.py.html").read_text(encoding="utf-8")
    assert "class</span>" in batch
    assert 'id="L-1"' in batch
    assert "prefers-color-scheme: dark" in batch
    folder = (staged / "source/src/penstock/select/index.html").read_text(encoding="utf-8")
    assert "snapkv.py" in folder
    table = (staged / "catalogue.md").read_text(encoding="utf-8")
    assert "| A04 | Dynamic batching" in table
    assert "`--scheduling-policy dynamic:timeout_s=T,size=N`" in table
    rows = (ROOT / "docs" / "catalogue.tsv").read_text(encoding="utf-8").splitlines()[1:]
    assert all(f" {row[:3]} " in table for row in rows)


def test_the_check_of_built_pages_notices(site: ModuleType, tmp_path: Path) -> None:
    good = '<a href="b.html#there">x</a><a href="https://example.org">x</a><img src="data:image/png;base64,AA==">'
    (tmp_path / "a.html").write_text(good, encoding="utf-8")
    (tmp_path / "b.html").write_text(
        '<h2 id="there">b</h2><link rel="canonical" href="https://x.org">', encoding="utf-8"
    )
    assert list(site.problems(tmp_path)) == []
    bad = {
        '<a href="c.html">x</a>': "a.html links to c.html, which is not there",
        '<a href="b.html#gone">x</a>': "a.html links to b.html#gone, but there is no such anchor",
        '<a href="#gone">x</a>': "a.html links to #gone, but there is no such anchor",
        '<script src="https://cdn.example.org/x.js"></script>': "a.html loads https://cdn.example.org/x.js",
        '<link rel="stylesheet" href="//fonts.example.org/x">': "a.html loads //fonts.example.org/x",
        '<img src="no.png">': "a.html links to no.png, which is not there",
    }
    for html, said in bad.items():
        (tmp_path / "a.html").write_text(html, encoding="utf-8")
        assert list(site.problems(tmp_path)) == [said]


def test_a_file_that_is_no_text_has_a_page_too(site: ModuleType) -> None:
    assert "bytes that are no text" in site._source_html("benchmarks/results/expert-routes-qwen2.5-coder-0.5b.npz")
