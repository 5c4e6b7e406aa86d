"""The program in an answer: out of blocks of code and prose, without what the model tried it with.

What is chosen follows from the text and its syntax alone, never from what passes tests. Rules: of the blocks that
define the function asked for the last one counts, with imports and definitions of the others; without blocks, the lines
that are code; without the function, a text that is its body. Statements at the top that only use the function (tests,
calls, `if __name__`) are dropped, as EvalPlus does (Liu et al., arXiv 2305.01210): they would run, fail or wait for
input.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from typing import NamedTuple

_FENCE = re.compile(r"^([ \t]*(?:[-*>][ \t]+|\d+[.)][ \t]+)?)(`{3,}|~{3,})[ \t]*(.*)$")
_INLINE = re.compile(r"```(?:[Pp]y(?:thon)?3?[ \t]+)?([^`\n]+)```")
_FIRST_LINE = re.compile(r"^(?:from\s+\S+\s+import\s|import\s+\S|def\s+\w+\s*\(|async\s+def\s|class\s+\w+|@\w)")
_ASKS = frozenset(("input", "main", "testmod", "run_doctests", "exit", "quit"))
"""Names whose call at the top belongs to a program that is tried out."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_MOST_LINES = 2000


class _Open(NamedTuple):
    indent: str
    mark: str
    lines: list[str]


def program(text: str, entry: str, begin: str = "") -> str | None:
    """A program that defines the function `entry`, or None if the answer holds none.

    `begin`: text that the answer goes on from, or was shown: the head of a function, with what stands before it.
    """
    try:
        before = _definitions(parsed(_before(begin, entry)), but=entry)
        found = _whole(text, entry)
        if found is None and begin:
            found = _body(text, entry, begin)
    except RecursionError:  # of an answer that adds a thousand terms
        return None
    return None if found is None else "\n\n".join(part for part in (before, found) if part)


def blocks(text: str) -> list[str]:
    """Blocks of code, in the order in which they end; one may hold others; the last need not be closed."""
    done: list[str] = []
    open_: list[_Open] = []
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if fence is not None and not open_:
            open_.append(_Open(fence[1], fence[2], []))
            continue
        for block in open_:
            block.lines.append(line)
        if not open_:
            continue
        last = open_[-1]
        if fence is not None and _closes(fence, last):
            _close(open_, done, drop=True)
        elif fence is not None and fence[3] and len(fence[1]) <= len(last.indent) + 3:
            open_.append(_Open(fence[1], fence[2], []))
        elif fence is None and line.rstrip().endswith(last.mark) and line.count(last.mark) == 1:
            last.lines[-1] = line.rstrip()[: -len(last.mark)]
            _close(open_, done)
    while open_:
        _close(open_, done)
    return done or [found[1] for found in _INLINE.finditer(text)]


def _closes(fence: re.Match[str], block: _Open) -> bool:
    """A fence within a text of the program stands deeper than the one that opened the block."""
    same = fence[2].startswith(block.mark) and not fence[3].strip()
    return same and len(fence[1]) <= len(block.indent) + 3


def _close(open_: list[_Open], done: list[str], *, drop: bool = False) -> None:
    block = open_.pop()
    lines = block.lines[:-1] if drop else block.lines
    width = len(block.indent)
    done.append("\n".join(line[width:] if not line[:width].strip() else line for line in lines))


def _whole(text: str, entry: str) -> str | None:
    """From the blocks, or from the lines that look like code."""
    listed = blocks(text)
    trees = [_longest(block) for block in listed] or [_longest(_code_lines(text))]
    chosen = next((i for i in reversed(range(len(trees))) if _defines(trees[i], entry)), None)
    if chosen is None:
        return None
    tree = trees[chosen]
    assert tree is not None, "it defines the function"
    parts = [_definitions(other, but=entry) for i, other in enumerate(trees) if i != chosen]
    return "\n\n".join(part for part in (*parts, ast.unparse(_without_trials(tree, entry))) if part)


