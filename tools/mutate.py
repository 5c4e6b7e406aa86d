"""Which small faults would the tests notice? Seeded mutations of the source, each tried by the tests of its place.

    python tools/mutate.py --number 150 --seed 1 --out benchmarks/results/mutations.json [--only sched kv] [--jobs 2]

A mutation changes one spot within a function: a comparison, a sign, `and` for `or`, `min` for `max`, a number by one, a
statement left out. It is noticed if a test of its place fails: those that import the module, and those that `PLACES`
names for its folder. Each job works on a copy of the repository in a temporary folder. What survives is printed with
its line: a missing case, a spot that has no effect, or code that could go. Whether it is equivalent is for a person to
say: `--equivalent FILE` names such mutations, one `path:line: change` a line, and they are not drawn again.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/penstock"
PLACES: dict[str, list[str]] = {
    "sched/policy": ["conformance/test_scheduling_policy.py", "unit/test_policy_cases.py", "engine/test_policy_rows.py",
                     "engine/test_fair_share.py"],
    "sched/drafts": ["engine/test_draft_controller.py", "unit/test_acceptance.py", "engine/test_speculation.py"],
    "sched": ["unit/test_policy_cases.py", "engine/test_rows.py", "engine/test_seconds_budget.py",
              "engine/test_swap.py", "engine/test_laws_machine.py"],
    "kv": ["unit/test_kv_*.py", "conformance/test_prefix_cache.py", "conformance/test_eviction_policy.py"],
    "drafters": ["conformance/test_drafter.py", "unit/test_drafters_*.py", "unit/test_tree_*.py"],
    "runner/verifiers": ["unit/test_verifiers.py", "unit/test_verifiers_engine.py"],
    "select": ["unit/test_kv_selectors*.py", "conformance/test_kv_selectors.py", "unit/test_quest.py"],
    "eval/cap": ["unit/test_cap.py", "engine/test_cap_command.py"],
    "eval": ["unit/test_eval_*.py", "unit/test_perplexity.py", "engine/test_eval_command.py"],
    "sim": ["unit/test_sim_*.py", "engine/test_sim_*.py", "engine/test_goodput.py", "unit/test_policy_cases.py"],
    "server": ["api/test_*.py"],
}  # fmt: skip
"""Tests of a folder, below tests/; the most particular folder counts."""
FOLDERS = ("sched", "kv", "drafters", "runner/verifiers", "select", "eval", "sim", "server")
MOST_S = 400.0
_SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip
_WORDS = {"min": "max", "max": "min", "True": "False", "False": "True"}
_QUIET = re.compile(r"\blog\.|warn|\btold\(|\btell\(|print\(|progress")
"""What only tells people something: no test is owed that it is said."""


@dataclass(frozen=True)
class Mutation:
    """`start`, `end`: characters of the file that `new` replaces."""

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.old} -> {self.new}"


def mutations(path: Path) -> Iterator[Mutation]:
    """All of a file."""
    text = path.read_text("utf-8")
    lines = [0]
    for line in text.encode().split(b"\n"):
        lines.append(lines[-1] + len(line) + 1)
    data = text.encode()

    def at(line: int, column: int) -> int:
        return len(data[: lines[line - 1] + column].decode())

    def made(line: int, start: int, end: int, new: str) -> Mutation:
        return Mutation(str(path.relative_to(ROOT)), line, start, end, " ".join(text[start:end].split())[:60], new)

    def between(left: ast.expr, right: ast.expr, new: str) -> Iterator[Mutation]:
        """The operator stands between two operands, perhaps beside brackets."""
        start = at(left.end_lineno or 0, left.end_col_offset or 0)
        end = at(right.lineno, right.col_offset)
        found = re.search(r"[^\s()]+(\s+in)?", text[start:end])
        if found is not None and "#" not in text[start:end]:
            yield made(left.end_lineno or 0, start + found.start(), start + found.end(), new)

    def visit(node: ast.AST, inside: bool) -> Iterator[Mutation]:
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
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            new = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            yield made(node.lineno, start, end, new)
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            if not _QUIET.search(text[start:end]):
                yield made(node.lineno, start, end, "pass")

    yield from visit(ast.parse(text), False)


def tests_of(path: str) -> list[str]:
    """Tests that import the module, then those of its folder."""
    module = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, name = module.rpartition(".")
    imports = re.compile(rf"^from {re.escape(module)} import|^from {re.escape(parent)} import .*\b{name}\b|^import "
                         rf"{re.escape(module)}\b", re.MULTILINE)  # fmt: skip
    found = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if imports.search(p.read_text("utf-8")))
    below = path.removeprefix(SOURCE + "/")
    folder = max((f for f in PLACES if below.startswith(f + "/")), key=len, default=None)
    for pattern in PLACES[folder] if folder is not None else []:
        found += [p for p in sorted((ROOT / "tests").glob(pattern)) if p not in found]
    if folder == "server" and len(found) > 12:  # those whose name says so come first
        words = set(Path(below).stem.split("_"))
        found.sort(key=lambda p: not words & set(p.stem.split("_")))
    return [str(p.relative_to(ROOT)) for p in found]


@dataclass
class Trial:
    name: str
    noticed: bool
    by: str
    seconds: float


def copy_to(folder: Path) -> None:
    for name in ("src", "tests", "tools", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> tuple[bool, str]:
    """(whether a test failed, which). A run that takes too long has noticed something, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=MOST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True, "time"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", out, re.MULTILINE)
    return process.returncode != 0, failed[0] if failed else out.strip().splitlines()[-1][:100]


