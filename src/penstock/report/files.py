"""Results as files, and how far something is that takes long."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from penstock.base.errors import PenstockError


def save(path: Path, result: dict[str, Any]) -> None:
    """As JSON, whole or not at all. Raises PenstockError."""
    _write(path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


def print_json(result: Any) -> None:
    """The same on standard output."""
    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())


def save_text(path: Path, text: str) -> None:
    """Whole or not at all. Raises PenstockError."""
    _write(path, text.encode())


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise PenstockError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def progress(label: str, total: int, *, show: bool = True) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where a person is looking; the function counts one more."""
    if not show or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
