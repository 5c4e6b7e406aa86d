"""Files of examples that strangers wrote: read whole, checked field by field, one sentence with file and line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from penstock.base.errors import ConfigError, InputError
from penstock.formats.files import quoted, read_text

MAX_BYTES = 1 << 30
T = TypeVar("T")


class Row:
    """One line of a file; `str`, `strings` and so on say what is wrong, and where."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def wrong(self, why: str) -> InputError:
        return InputError(f"{self.where}: {why}", param="tasks")

    def get(self, *names: str) -> Any:
        """The first field of these that is there."""
        for name in names:
            if name in self.values:
                return self.values[name]
        has = ", ".join(map(str, list(self.values)[:12]))
        raise self.wrong(f"has no field {' or '.join(map(repr, names))}; it has: {has}")

    def text(self, *names: str, empty: bool = False) -> str:
        value = self.get(*names)
        if not isinstance(value, str) or not (empty or value.strip()):
            raise self.wrong(f"{names[0]!r} must be a text{'' if empty else ' that is not empty'}, not {_short(value)}")
        return value

    def texts(self, *names: str) -> list[str]:
        """A list of texts; a single text is a list of one."""
        value = self.get(*names)
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed or not all(isinstance(item, str) for item in listed):
            raise self.wrong(f"{names[0]!r} must be a list of texts, not {_short(value)}")
        return listed

    def index(self, name: str, below: int) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
            raise self.wrong(f"{name!r} must be a whole number from 0 to {below - 1}, not {_short(value)}")
        return value


def needed(name: str, path: Path | None, usual: str) -> Path:
    """The path. Raises ConfigError saying how to name one."""
    if path is None:
        raise ConfigError(
            f"task {name!r} needs a file: write {name}:FILE, or --data FOLDER with a file {usual} in it", field="tasks"
        )
    return path


def read_rows(path: Path) -> list[Row]:
    """The objects of a JSON Lines file; at least one. Raises ModelError or InputError."""
    rows = []
    for number, line in enumerate(read_text(path, MAX_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{quoted(path)} line {number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deep"
            raise InputError(f"{where} is not JSON: {what}", param="tasks") from None
        if not isinstance(values, dict):
            raise InputError(f"{where} must be an object, not {_short(values)}", param="tasks")
        rows.append(Row(values, where))
    if not rows:
        raise InputError(f"{quoted(path)} holds no examples", param="tasks")
    return rows


def read_csv(path: Path, columns: int) -> list[Row]:
    """Rows without a header, of so many cells, as fields "0", "1", ... Raises ModelError or InputError."""
    rows = []
    try:
        for number, cells in enumerate(csv.reader(io.StringIO(read_text(path, MAX_BYTES)), strict=True), 1):
            where = f"{quoted(path)} row {number}"
            if len(cells) != columns:
                raise InputError(f"{where} has {len(cells)} cells, not {columns}", param="tasks")
            rows.append(Row({str(i): cell for i, cell in enumerate(cells)}, where))
    except csv.Error as error:
        raise InputError(f"{quoted(path)} is not CSV: {error}", param="tasks") from None
    if not rows:
        raise InputError(f"{quoted(path)} holds no examples", param="tasks")
    return rows


def drawn(rows: Sequence[T], seed: int, limit: int) -> list[T]:
    """`limit` of them in the order of the file, the same ones for one seed; all if there are not more."""
    if len(rows) <= limit:
        return list(rows)
    picked = sorted(Random(f"rows {seed}").sample(range(len(rows)), limit))
    return [rows[i] for i in picked]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:60] + "..."
