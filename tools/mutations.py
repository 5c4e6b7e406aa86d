"""The small faults that `mutate.py` tries: one spot of a file's functions each."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from reached import spot

_SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
_WORDS = {"min": "max", "max": "min", "True": "False", "False": "True"}
_QUIET = re.compile(r"\blog\.|warn|\btold\(|\btell\(|print\(|progress")
"""What only tells people something: no test is owed that it is said."""


Kind = tuple[str, str, str]
"""Path, line of source, change."""


@dataclass(frozen=True)
class Mutation:
    """`start`, `end`: characters of the file that `new` replaces."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str
    text: str
    """The line it is in."""
    statement: int
    """The statement it is in, as `reached.spot`."""
    nth: int = 1
    """Of the same change in the line."""

    @property
    def change(self) -> str:
        return f"{self.old} -> {self.new}" + (f" ({self.nth})" if self.nth > 1 else "")

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"

    @property
    def kind(self) -> Kind:
        """What stays if lines move."""
        return self.path, self.text, self.change


def mutations(path: Path, root: Path) -> Iterator[Mutation]:
    """All of a file; the second of one kind in a line is called so."""
    seen: Counter[str] = Counter()
    for one in _mutations(path, root):
        seen[one.name] += 1
        yield one if seen[one.name] == 1 else replace(one, nth=seen[one.name])


def _mutations(path: Path, root: Path) -> Iterator[Mutation]:
    text = path.read_text("utf-8")
    lines, around = [0], 0
    for line in text.encode().split(b"\n"):
        lines.append(lines[-1] + len(line) + 1)
    data = text.encode()

    def at(line: int, column: int) -> int:
        return len(data[: lines[line - 1] + column].decode())

    def made(line: int, start: int, end: int, new: str) -> Mutation:
        old = " ".join(text[start:end].split())[:60]
        whole = text.splitlines()[text[:start].count("\n")].strip()
        return Mutation(str(path.relative_to(root)), line, start, end, old, new, whole, around)

    def between(left: ast.expr, right: ast.expr, new: str) -> Iterator[Mutation]:
        """The operator stands between two operands, perhaps beside brackets."""
        start = at(left.end_lineno or 0, left.end_col_offset or 0)
        end = at(right.lineno, right.col_offset)
        found = re.search(r"[^\s()]+(\s+in)?", text[start:end])
        if found is not None and "#" not in text[start:end]:
            yield made(left.end_lineno or 0, start + found.start(), start + found.end(), new)

    def visit(node: ast.AST, inside: bool) -> Iterator[Mutation]:
        nonlocal around
        before, around = around, spot(node) if isinstance(node, ast.stmt) else around
        yield from within(node, inside)
        around = before

    def within(node: ast.AST, inside: bool) -> Iterator[Mutation]:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if inside:
            yield from of(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def of(node: ast.AST) -> Iterator[Mutation]:
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
            yield from between(node.left, node.comparators[0], _SWAPS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
            yield from between(node.left, node.right, _SWAPS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1], _SWAPS[type(node.op)])
        elif isinstance(node, ast.Name) and node.id in _WORDS:
            start = at(node.lineno, node.col_offset)
            yield made(node.lineno, start, start + len(node.id), _WORDS[node.id])
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):  # bool, too
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield made(node.lineno, start, end, new)
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            if not _QUIET.search(text[start:end]):
                yield made(node.lineno, start, end, "pass")

    yield from visit(ast.parse(text), False)


def equivalents(file: Path) -> dict[Kind, str]:
    """By kind of mutation, why it changes nothing."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    parts = [[part.strip() for part in line.split(" | ")] for line in lines if line and not line.startswith("#")]
    return {(path, text, change): why for path, text, change, why in parts}
