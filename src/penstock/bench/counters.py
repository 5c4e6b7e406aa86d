"""What a server's /metrics say, Penstock's or vLLM's, as far as a benchmark looks at it."""

from __future__ import annotations

import re
from typing import Any

from penstock.bench import drafts
from penstock.bench.http import CallError, HttpClient
from penstock.core.acceptance import Acceptance

_LINE = r"^penstock:{}_total(?:\{{([^}}]*)\}})? (\S+)$"
_SOURCE = re.compile(r'source="(\w+)"')


class Counters:
    """Sums over all models of one look. What the server does not tell is None."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _lines(self, name: str) -> list[tuple[str, float]]:
        found = re.findall(_LINE.format(name), self._text, re.MULTILINE)
        return [(labels, float(value)) for labels, value in found]

    def total(self, name: str) -> float | None:
        lines = self._lines(name)
        return sum(value for _, value in lines) if lines else None

    @property
    def phases_s(self) -> tuple[float, float] | None:
        """Seconds of steps that prompts owe, and that decoding does."""
        prefill_s, decode_s = self.total("prefill_seconds"), self.total("decode_seconds")
        return None if prefill_s is None or decode_s is None else (prefill_s, decode_s)

    @property
    def energy(self) -> tuple[str, float] | None:
        """(source, joules)."""
        for labels, joules in self._lines("energy_joules"):
            source = _SOURCE.search(labels)
            return source[1] if source else "unknown", joules
        return None

    @property
    def drafts(self) -> Acceptance | None:
        return drafts.read(self._text)


async def scrape(client: HttpClient) -> Counters:
    """Empty if there is no /metrics."""
    try:
        reply = await client.call("GET", "/metrics")
    except CallError:
        return Counters("")
    return Counters(reply.body.decode("utf-8", "replace") if reply.status == 200 else "")


def since(before: Counters, after: Counters) -> dict[str, Any]:
    """`phases_s` (prefill, decode) and `energy` (source, joules) of the time between; None where not told."""
    phases = None
    if after.phases_s is not None:
        was = before.phases_s or (0.0, 0.0)
        phases = (after.phases_s[0] - was[0], after.phases_s[1] - was[1])
    energy = None
    if after.energy is not None:
        energy = (after.energy[0], after.energy[1] - (before.energy[1] if before.energy is not None else 0.0))
    return {"phases_s": phases, "energy": energy}
