"""Reading traces line by line: one place for limits, times that run backwards and what is said of a broken line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from penstock.base.errors import InputError
from penstock.sim.workload import MAX_TIME_S, MAX_TOKENS, Broken, TimedRequest, Workload

MAX_LINE = 2**22
"""Characters of one line."""

Parse = Callable[[str], TimedRequest]


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its end) of every line that is not empty. Raises InputError if there is no
    reading.
    """
    try:
        with open(path, encoding="utf-8", errors="replace", newline=None) as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise InputError(f"{path}:{number}: is longer than {MAX_LINE} characters", param="trace")
                text = line.strip()
                if text:
                    yield number, text
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}", param="trace") from None


def requests(path: Path, parse: Parse, broken: Broken, *, header: str = "") -> Iterator[TimedRequest]:
    """What `parse` makes of each line after the header (a line that begins with `header`, if one is named).

    A line is broken if `parse` raises ValueError for it, or if it arrived before the line above. Raises InputError.
    """
    latest_s = 0.0
    waiting_for_header = bool(header)
    for number, text in lines(path):
        if waiting_for_header:
            waiting_for_header = False
            if not text.startswith(header):
                raise InputError(f"{path}:{number}: must be the header {header}", param="trace")
            continue
        try:
            request = parse(text)
            if request.arrival_s < latest_s:
                raise ValueError("arrived before the line above it; sort the file by time")
        except ValueError as error:
            broken.add(f"{path}:{number}", str(error))
            continue
        latest_s = request.arrival_s
        yield request


def read_table(
    path: Path, header: str, parser: Callable[[], Parse], description: str, broken: Broken, *, has_times: bool = True
) -> Workload:
    """The workload of a file with a header. `parser` makes what reads a line, anew for every time it is read."""
    total = num_lines(path)
    return Workload(
        path.stem,
        description,
        lambda: requests(path, parser(), broken, header=header),
        num_requests=None if total is None else max(0, total - 1),
        has_times=has_times,
        broken=broken,
    )


def num_lines(path: Path) -> int | None:
    """Lines of a file, quickly; None if it cannot be read."""
    count, last = 0, b"\n"
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                count += piece.count(b"\n")
                last = piece[-1:]
    except OSError:
        return None
    return count + (last != b"\n")


def columns(text: str, at_least: int) -> list[str]:
    """The cells of a CSV line without quotes. Raises ValueError if there are too few."""
    cells = text.split(",")
    if len(cells) < at_least:
        raise ValueError(f"has {len(cells)} columns, not {at_least}")
    return cells


def tokens(value: str | int | float, name: str) -> int:
    """A length in [1, MAX_TOKENS]. Raises ValueError."""
    return whole(value, name, 1, MAX_TOKENS)


def whole(value: str | int | float, name: str, low: int, high: int) -> int:
    """A whole number in [low, high], also if it is written 63.0. Raises ValueError."""
    try:
        number = float(value)
        exact = int(number)
    except (ValueError, OverflowError, TypeError):
        raise ValueError(f"{name} is {_short(value)}, not a number") from None
    if isinstance(value, bool) or exact != number or not low <= exact <= high:
        raise ValueError(f"{name} is {_short(value)}, not a whole number from {low} to {high}")
    return exact


def seconds(value: str | float, name: str, high: float = MAX_TIME_S) -> float:
    """A number in [0, high]. Raises ValueError."""
    try:
        number = float(value)
    except (ValueError, TypeError):
        raise ValueError(f"{name} is {_short(value)}, not a number") from None
    if isinstance(value, bool) or not 0 <= number <= high:
        raise ValueError(f"{name} is {_short(value)}, not from 0 to {high:g}")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class Stopwatch:
    """Dates as seconds since the first one."""

    def __init__(self) -> None:
        self._start: datetime | None = None

    def seconds(self, text: str) -> float:
        """Seconds from the first date given to `text` (ISO 8601; UTC if it names no zone). Raises ValueError."""
        try:
            now = datetime.fromisoformat(text)
        except ValueError:
            raise ValueError(f"the time is {_short(text)}, not a date like 2023-11-16 18:15:46.68") from None
        if now.tzinfo is None:
            now = now.replace(tzinfo=UTC)
        if self._start is None:
            self._start = now
        passed_s = (now - self._start).total_seconds()
        if passed_s < 0:
            raise ValueError("arrived before the first line; sort the file by time")
        if passed_s > MAX_TIME_S:
            raise ValueError(f"is more than {MAX_TIME_S:g} s after the first line")
        return passed_s
