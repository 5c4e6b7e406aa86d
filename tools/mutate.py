"""Which small faults would the tests notice? Seeded mutations of the source, each tried by the tests of its place.

    python tools/mutate.py --number 150 --seed 1 --out benchmarks/results/mutations.json [--only sched kv] [--jobs 2]
    python tools/mutate.py --again benchmarks/results/mutations.json    # what survived, after the tests were added

A mutation changes one spot within a function: a comparison, a sign, `and` for `or`, `min` for `max`, a number by one, a
statement left out. It is noticed if a test of its place fails: those that import the module, and those that `PLACES`
names for its folder. Of these only the tests that run the statement are tried (`reached.py`; of a file as many as
`--file-s` lets run), the quickest first, until they took `QUICK_S` and then `--most-s` when nothing was changed. Each
job works on a copy of the repository in a temporary folder. What survives is printed with its line: a missing case, a
spot that has no effect, or code that could go. Whether it is equivalent is for a person to say: `--equivalent FILE` has
one a line, `path | line of source | old -> new | reason`, and they are drawn, but neither tried nor counted.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import Queue

import pytest
from rich.console import Console
from rich.progress import track

from mutations import Kind, Mutation, equivalents, mutations
from reached import Ran, Reached

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/penstock"
PLACES: dict[str, list[str]] = {
    "sched/policy": ["conformance/test_scheduling_policy.py", "unit/sched/test_*.py", "engine/test_policy_rows.py",
                     "engine/test_fair_share.py"],
    "sched/drafts": ["unit/sched/test_sched_cases.py", "unit/engine/test_acceptance.py",
                     "engine/test_draft_controller.py", "engine/test_speculation.py"],
    "sched": ["unit/sched/test_*.py", "engine/test_rows.py", "engine/test_seconds_budget.py", "engine/test_swap.py",
              "engine/test_laws_machine.py"],
    "kv": ["unit/kv/test_*.py", "conformance/test_prefix_cache.py", "conformance/test_eviction_policy.py"],
    "drafters": ["conformance/test_drafter.py", "unit/drafters/test_drafter*.py", "unit/drafters/test_tree_*.py"],
    "runner/verifiers": ["unit/runner/test_verifier*.py"],
    "select": ["unit/select/test_*.py", "conformance/test_kv_selectors.py"],
    "eval/cap": ["unit/eval/test_cap.py", "unit/eval/test_eval_cases.py", "engine/test_cap_command.py"],
    "eval": ["unit/eval/test_*.py", "engine/test_eval_command.py"],
    "sim": ["unit/sim/test_*.py", "engine/test_sim_*.py", "engine/test_goodput.py", "unit/sched/test_policy_cases.py"],
    "server/parsing": ["unit/server/test_parsing_*.py", "api/test_tools.py", "api/test_structured.py"],
    "server": ["unit/server/test_*.py", "api/test_*.py"],
}  # fmt: skip
"""Tests of a folder, below tests/; the most particular folder counts."""
FOLDERS = ("sched", "kv", "drafters", "runner/verifiers", "select", "eval", "sim", "server")
QUICK_S = 5.0
KINDS = ("unit", "conformance", "native", "models", "engine", "api")
"""Folders of tests, the quick ones first."""
NOT_FOUND, EQUIVALENT, NOT_TRIED = "tests are not found", "equivalent", "not tried yet"
MEMORY = 10 << 30
"""Of addresses: a mutation that makes a loop endless ends before it takes the machine's memory."""


@cache
def _texts(root: Path) -> dict[Path, str]:
    return {p: p.read_text("utf-8") for p in sorted((root / "tests").rglob("test_*.py"))}


@cache
def files_of(path: str, root: Path) -> list[str]:
    """Files of tests that import the module and those of its folder, those first that are quick or named like it."""
    module = path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    parent, _, name = module.rpartition(".")
    imports = re.compile(rf"^from {re.escape(module)} import|^from {re.escape(parent)} import .*\b{name}\b|^import "
                         rf"{re.escape(module)}\b", re.MULTILINE)  # fmt: skip
    found = [p for p, text in _texts(root).items() if imports.search(text)]
    below = path.removeprefix(SOURCE + "/")
    folder = max((f for f in PLACES if below.startswith(f + "/")), key=len, default=None)
    for pattern in PLACES[folder] if folder is not None else []:
        found += [p for p in sorted((root / "tests").glob(pattern)) if p not in found]
    words = set(Path(below).parts[-2:][0].split("_") + Path(below).stem.split("_"))
    found.sort(key=lambda p: (KINDS.index(p.relative_to(root).parts[1]), not words & set(p.stem.split("_"))))
    return [str(p.relative_to(root)) for p in found]


