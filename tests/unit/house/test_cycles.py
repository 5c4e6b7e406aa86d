"""Modules do not import each other in a circle, not even for their types: what two of them share stands below both.

Contracts of import-linter keep rooms apart; this looks inside the rooms.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[3] / "src"


def modules(source: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    files = {".".join(p.relative_to(source).with_suffix("").parts): p for p in sorted(source.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


def imports(tree: ast.AST, known: Mapping[str, object]) -> set[str]:
    """Those of `known` that a module imports, wherever in it: in functions and under TYPE_CHECKING, too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in known else str(node.module) for name in names}
    return found & known.keys()


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle, each importing the next; empty: there is none."""
    try:
        TopologicalSorter({name: below - {name} for name, below in graph.items()}).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def graph_of(source: Path) -> dict[str, set[str]]:
    known = modules(source)
    return {name: imports(ast.parse(path.read_text("utf-8")), known) for name, path in known.items()}


def test_no_module_imports_in_a_circle() -> None:
    graph = graph_of(SOURCE)
    assert len(graph) > 500, "the package is found"
    assert cycle(graph) == []


CIRCLES = {
    "at the top": ("from house import b\n", "import house.a\n"),
    "for types": ("from house.b import B\n", "if TYPE_CHECKING:\n    from house.a import A\n"),
    "in a function": ("from house.b import B\n", "def f():\n    from house.a import A\n"),
}


@pytest.mark.parametrize(("a", "b"), CIRCLES.values(), ids=CIRCLES)
def test_a_circle_is_found(tmp_path: Path, a: str, b: str) -> None:
    room = tmp_path / "house"
    room.mkdir()
    for name, text in {"__init__": "", "a": a, "b": b, "c": "from house import a, b\n"}.items():
        (room / f"{name}.py").write_text(text)
    found = cycle(graph_of(tmp_path))
    assert set(found) == {"house.a", "house.b"}
    (room / "b.py").write_text("from house import nothing\n")
    assert cycle(graph_of(tmp_path)) == []
