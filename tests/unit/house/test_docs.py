"""The documentation keeps its word: links resolve, counts are true, generated pages are up to date."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from collections import Counter
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest

from penstock.families.gguf.architectures import ARCHITECTURES as GGUF
from penstock.families.registry import ARCHITECTURES, FAMILIES

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
CONCEPTS = sorted((DOCS / "concepts").glob("*.md"))
READING_PATH = (
    "core/sequence", "core/batch", "kv/block_pool", "kv/manager", "kv/prefix/radix", "sched/scheduler", "engine/core",
    "engine/commit", "runner/input_batch", "model/builder",
)  # fmt: skip
MOST_LINES = 2500


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of [text](target), without those that lead to the network."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in found if not re.match(r"[a-z]+://|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """What headings are called in links."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        assert there.is_relative_to(ROOT), f"{page.name} links to {target}, outside of the repository"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}, but there is no such heading"


def test_decisions_have_numbers_of_their_own() -> None:
    numbers = [page.name[:4] for page in (DOCS / "design").glob("[0-9]*.md")]
    assert len(set(numbers)) == len(numbers), sorted(numbers)


def test_the_tour_is_as_long_as_it_says() -> None:
    """A newcomer reads the request's path in under 2,500 lines: the tour's table is that path, and it is counted."""
    text = (DOCS / "tour.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([\w/.]+)\]\(([^)]+)\) \| (\d+) \|", text, re.MULTILINE)
    files = {name.removesuffix(".py"): (DOCS / target).resolve() for name, target, _ in rows}
    assert set(READING_PATH) <= set(files), "the tour leaves out a part of the reading path"
    for name, path in files.items():
        assert path == ROOT / "src" / "penstock" / f"{name}.py"
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files.values())
    assert lines < MOST_LINES, f"the reading path has grown to {lines} lines"
    match = re.search(r"Total: \*\*([\d,]+) lines\*\*", text)
    assert match is not None, "the tour does not state its total"
    stated = int(match[1].replace(",", ""))
    assert stated == sum(int(n) for _, _, n in rows), "the rows do not add up to the total"
    assert abs(stated - lines) <= 0.05 * lines, f"the tour says {stated} lines, there are {lines}"


def test_the_tour_counts_what_runs() -> None:
    text = " ".join((DOCS / "tour.md").read_text(encoding="utf-8").split())
    match = re.search(r"\*\*([\d,]+) functions in ([\d,]+) files, ([\d,]+) lines\*\*", text)
    assert match is not None, "the tour does not say what runs"
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "request_path.py")], capture_output=True, text=True, check=True
    )
    found = re.search(r"(\d+) functions in (\d+) files, (\d+) lines$", run.stdout.strip())
    assert found is not None
    for stated, there in zip(match.groups(), found.groups(), strict=True):
        assert abs(int(stated.replace(",", "")) - int(there)) <= 0.05 * int(there), run.stdout[-80:]


@pytest.mark.parametrize("page", CONCEPTS, ids=lambda p: p.stem)
def test_a_concept_page_is_complete(page: Path) -> None:
    """Problem, idea, source, files, switch, measurement, limits, break condition; and the files it names exist."""
    text = page.read_text(encoding="utf-8")
    for part in ("Problem", "Idea", "Source", "Files", "Switch", "Measured", "Limits", "Breaks when"):
        assert re.search(rf"\*\*{part}\b", text), f"{page.name} has no part {part}"
    sources = [t for t in links(page) if t.startswith("../../src/penstock/")]
    assert sources, f"{page.name} names no file of ours"


