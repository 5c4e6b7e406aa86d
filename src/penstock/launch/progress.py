"""Progress for long work, on stderr, only where a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

SHOW_FROM_BYTES = 200_000_000
"""Smaller models load before a bar could be read."""


@contextmanager
def loading(
    label: str = "loading weights", *, show_from: int = SHOW_FROM_BYTES
) -> Iterator[Callable[[int, int], None]]:
    """A bar for bytes read or downloaded; silent below `show_from` bytes and where stderr is no terminal."""
    bar: Any = None
    task: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar, task
        if total < show_from or not sys.stderr.isatty():
            return
        if bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            bar = Progress(
                TextColumn(label),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            bar.start()
            task = bar.add_task(label, total=total)
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def warming_up() -> Iterator[Callable[[int, int], None]]:
    """A bar for the steps that make a rank warm; silent where stderr is no terminal."""
    bar: Any = None
    task: Any = None

    def report(done: int, total: int) -> None:
        nonlocal bar, task
        if not sys.stderr.isatty():
            return
        if bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = TextColumn("warming up"), BarColumn(), MofNCompleteColumn()
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            bar.start()
            task = bar.add_task("warming up", total=total)
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()


class StepProgress:
    """Requests done and tokens per second of a `generate` call."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._total = total
        self._show = show
        self._tokens = 0

    def __enter__(self) -> StepProgress:
        if self._show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("requests"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("requests", total=self._total, tokens=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tokens(self, n: int) -> None:
        self._tokens += n
        if self._bar is not None and n:
            self._bar.update(self._task, tokens=self._tokens)

    def finished(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)
