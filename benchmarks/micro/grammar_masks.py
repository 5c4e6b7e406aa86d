"""What masks of a JSON schema cost of a step (catalogue row J09): all rows constrained, by default 64 of nano.

    python -m benchmarks.micro.grammar_masks --rows 64 --turns 7

Counted: whatever the logits processor does in the rank's own thread (begin, extend, change), beside the whole step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import about

from penstock import LLM, SamplingParams
from penstock.core.sampling import StructuredOutputs
from penstock.runner.logits.grammar import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **kw: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kw)
        finally:
            spent.append(time.perf_counter() - began)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    spent: list[float] = []
    for name in ("begin", "extend", "change"):
        setattr(Grammar, name, timed(getattr(Grammar, name), spent))
    llm = LLM(args.model, max_model_len=512, max_num_seqs=args.rows)
    asked = [
        SamplingParams(seed=i, max_tokens=args.tokens, structured_outputs=StructuredOutputs(json=SCHEMA))
        for i in range(args.rows)
    ]
    rows = []
    for turn in range(args.turns + 1):
        spent.clear()
        before, began = llm.engine.core.stats.num_steps, time.perf_counter()
        outputs = llm.generate(["A person: "] * args.rows, asked)
        seconds, steps = time.perf_counter() - began, llm.engine.core.stats.num_steps - before
        for sample in (o.outputs[0] for o in outputs):
            if sample.finish_reason == "stop":
                json.loads(sample.text)
        row = {"step_ms": 1e3 * seconds / steps, "masks_ms": 1e3 * sum(spent) / steps, "share": sum(spent) / seconds}
        if turn:  # the first one compiles
            rows.append(row)
            print({name: round(value, 3) for name, value in row.items()})
    shares = [row["share"] for row in rows]
    print(f"masks: {min(shares):.1%} to {max(shares):.1%} of a step, median {statistics.median(shares):.1%}")
    if args.out:
        settings = {name: str(value) for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps({"about": about(**settings), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