@dataclass
class Trial:
    """`first`: noticed when it was first tried; `by`: the test that failed, or why none need."""

    path: str
    line: int
    text: str
    change: str
    first: bool
    noticed: bool
    by: str
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"


def copy_to(folder: Path, root: Path) -> None:
    for name in ("src", "tests", "tools", "docs", "benchmarks"):
        if (root / name).exists():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "Makefile", "constraints.txt"):
        if (root / name).exists():
            shutil.copy(root / name, folder / name)


def run_tests(folder: Path, tests: list[str], most_s: float) -> tuple[int, str]:
    """(pytest's status, the first test that failed). A run that takes too long has noticed something, too.

    Bytecode is kept by the hash of its source: one mutation may follow another within a second, with the same size.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {
        "PYTHONPATH": str(folder / "src"),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }

    def little_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True,
                                   preexec_fn=little_memory)  # fmt: skip
        try:
            status = process.wait(most_s)
        except subprocess.TimeoutExpired:
            return 1, "time"
        finally:
            with suppress(ProcessLookupError):  # and what the tests left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        text = out.read()
    if status == pytest.ExitCode.USAGE_ERROR and "ERROR: not found" in text:
        return status, NOT_FOUND
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return status, failed[0] if failed else (text.strip().splitlines() or [""])[-1][:100]


def try_one(
    mutation: Mutation, folder: Path, reached: list[Ran], most_s: float, alone: Callable[[str], bool]
) -> tuple[bool, str]:
    """(whether it is noticed, by which test). `alone`: whether a test passes by itself without the mutation."""
    target = folder / mutation.path
    text = target.read_text("utf-8")
    parts: tuple[list[Ran], list[Ran]] = ([], [])
    took = 0.0
    for one in sorted(reached, key=lambda one: one.seconds):
        took += one.seconds
        if took <= most_s or not parts[0]:
            parts[took > QUICK_S and bool(parts[0])].append(one)
    try:
        target.write_text(text[: mutation.start] + mutation.new + text[mutation.end :], "utf-8")
        for part in parts:
            left = {one.test: one.seconds for one in part}
            while left:
                limit = 20 + 4 * sum(left.values())
                status, by = run_tests(folder, ["-x", *left], limit)
                if by == NOT_FOUND:  # the mutation changes what is collected
                    status, by = run_tests(folder, ["-x", *sorted({test.partition("::")[0] for test in left})], limit)
                if status == 0:
                    break
                if by not in left or alone(by):
                    return True, by
                del left[by]
    finally:
        target.write_text(text, "utf-8")
    return False, ""


def all_of(folder: str, root: Path) -> list[Mutation]:
    return [m for p in sorted((root / SOURCE / folder).rglob("*.py")) for m in mutations(p, root)]


def drawn(number: int, seed: int, folders: list[str], root: Path) -> list[Mutation]:
    """As many of each folder as of any other, files and spots at random."""
    rng = random.Random(seed)
    by_folder = {f: all_of(f, root) for f in folders}
    out: list[Mutation] = []
    for i in range(number):
        at = [m for m in by_folder[folders[i % len(folders)]] if m not in out]
        files = sorted({m.path for m in at})
        path = rng.choice(files)
        out.append(rng.choice([m for m in at if m.path == path]))
    return out


class Campaign:
    """Copies of the repository, one of them marked; trials in as many of the others as there are jobs."""

    def __init__(self, root: Path, at: Path, jobs: int, reached: Path, file_s: float, most_s: float) -> None:
        self._root, self._most_s = root, most_s
        self._free: Queue[Path] = Queue()
        for number in range(jobs):
            folder = at / str(number)
            copy_to(folder, root)
            compileall.compile_dir(folder / "src", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
            self._free.put(folder)
        copy_to(at / "marked", root)
        paths = [str(p.relative_to(root)) for f in FOLDERS for p in sorted((root / SOURCE / f).rglob("*.py"))]

        def run(tests: list[str]) -> None:
            run_tests(at / "marked", tests, file_s)

        self._reached = Reached(root, at / "marked", paths, reached, run)
        self._lock = threading.Lock()
        self._marked = at / "marked"
        self._passes: dict[str, bool] = {}

    def _alone(self, test: str) -> bool:
        """Some tests pass only behind others of their file."""
        with self._lock:
            if test not in self._passes:
                self._passes[test] = run_tests(self._marked, [test], 300)[0] == 0
            return self._passes[test]

    def one(self, mutation: Mutation) -> Trial:
        began = time.monotonic()
        noticed, by = False, "no test runs it"
        files = files_of(mutation.path, self._root)
        with self._lock:
            ready = [one for one in files if self._reached.has(one, mutation.path)]
        folder = self._free.get()
        try:
            for some in (ready, *([one] for one in files if one not in ready)):
                with self._lock:
                    reached = list(self._reached.by(some, mutation.path, mutation.statement))
                if reached and not noticed:
                    noticed, by = try_one(mutation, folder, reached, self._most_s, self._alone)
                if noticed:
                    break
        finally:
            self._free.put(folder)
        seconds = round(time.monotonic() - began, 1)
        return Trial(mutation.path, mutation.line, mutation.text, mutation.change, noticed, noticed, by, seconds)


class Trials:
    """All of a campaign, kept in a file as they come."""

    def __init__(self, out: Path | None, seed: int, known: dict[Kind, str]) -> None:
        self.all: list[Trial] = []
        self.seed, self._out, self._known = seed, out, known
        if out is not None and out.exists():
            stored = json.loads(out.read_text("utf-8"))
            self.seed, self.all = stored["seed"], [Trial(**one) for one in stored["trials"]]

    def new(self, chosen: list[Mutation]) -> list[tuple[int, Mutation]]:
        """(where its trial goes, mutation) of what was not tried before."""
        at = {one.name: i for i, one in enumerate(self.all)}
        out = []
        for one in chosen:
            why = self._known.get(one.kind)
            if one.name not in at:
                at[one.name] = len(self.all)
                by = NOT_TRIED if why is None else f"{EQUIVALENT}: {why}"
                self.all.append(Trial(one.path, one.line, one.text, one.change, False, False, by, 0.0))
            if self.all[at[one.name]].by == NOT_TRIED and why is None:
                out.append((at[one.name], one))
        return sorted(out, key=lambda at: next(i for i, f in enumerate(FOLDERS) if f"{SOURCE}/{f}/" in at[1].path))

    def again(self, now: list[Mutation]) -> list[tuple[int, Mutation]]:
        """The same of what survived before and is still there; the rest of what survived is settled."""
        out = []
        for at, one in enumerate(self.all):
            kind = one.path, one.text, one.change
            same = [m for m in now if m.kind == kind]
            if not one.noticed and kind in self._known:
                self.all[at] = replace(one, by=f"{EQUIVALENT}: {self._known[kind]}")
            elif not one.noticed and not same:
                self.all[at] = replace(one, noticed=True, by="the code is gone")
            elif not one.noticed:
                out.append((at, min(same, key=lambda m: abs(m.line - one.line))))
        return out

    def put(self, at: int, trial: Trial) -> None:
        """`first` says whether it was noticed at the very first."""
        self.all[at] = trial if self.all[at].by == NOT_TRIED else replace(trial, first=self.all[at].first)

    def counted(self) -> list[Trial]:
        return [one for one in self.all if one.by != NOT_TRIED and not one.by.startswith(EQUIVALENT)]

    def write(self) -> None:
        if self._out is not None:
            tried = self.counted()
            done = {"seed": self.seed, "drawn": len(self.all), "counted": len(tried),
                    "first": sum(one.first for one in tried), "noticed": sum(one.noticed for one in tried),
                    "trials": [asdict(one) for one in self.all]}  # fmt: skip
            self._out.write_text(json.dumps(done, indent=1) + "\n", "utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--number", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(FOLDERS), metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="what it has already is not tried again")
    parser.add_argument("--again", type=Path, metavar="FILE", help="try what survived there once more")
    parser.add_argument("--equivalent", type=Path, default=ROOT / "tools" / "equivalent_mutations.txt")
    parser.add_argument("--reached", type=Path, default=Path(tempfile.gettempdir(), "penstock-reached"))
    parser.add_argument("--file-s", type=float, default=150.0, help="how long a file of tests may take to be followed")
    parser.add_argument("--most-s", type=float, default=90.0, help="of tests from one or more files, for a mutation")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    return parser.parse_args()


def main() -> int:
    args, console = arguments(), Console()
    root = args.root.resolve()
    trials = Trials(args.again or args.out, args.seed, equivalents(args.equivalent))
    if args.again is not None:
        chosen = trials.again([m for f in FOLDERS for m in all_of(f, root)])
    else:
        chosen = trials.new(drawn(args.number, trials.seed, args.only, root))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        campaign = Campaign(root, Path(folder), args.jobs, args.reached, args.file_s, args.most_s)
        made = pool.map(lambda one: campaign.one(one[1]), chosen)
        progress = track(made, total=len(chosen), console=console, disable=not console.is_terminal)
        for (at, _), trial in zip(chosen, progress, strict=True):
            trials.put(at, trial)
            if not trial.noticed:
                console.print(
                    f"survived: {trial.name}  {trial.by}\n    {trial.text}", highlight=False, markup=False, emoji=False
                )
            trials.write()
    trials.write()
    noticed, counted = sum(one.noticed for one in trials.all), len(trials.counted())
    console.print(f"{noticed} of {counted} noticed ({noticed / max(1, counted):.0%})")
    return 0 if noticed == counted else 1


if __name__ == "__main__":
    sys.exit(main())
