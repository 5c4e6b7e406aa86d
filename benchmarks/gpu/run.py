"""What Penstock does on a GPU, measured in a few minutes: correctness first, then kernels, engine and server.

    python -m benchmarks.gpu.run --device cuda --minutes 8 --out gpu-results
    python -m benchmarks.gpu.run --device cpu-torch --tiny --out /tmp/tried        (tries the script itself)
    python -m benchmarks.gpu.run --dry-run                                         (no GPU needed: see dry_run.py)

Needs torch, and Triton for kernels; no network, no installation: `penstock`'s source folder, this folder's parent and
the packages that Penstock requires on PYTHONPATH do (`bundle.py` makes such a folder). Weights are random and made on
the device. Every share refers to a copy bandwidth and a product rate that the same run has measured.

Stages run in a process beside this one, each with a budget; one that fails, hangs or breaks the device becomes an entry
with its traceback, and the next one runs. `OUT/results.json` and `OUT/index.html` are written again after every stage.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import judged
from benchmarks.gpu.page import page
from benchmarks.gpu.stages import NAMES, STAGES

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 5.0
"""What a stage may take beyond its budget before its process is ended: stages look at the clock themselves."""
START_S = 60.0
"""What a process may take until its first stage begins: torch is imported, the device opened."""
GOOD = ("done", "left out")
"""States of stages: that it ran, or said why it cannot here."""
TINY_WHY = "shapes are tiny"
CPU_WHY = "the CPU is no GPU: its speed is nobody's figure"


class Run:
    """Follows the lines that workers write, and writes what they mean. `worker`: the module they run."""

    worker = "benchmarks.gpu.worker"

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.lines = self.out / "lines.jsonl"
        self.lines.unlink(missing_ok=True)
        self.began_s = time.monotonic()
        self.end_s = self.began_s + 60 * args.minutes
        self.started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.log, self.workers = "", 0
        self.broken: dict[str, str] = {}
        """Stages that did not end by themselves, and why."""

    def entries(self) -> list[dict[str, Any]]:
        if not self.lines.exists():
            return []
        whole = self.lines.read_text("utf-8").rsplit("\n", 1)[0]  # a line may be half written
        return [json.loads(line) for line in whole.splitlines()]

    def save(self) -> dict[str, Any]:
        found = result(self.entries(), self)
        text = json.dumps(found, indent=1) + "\n"
        (self.out / "results.json").write_text(text, "utf-8")
        (self.out / "index.html").write_text(page(found), "utf-8")
        return found

    def run(self) -> dict[str, Any]:
        todo = [name for name in NAMES if name in self.args.only]
        while todo and self.end_s - time.monotonic() > 5.0:
            before = len(todo)
            self.work(todo)
            over = {e["stage"] for e in self.entries() if e["kind"] == "end"} | self.broken.keys()
            todo = [name for name in todo if name not in over]
            self.save()
            if len(todo) == before:  # nothing begins here, so nothing will
                why = "its process ended before it began: " + self.log[-1500:]
                self.broken |= dict.fromkeys(todo, why)
                todo = []
        return self.save()

    def work(self, todo: list[str]) -> None:
        """One worker, until it is done or has to be ended."""
        left_s = self.end_s - time.monotonic()
        command = [sys.executable, "-m", self.worker, str(self.lines), ",".join(todo), "--device",
                   self.args.device, "--seconds", f"{left_s:.1f}", "--depth", str(self.args.depth),
                   *(["--tiny"] if self.args.tiny else [])]  # fmt: skip
        log = self.out / f"worker-{self.workers}.log"
        self.workers += 1
        old = len(self.entries())
        with log.open("w", encoding="utf-8") as errors:
            worker = subprocess.Popen(command, stdout=errors, stderr=errors, start_new_session=True, cwd=ROOT)
            try:
                why = self.watch(worker, old)
            finally:
                if worker.poll() is None:
                    os.killpg(worker.pid, signal.SIGKILL)
                status = worker.wait()
        text = log.read_text("utf-8", errors="replace")
        self.log = text
        current = _current(self.entries()[old:])
        if current is not None:
            self.broken[current] = why or f"its process ended with status {status}: {text[-1500:]}"
        elif why:
            self.broken[todo[0]] = why

    def watch(self, worker: subprocess.Popen[bytes], old: int) -> str:
        """Wait for its end; else why it has to be ended."""
        stage, since_s, seen = None, time.monotonic(), old
        budgets = {s.name: s.budget_s for s in STAGES}
        while worker.poll() is None:
            time.sleep(0.1)
            new = self.entries()
            if len(new) > seen and any(e["kind"] == "end" for e in new[seen:]):
                self.save()
            seen = len(new)
            current = _current(new[old:])
            if current != stage:
                stage, since_s = current, time.monotonic()
            now_s = time.monotonic()
            if stage is not None and now_s - since_s > budgets[stage] + GRACE_S:
                return f"ended after {now_s - since_s:.0f} s: its budget is {budgets[stage]:.0f} s"
            if stage is None and now_s - since_s > START_S and not any(e["kind"] == "end" for e in new[old:]):
                return f"no stage had begun after {START_S:.0f} s"
            if now_s > self.end_s + GRACE_S:
                return "the time for all stages was over"
        return ""


def _current(entries: list[dict[str, Any]]) -> str | None:
    """The stage that has begun and not ended."""
    open_stage = None
    for entry in entries:
        if entry["kind"] == "begin":
            open_stage = entry["stage"]
        elif entry["kind"] == "end":
            open_stage = None
    return open_stage


def result(entries: list[dict[str, Any]], run: Run) -> dict[str, Any]:
    """All lines as one object: about, goals, stages."""
    args = run.args
    stages = []
    for stage in STAGES:
        own = [e for e in entries if e["stage"] == stage.name]
        times = {e["kind"]: e for e in own if e["kind"] in ("begin", "end")}
        if stage.name in run.broken:
            state = "broken"
        elif "end" in times:
            bad = any(e["kind"] == "failed" or (e["kind"] == "check" and not e["good"]) for e in own)
            left_out = any(e["kind"] == "note" and e["name"] == stage.name for e in own)
            state = "failed" if bad else "left out" if left_out else "done"
        elif "begin" in times:
            state = "running"
        else:
            state = "not asked for" if stage.name not in args.only else "not started"
        took = times["end"]["at_s"] - times["begin"]["at_s"] if "end" in times else None
        kinds = {
            kind: [{k: v for k, v in e.items() if k not in ("stage", "kind")} for e in own if e["kind"] == one]
            for kind, one in (("checks", "check"), ("figures", "figure"), ("notes", "note"), ("failures", "failed"))
        }
        stages.append({"name": stage.name, "state": state, "why": run.broken.get(stage.name, ""), "seconds": took,
                       "budget_s": stage.budget_s, **kinds})  # fmt: skip
    figures = {e["name"]: e["value"] for e in entries if e["kind"] == "figure"}
    about = next((e for e in entries if e["kind"] == "about"), {})
    why_not = TINY_WHY if args.tiny else CPU_WHY if args.device == "cpu-torch" else None
    told = {k: v for k, v in about.items() if k not in ("stage", "kind")}
    return {
        "about": {"started": run.started, "seconds": round(time.monotonic() - run.began_s, 1), "minutes": args.minutes,
                  "tiny": args.tiny, "depth": args.depth, "commit": commit(), **driver(), **told},
        "goals": judged(figures, why_not),
        "stages": stages,
    }  # fmt: skip


def commit() -> str:
    """Of the source: said by the file COMMIT beside it (`bundle.py`), or by git."""
    said = ROOT / "COMMIT"
    if said.exists():
        return said.read_text("utf-8").strip()
    if shutil.which("git") is None:
        return ""
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def driver() -> dict[str, str]:
    """What the driver says of itself; nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit",
               "--format=csv,noheader"]  # fmt: skip
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:
        return {}
    return {"driver": asked.stdout.strip()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu-torch")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all stages")
    parser.add_argument("--only", default=",".join(NAMES), help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--depth", type=int, help="steps in flight; by default 2 on a GPU, as the engine has it")
    parser.add_argument("--tiny", action="store_true", help="shapes for trying the script")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--dry-run", action="store_true", help="no GPU: which operations a step would run there")
    args = parser.parse_args()
    args.depth = args.depth or (2 if args.device.startswith("cuda") else 1)
    args.out, args.only = args.out.resolve(), args.only.split(",")
    unknown = sorted(set(args.only) - set(NAMES))
    if unknown:
        parser.error(f"--only: there is no stage {unknown[0]}; use some of: {', '.join(NAMES)}")
    if args.dry_run:
        from benchmarks.gpu.dry_run import dry_run

        return dry_run(args.out, args.tiny)
    found = Run(args).run()
    for stage in found["stages"]:
        took = "" if stage["seconds"] is None else f", {stage['seconds']:.1f} s"
        print(f"{stage['name']}: {stage['state']}{took}{', ' + stage['why'] if stage['why'] else ''}")
    for goal in found["goals"]:
        measured = "" if goal["measured"] is None else f" ({goal['measured']:.3g} {goal['unit']})"
        print(f"{goal['state']}: {goal['goal']}, at {goal['at']} {goal['wanted']:g} {goal['unit']}{measured}")
    print(f"results: {args.out / 'results.json'}, {args.out / 'index.html'}")
    asked = [stage for stage in found["stages"] if stage["name"] in args.only]
    return 0 if all(stage["state"] in GOOD for stage in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
