"""What is to be reached on one H100 or H200, and whether it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Goal(NamedTuple):
    """`figure`: its name in the results. `least`: at least `value` is wanted, else less than it."""

    text: str
    figure: str
    value: float
    unit: str
    least: bool = True


GOALS = (
    Goal("Llama-3.1-8B shape, bfloat16, one row", "llama-3.1-8b.decode1.copy_share", 0.85, "of the copy bandwidth"),
    Goal("the same, 64 rows behind 2k", "llama-3.1-8b.decode64.copy_share", 0.75, "of the copy bandwidth"),
    Goal("paged attention alone, decoding 8 rows behind 32k", "attention.decode8.copy_share", 0.85,
         "of the copy bandwidth"),
    Goal("int4 weights, one row, against bfloat16", "llama-3.1-8b.int4.over_bf16", 2.5, "times"),
    Goal("a prompt of 8k, end to end", "llama-3.1-8b.prefill.product_share", 0.60, "of the product rate"),
    Goal("the host's part of a decode step", "llama-3.1-8b.host_share", 0.03, "of a step", least=False),
    Goal("ready to serve Llama-3.1-8B's shape from the local disk", "llama-3.1-8b.ready_s", 20.0, "s", least=False),
)  # fmt: skip


def judged(figures: Mapping[str, float], why_not: str | None) -> list[dict[str, Any]]:
    """Every goal: met, missed or not measured. `why_not`: what keeps this run from counting at all."""
    out: list[dict[str, Any]] = []
    for goal in GOALS:
        measured = figures.get(goal.figure) if why_not is None else None
        if measured is None:
            state = "not measured"
        else:
            state = "met" if (measured >= goal.value if goal.least else measured < goal.value) else "missed"
        out.append({
            "goal": goal.text, "figure": goal.figure, "wanted": goal.value, "at": "least" if goal.least else "most",
            "unit": goal.unit, "measured": measured, "state": state,
            "why": why_not or ("" if measured is not None else "this run has no such figure: see its stages"),
        })  # fmt: skip
    return out