def _code_lines(text: str) -> str:
    """From the first line that begins a program on, with statements that stand right before it."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if _FIRST_LINE.match(line)), None)
    if first is None:
        return ""
    return next(code for i in range(first + 1) if (code := _from(lines, i, first)) is not None)


def _from(lines: list[str], start: int, first: int) -> str | None:
    """The lines from `start` on, if those before `first` are statements."""
    return "\n".join(lines[start:]) if parsed("\n".join(lines[start:first])) is not None else None


def _body(text: str, entry: str, begin: str) -> str | None:
    """The head that was shown, gone on with the text, or with a block that is a body."""
    fence = (
        next((i for i, line in enumerate(lines) if _FENCE.match(line)), None) if (lines := text.split("\n")) else None
    )
    plain = text if fence is None else "\n".join(lines[:fence])
    for part in (plain, *reversed(blocks(text))):
        for body in (part, textwrap.indent(textwrap.dedent(part), "    ")):
            tree = _longest(f"{begin.rstrip()}\n{body}" if not body.startswith("\n") else begin.rstrip() + body)
            if _defines(tree, entry, body=True):
                assert tree is not None, "it defines the function"
                return ast.unparse(_without_trials(tree, entry))
    return None


def _longest(code: str) -> ast.Module | None:
    """As many of the first lines as are a program: an answer may be cut, or go on in prose."""
    lines = code.splitlines()[:_MOST_LINES]
    for end in range(len(lines), 0, -1):
        if lines[end - 1].strip() and (tree := parsed("\n".join(lines[:end]))) is not None:
            return tree
    return None


def parsed(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in a stranger's strings
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defines(tree: ast.Module | None, entry: str, *, body: bool = False) -> bool:
    """`body`: the function must give something back: behind a head any prose or call is its body."""
    for node in tree.body if tree is not None else ():
        if isinstance(node, _DEFINITIONS) and node.name == entry:
            return not body or _returns(node)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == entry for t in node.targets):
            return True
    return False


def _returns(function: ast.stmt) -> bool:
    """Itself, not a function within it."""
    left: list[ast.AST] = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            return True
        left += [] if isinstance(node, _DEFINITIONS) else ast.iter_child_nodes(node)
    return False


def _before(begin: str, entry: str) -> str:
    """What of a prompt stands before the head of the function."""
    head = re.search(rf"^(?:async\s+)?def\s+{re.escape(entry)}\b", begin, re.MULTILINE)
    return begin[: head.start()] if head is not None else ""


def _definitions(tree: ast.Module | None, but: str) -> str:
    """Imports, functions and classes of a program, without one of them."""
    nodes = tree.body if tree is not None else []
    kept = [n for n in nodes if isinstance(n, _IMPORTS) or (isinstance(n, _DEFINITIONS) and n.name != but)]
    return "\n".join(ast.unparse(node) for node in kept)


def _without_trials(tree: ast.Module, entry: str) -> ast.Module:
    """Without statements that only try the function out: those that use it, or what such statements made."""
    users = {entry}
    functions = [node for node in tree.body if isinstance(node, _DEFINITIONS)]
    while more := {f.name for f in functions if _used(f) & (users | {"input"})} - users:
        users |= more
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, (*_DEFINITIONS, *_IMPORTS)) or _is_alias(node, entry):
            kept.append(node)
        elif isinstance(node, ast.Assert) or _is_main(node) or _used(node) & (users | _ASKS) or _prints(node):
            users |= _made(node)
        else:
            kept.append(node)
    return ast.Module(kept, type_ignores=[])


def _is_alias(node: ast.stmt, entry: str) -> bool:
    """`entry = other`."""
    return isinstance(node, ast.Assign) and entry in _made(node) and not isinstance(node.value, ast.Call)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in _used(node.test)


def _prints(node: ast.stmt) -> bool:
    """Or does nothing: the word `python` behind the mark of a block is a name that is not defined."""
    if not isinstance(node, ast.Expr):
        return False
    return "print" in _used(node) or not any(isinstance(n, ast.Call) for n in ast.walk(node))


def _used(node: ast.AST) -> set[str]:
    """Names and attributes."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _made(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
