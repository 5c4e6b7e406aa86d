"""The file of results: one JSON object a line, only ever appended to, so a killed run loses nothing but its last cell.

Kinds of lines: "cell" (a measurement or its failure, `key` names it), "check" (correctness), "online", "note". Of
several lines with one key the last counts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


def read(path: Path) -> list[Entry]:
    """All whole lines, oldest first. A torn last line (the writer was killed) is left out."""
    if not path.exists():
        return []
    entries = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                continue  # no line break after it: torn
            raise ValueError(f"{path}:{number} is not JSON") from None
    return entries


def latest(entries: list[Entry], kind: str) -> dict[str, Entry]:
    """Key -> its last entry of this kind."""
    return {entry["key"]: entry for entry in entries if entry.get("kind") == kind}


class Results:
    """The open file. Every entry is on the disk when `add` returns."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.entries = read(path)

    def latest(self, kind: str) -> dict[str, Entry]:
        return latest(self.entries, kind)

    def add(self, entry: Entry) -> None:
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        os.write(self._descriptor, line)  # one write to an append-only file: whole, or torn at the very end
        os.fsync(self._descriptor)
        self.entries.append(entry)


@contextmanager
def opened(path: Path) -> Iterator[Results]:
    """Open for appending, cutting off a torn last line. Raises BlockingIOError if another run holds the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        data = path.read_bytes()
        os.ftruncate(descriptor, data.rfind(b"\n") + 1)
        yield Results(path, descriptor)
    finally:
        os.close(descriptor)
