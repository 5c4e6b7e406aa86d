"""The results as one HTML page.

python -m benchmarks.gpu.page gpu-results/results.json page.html
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from penstock.report.numbers import number, percent, seconds, size
from penstock.report.page import Cell, render

_SHARES = ("of the copy bandwidth", "of the product rate", "of a step")


def page(found: dict[str, Any]) -> str:
    about = found["about"]
    where = about.get("card") or about.get("device", "no device was opened")
    tables = [("Goals", ("goal", "wanted", "measured", ""), [_goal(goal) for goal in found["goals"]])]
    tables.append(("Stages", ("stage", "state", "took", "budget"), [_stage(stage) for stage in found["stages"]]))
    for stage in found["stages"]:
        rows: list[list[Any]] = [_figure(figure) for figure in stage["figures"]]
        rows += [[c["name"], Cell("right" if c["good"] else "wrong", "" if c["good"] else "flag"), c["said"]]
                 for c in stage["checks"]]  # fmt: skip
        rows += [[n["name"], "not measured", n["said"]] for n in stage["notes"]]
        rows += [[f["name"], Cell("failed", "flag"), f["said"]] for f in stage["failures"]]
        if stage["why"]:
            rows.append([stage["name"], Cell(stage["state"], "flag"), stage["why"]])
        if rows:
            tables.append((stage["name"], ("", "", ""), rows))
    return str(render(
        "sheet.html", title="Penstock on a GPU", charts=(), findings=(), left_out=(),
        intro=[f"{where}, {about['started']}, {about['seconds']:.0f} s of at most {about['minutes']:g} minutes"],
        tables=tables, setup=[", ".join(f"{key} {value}" for key, value in about.items() if value not in (None, ""))],
        foot="Weights are random and were made on the device. Shares refer to a copy within the device's memory (bytes "
        "read plus bytes written) and to a product in bfloat16, both measured in the same run.",
    ))  # fmt: skip


def _stage(stage: dict[str, Any]) -> list[Any]:
    took = "" if stage["seconds"] is None else seconds(stage["seconds"])
    return [stage["name"], _state(stage["state"], ("done", "left out")), took, seconds(stage["budget_s"])]


def _goal(goal: dict[str, Any]) -> list[Any]:
    wanted = f"at {goal['at']} {_value(goal['wanted'], goal['unit'])}"
    measured = goal["why"] if goal["measured"] is None else _value(goal["measured"], goal["unit"])
    return [goal["goal"], wanted, measured, _state(goal["state"], ("met",))]


def _state(state: str, good: tuple[str, ...]) -> Any:
    return state if state in good else Cell(state, "flag")


def _figure(figure: dict[str, Any]) -> list[Any]:
    said = figure.get("said", "")
    if "low" in figure:
        unit = figure["unit"]
        said += f" ({_value(figure['low'], unit)} to {_value(figure['high'], unit)})" if "high" in figure else ""
    if "places" in figure:
        said += "; ".join(f"{place} {count} times" for place, count in figure["places"].items())
    return [figure["name"], _value(figure["value"], figure["unit"]), said]


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value)
    if unit == "B":
        return size(value)
    if unit in _SHARES:
        return f"{percent(value)} {unit}"
    return f"{number(value)} {unit}"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(page(json.loads(Path(sys.argv[1]).read_text("utf-8"))), "utf-8")
