"""Figures of an instruct model beside those that its makers published, in both forms and with their prompt.

    PYTHONPATH=. python benchmarks/quality/published.py MODEL DATA [--limit 200] [--only gsm8k] [--out FILE]
    PYTHONPATH=. python benchmarks/quality/published.py MODEL DATA --from RESULT.json ...

MODEL: a file or folder of Qwen2.5-Coder-0.5B-Instruct. DATA: a folder with humaneval.jsonl, mbpp.jsonl and
gsm8k_test.jsonl. The programs that the model writes are run. Every run is kept as soon as it is there, and not repeated
if FILE has it with as many examples. Some 400,000 tokens are generated: most of an hour on two cores that do nothing
else. --from takes results of `penstock eval --json` instead.

Kept of each run: figures with intervals, how answers ended, warnings, tokens, seconds, and 0 or 1 of every example.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock import LLM
from penstock.eval.result import Result, load
from penstock.eval.run import evaluate
from penstock.eval.tasks import make_tasks

PUBLISHED = {"humaneval": 0.616, "mbpp": 0.524}
"""By the makers: Qwen2.5-Coder Technical Report, arXiv 2409.12186v3, EvalPlus on 16-bit weights; MBPP is the part of it
that EvalPlus kept (378 problems, rewritten where they were unclear), HumanEval all 164."""
RUNS = [
    ("humaneval", True), ("humaneval?prompt=qwen", True), ("mbpp", True), ("mbpp?prompt=qwen", True), ("gsm8k", True),
    ("humaneval", False), ("mbpp", False), ("gsm8k", False), ("humaneval?prompt=evalplus", True),
    ("mbpp?prompt=evalplus", True),
]  # fmt: skip
_HUMANEVAL = 115  # rows of the file
OUT = Path("benchmarks/results/published-qwen2.5-coder-0.5b.json")


def summary(result: Result) -> dict[str, Any]:
    """Of a result with one task."""
    (task,) = result.tasks
    (value,) = task.values
    return {
        "task": task.name, "form": "chat" if result.chat else "plain", "metric": value.name, "value": value.value,
        "low": value.low, "high": value.high, "n": value.n, "published": PUBLISHED.get(task.task),
        "ended": {end: sum(e.end == end for e in task.examples) for end in ("stop", "stop_string", "length")},
        "no_answer": sum(not e.answered for e in task.examples), "warnings": [w.why for w in result.warnings],
        "prompt_tokens": task.prompt_tokens, "output_tokens": task.output_tokens, "seconds": round(task.seconds, 1),
        "settings": result.settings, "digest": task.digest,
        "scores": "".join(str(int(e.scores[value.name])) for e in task.examples),
    }  # fmt: skip


def show(runs: list[dict[str, Any]]) -> None:
    table = Table(box=None)
    for column in ("task", "form", "value", "95 %", "n", "published", "cut", "stopped", "no answer"):
        table.add_column(column)
    for run in runs:
        published = "" if run["published"] is None else f"{run['published']:.1%}"
        table.add_row(
            run["task"], run["form"], f"{run['value']:.1%}", f"{run['low']:.1%} to {run['high']:.1%}", str(run["n"]),
            published, *(str(run["ended"][end]) for end in ("length", "stop_string")), str(run["no_answer"]),
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--only", default="", help="tasks whose name begins like this")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--from", dest="results", nargs="+", type=Path, default=[])
    args = parser.parse_args()
    kept: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []

    def keep(result: Result) -> None:
        made = summary(result)
        kept[:] = [run for run in kept if (run["task"], run["form"]) != (made["task"], made["form"])] + [made]
        args.out.write_text(json.dumps({"model": Path(args.model).name, "runs": kept}, indent=1) + "\n")
        show(kept)

    for file in args.results:
        keep(load(file))
    if args.results:
        return
    llm = LLM(args.model, max_model_len=4096, kv_cache_memory_bytes=900_000_000)
    for spec, chat in RUNS:
        (asked,) = make_tasks([spec], data=args.data, allow_code=True)
        form = "chat" if chat else "plain"
        most = min(args.limit, _HUMANEVAL) if spec.startswith("humaneval") else args.limit
        there = any((run["task"], run["form"]) == (spec, form) and run["n"] >= most for run in kept)
        if spec.startswith(args.only) and not there:
            keep(evaluate(llm, [asked], limit=args.limit, chat=chat))


if __name__ == "__main__":
    main()
