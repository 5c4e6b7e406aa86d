"""How long tools take, by their names, as this server has seen: from an answer that calls one to the request with its
result. LAMPS predicts the same from the class of a call (arXiv 2410.18248, section 3.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

MAX_OPEN = 4096
MAX_TOOLS = 1024
REMEMBERED = 16


class ToolUse(NamedTuple):
    """A call of an answer: its id and the tool's name."""

    call_id: str
    name: str


class ToolTimes:
    """Of all tenants, each apart. Times are in seconds on the caller's clock; what is oldest is forgotten."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], tuple[str, float]] = {}
        self._took: dict[tuple[str, str], deque[float]] = {}

    def called(self, tenant: str, calls: Iterable[ToolUse], now_s: float) -> None:
        for call in calls:
            self._open[tenant, call.call_id] = call.name, now_s
            if len(self._open) > MAX_OPEN:
                del self._open[next(iter(self._open))]

    def answered(self, tenant: str, messages: Sequence[Mapping[str, Any]], now_s: float) -> None:
        """`messages` of a conversation, some of which may be results of calls that are open."""
        for message in messages if self._open else ():
            call_id = message.get("tool_call_id") if isinstance(message, Mapping) else None
            call = self._open.pop((tenant, call_id), None) if isinstance(call_id, str) else None
            if call is not None:
                took = self._took.pop((tenant, call[0]), None) or deque(maxlen=REMEMBERED)
                took.append(now_s - call[1])
                self._took[tenant, call[0]] = took
                if len(self._took) > MAX_TOOLS:
                    del self._took[next(iter(self._took))]

    def expected_s(self, tenant: str, calls: Iterable[ToolUse]) -> float | None:
        """Until all of `calls`, made at once, are answered: the longest of their medians. None: nothing is known."""
        known = [self._took[tenant, call.name] for call in calls if (tenant, call.name) in self._took]
        return max(map(median, known), default=None)
