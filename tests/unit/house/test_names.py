"""One name, one class: where two public classes share one, a reader has to ask which. The list may only shrink."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "src" / "penstock"
DOUBLED = {
    "Answer", "Broken", "Budget", "Candidate", "Choice", "Conversation", "Cut", "Distribution", "Engine", "Form",
    "Format", "Front", "Job", "Key", "Meter", "Open", "Options", "Outcome", "Part", "Piece", "Place", "Point",
    "Prepared", "Priority", "Reader", "Reading", "Records", "Report", "Result", "Row", "Rule", "Sample", "Score",
    "SlotUse", "Speed", "Start", "Target", "Verdict", "Window",
}  # fmt: skip
"""Names that more than one public class has still. Remove those that you rename; add none."""


def doubled() -> set[str]:
    """Names of public classes that stand at the top of more than one file."""
    homes: dict[str, set[Path]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path)
    return {name for name, files in homes.items() if len(files) > 1}


def test_no_two_public_classes_share_a_name_but_those_that_are_listed() -> None:
    found = doubled()
    assert not found - DOUBLED, "another class has this name; find one of its own"
    assert not DOUBLED - found, "no longer doubled: take it off the list"
