"""What a chat template may use: work and text are counted, not seconds.

The same template and messages are therefore refused on every machine or on none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

MAX_NODES = 100_000
"""Elements a list, dictionary or nest of them may hold."""


class Meter:
    """What one rendering may still use. `units`: about a microsecond of work each; `chars`: characters written."""

    __slots__ = ("chars", "max_text", "units")

    def __init__(self, units: int, max_text: int) -> None:
        self.units = units
        self.max_text = max_text
        self.chars = 4 * max_text  # text captured by a macro or `set` block is written more than once

    def spend(self, units: int) -> None:
        self.units -= units
        if self.units < 0:
            raise SecurityError("the chat template does too much work")

    def made(self, value: Any) -> Any:
        """Charge for a value that was just created."""
        if isinstance(value, str):
            self.fits(len(value))
            self.spend(1 + (len(value) >> 7))
        elif isinstance(value, list | tuple | dict):
            if len(value) > MAX_NODES:
                raise SecurityError(f"the chat template makes a list of more than {MAX_NODES} elements")
            self.spend(1 + (len(value) >> 3))
        else:
            self.spend(1)
        return value

    def fits(self, chars: int) -> None:
        if chars > self.max_text:
            raise SecurityError(f"the chat template makes a text of more than {self.max_text} characters")

    def walk(self, value: Any, *, text: bool, indent: int = 0) -> None:
        """Charge for all of a nest of containers, as large as it is when every shared part is written out."""
        count, chars = 0, 0
        stack: list[tuple[Any, int]] = [(value, 0)]
        while stack:
            item, depth = stack.pop()
            count += 1
            chars += 8 + depth * indent
            if isinstance(item, str):
                chars += len(item)
            elif isinstance(item, dict):
                stack.extend((x, depth + 1) for pair in item.items() for x in pair)
            elif isinstance(item, list | tuple | set | frozenset):
                stack.extend((x, depth + 1) for x in item)
            if count + len(stack) > MAX_NODES:
                raise SecurityError(f"the chat template makes a value of more than {MAX_NODES} elements")
            if text and chars > self.max_text:
                self.fits(chars)
        self.spend(count >> 2)


_METER: ContextVar[Meter | None] = ContextVar("penstock_template_meter", default=None)


def meter() -> Meter:
    """The meter of the rendering in progress. Without one nothing runs: that keeps the compiler from folding."""
    found = _METER.get()
    if found is None:
        raise SecurityError("this needs a running template")
    return found


@contextmanager
def metered(limit: Meter) -> Iterator[None]:
    token = _METER.set(limit)
    try:
        yield
    finally:
        _METER.reset(token)
