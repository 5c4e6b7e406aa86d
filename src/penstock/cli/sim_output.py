"""Where the results of simulations go, and what is shown while they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def check_folders(*paths: Path | None) -> None:
    """Raises InputError for a file in a folder that is not there: before an hour of work, not after it."""
    from penstock.base.errors import InputError

    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: there is no such folder to write to", param="out")


def write(path: Path, text: str) -> None:
    """Raises InputError if it cannot be."""
    from penstock.base.errors import InputError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}", param="out") from None
    print(f"wrote {path}", file=sys.stderr)


class Bar:
    """Requests done, virtual time and how much faster it passes than real time; only where a person is looking."""

    def __init__(self, label: str, total: int | None) -> None:
        self._label = label
        self._total = total
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.markup import escape
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn(escape(self._label)),
                BarColumn(),
                TextColumn("{task.completed:,.0f} requests"),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("simulating", total=self._total, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: Any) -> None:
        if self._bar is not None:
            fast = progress.now_s / progress.wall_s if progress.wall_s > 0 else 0.0
            note = f"{progress.now_s:,.0f} s of service, {fast:,.0f} x real time"
            self._bar.update(self._task, completed=progress.done, note=note)