def try_one(mutation: Mutation, folder: Path) -> Trial:
    target = folder / mutation.path
    text = target.read_text("utf-8")
    began = time.monotonic()
    try:
        target.write_text(text[: mutation.start] + mutation.new + text[mutation.end :], "utf-8")
        noticed, by = run_tests(folder, tests_of(mutation.path))
    finally:
        target.write_text(text, "utf-8")
    return Trial(mutation.name, noticed, by if noticed else "", round(time.monotonic() - began, 1))


def drawn(number: int, seed: int, folders: list[str], known: set[str]) -> list[Mutation]:
    """As many of each folder as of any other, files and spots at random."""
    rng = random.Random(seed)
    by_folder = {f: [m for p in sorted((ROOT / SOURCE / f).rglob("*.py")) for m in mutations(p)] for f in folders}
    out: list[Mutation] = []
    for i in range(number):
        at = [m for m in by_folder[folders[i % len(folders)]] if m.name not in known and m not in out]
        files = sorted({m.path for m in at})
        path = rng.choice(files)
        out.append(rng.choice([m for m in at if m.path == path]))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(FOLDERS), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--equivalent", type=Path, default=ROOT / "tools" / "equivalent_mutations.txt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console = Console()
    known = set(args.equivalent.read_text("utf-8").splitlines()) if args.equivalent.exists() else set()
    chosen = drawn(args.number, args.seed, args.only, known)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory() as at, ThreadPoolExecutor(args.jobs) as pool:
        free: Queue[Path] = Queue()
        for number in range(args.jobs):
            copy_to(Path(at) / str(number))
            free.put(Path(at) / str(number))

        def one(mutation: Mutation) -> Trial:
            folder = free.get()
            try:
                return try_one(mutation, folder)
            finally:
                free.put(folder)

        for trial in track(pool.map(one, chosen), total=len(chosen), console=console, disable=not console.is_terminal):
            trials.append(trial)
            if not trial.noticed:
                console.print(f"survived: {trial.name}", highlight=False)
            if args.out is not None:
                done = {"seed": args.seed, "number": args.number, "noticed": sum(t.noticed for t in trials),
                        "tried": len(trials), "trials": [asdict(t) for t in trials]}  # fmt: skip
                args.out.write_text(json.dumps(done, indent=1) + "\n", "utf-8")
    noticed = sum(t.noticed for t in trials)
    console.print(f"{noticed} of {len(trials)} noticed ({noticed / max(1, len(trials)):.0%})")
    return 0 if noticed == len(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
