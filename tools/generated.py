"""What tools share that write a file from code: `write_or_check` is what they do on a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(target: Path, make: Callable[[], str], argv: list[str]) -> int:
    """Write `target`, or with --check say whether it is what would be written: exit status 0, else 1.

    `make` is called once, before anything is written.
    """
    text = make()
    if "--check" not in argv:
        target.write_text(text, encoding="utf-8")
        return 0
    if target.exists() and target.read_text(encoding="utf-8") == text:
        return 0
    print(f"{target.name} is not up to date: run python tools/{Path(sys.argv[0]).name}", file=sys.stderr)
    return 1
