"""Times as other families' APIs tell them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.server.observation.stats import timings

if TYPE_CHECKING:
    from penstock.server.turns.turn import Turn


def rfc3339(unix_s: float, decimals: int = 0) -> str:
    """A time in UTC. Ollama's clients expect fractions of a second, Anthropic's none."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return whole + (f"{unix_s % 1:.{decimals}f}"[1:] if decimals else "") + "Z"


def spans_s(turn: Turn, now_s: float) -> tuple[float, float, float]:
    """Seconds of a turn: in all, for its prompt, and for generating. `now_s`: on the clock of the call's arrival."""
    t = timings(turn.stream.output)
    return max(0.0, now_s - turn.call.arrival_s), t["prefill_s"] or 0.0, t["decode_s"] or 0.0