def test_every_concept_and_guide_can_be_reached() -> None:
    """From the tour, by links: a page that nobody links to is a page nobody reads."""
    seen: set[Path] = set()
    todo = [ROOT / "README.md", DOCS / "tour.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        todo += [(page.parent / t.partition("#")[0]).resolve() for t in links(page) if ".md" in t]
    wanted = {*CONCEPTS, *(DOCS / "guides").glob("*.md"), *(DOCS / "tutorials").glob("*.md"), *PAGES[2:4]}
    assert wanted <= seen, f"not linked: {sorted(p.name for p in wanted - seen)}"


def test_the_readme_counts_what_works() -> None:
    """Its first lines say how much of the catalogue there is; further down, what an installation asks for."""
    states = Counter(row.status for row in load("catalogue").read())
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(r"Of (\d+) published optimisations (\d+) work or are simulated and (\d+) do in part", text)
    assert said is not None
    there = sum(states.values()), states["works"] + states["simulated"], states["partial"]
    assert tuple(map(int, said.groups())) == there
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"({len(project['dependencies'])} direct dependencies," in text


def test_paths_in_code_spans_exist() -> None:
    """`src/...`, `tests/...` and `docs/...` in the pages of this folder."""
    for page in DOCS.rglob("*.md"):
        if page.parent.name in ("guides", "design", "tutorials") or page.name == "log.md":
            continue  # guides name files that the reader will write; decisions and the log tell of the past
        for path in re.findall(r"`((?:src|tests|docs|tools)/[\w./-]+)`", prose(page)):
            assert (ROOT / path).exists(), f"{page.name} names {path}, which is not there"


@pytest.mark.parametrize("tool", ["matrix", "reference"])
def test_generated_pages_are_up_to_date(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load(tool).main(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("tool", ["matrix", "reference"])
def test_the_check_notices_a_stale_page(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(tool)
    page = tmp_path / "page.md"
    page.write_text(module.PAGE.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    monkeypatch.setattr(module, "PAGE", page)
    assert module.main(["--check"]) == 1
    assert "not up to date" in capsys.readouterr().err


def test_the_matrix_follows_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read from them: a law that is gone, or one that stops drawing a value, changes it."""
    tool = load("matrix")
    pairs = {frozenset((a, b)) for a, b, _, _ in tool.verdicts()}
    assert frozenset(("beam search", "preemption")) in pairs
    assert frozenset(("beam search", "preemption by swap")) in pairs
    assert frozenset(("policy splitfuse", "LFU eviction")) in pairs
    assert frozenset(("policy splitfuse", "policy priority")) not in pairs
    assert frozenset(("slot layers (recurrent)", "latent layers (MLA)")) not in pairs
    monkeypatch.setattr(tool, "LAWS", (tool.Law("tests/engine/test_laws_models.py::test_gone"),))
    with pytest.raises(ValueError, match="has no test_gone"):
        tool.verdicts()


def test_the_families_page_names_every_family_and_architecture() -> None:
    """`tools/families.py` writes it; a family that was added since is missing from it."""
    page = (ROOT / "docs" / "families.md").read_text("utf-8")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.count("|") > 7}
    assert set(FAMILIES.names()) <= set(rows)
    for architecture, family in ARCHITECTURES.items():
        assert architecture in rows[family]
    for name, entry in GGUF.items():
        assert all(name in rows[family].split("|")[3].replace(",", "").split() for family in entry.families)


def test_every_registered_name_is_in_the_list_of_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be turned on is combined with everything: docs/matrix.md leaves nothing out."""
    switches = load("switches")
    assert switches.unlisted() == [], "add a line to SWITCHES in tools/switches.py"
    names = [s.name for s in switches.SWITCHES]
    assert len(set(names)) == len(names)
    monkeypatch.setattr(switches, "SWITCHES", tuple(s for s in switches.SWITCHES if s.name != "policy fair"))
    assert switches.unlisted() == ["scheduling_policy=fair"]


def test_the_table_of_pairs_has_every_pair_of_what_exists() -> None:
    """A selector whose file is not there yet is left out until it is; then this test asks for it."""
    switches, tried = load("switches"), load("pairs").read()
    there = switches.present()
    wanted = {(s.name, s.name) for s in there}
    wanted |= {(a.name, b.name) for a, b in combinations(there, 2) if switches.possible(a, b)}
    found = {(p.first, p.second) for p in tried}
    assert found == wanted, "run python tools/pairs.py NAME for what is new, then python tools/matrix.py"
    assert len(found) == len(tried)
    assert {p.verdict for p in tried} <= {"exact", "lossy", "conflict"}, "a pair that should work does not"
    assert all(p.said for p in tried if p.verdict == "conflict")
    gains = [p for p in tried if p.kv]
    assert 0 < len(gains) <= 60
    families = {s.name: s.family for s in there}
    assert all(families[p.first] != families[p.second] for p in gains)


def test_a_pair_is_judged_by_its_tokens() -> None:
    pairs = load("pairs")
    switch = pairs.Switch
    bench = object.__new__(pairs.Bench)
    bench.files, bench.plain = Path("/nowhere"), ([[1, 2]], True)
    exact, other = switch("a", "x", {}), switch("b", "y", {})
    lossy = switch("c", "z", {}, exact=False)
    bench._alone = {"c": ([[1, 3]], True)}
    for a, b, found, verdict in (
        (exact, other, ([[1, 2]], True), "exact"), (exact, other, ([[1, 3]], True), "differs"),
        (exact, other, ([[1, 2]], False), "varies"), (exact, lossy, ([[1, 3]], True), "lossy"),
        (exact, lossy, ([[1, 2]], True), "differs"), (lossy, lossy, ([[9, 9]], True), "lossy"),
        (lossy, lossy, ([[9, 9]], False), "varies"), (exact, lossy, ("conflict", "no"), "conflict"),
    ):  # fmt: skip
        assert bench._judge(a, b, found)[0] == verdict
