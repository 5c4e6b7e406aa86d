"""Other weights of the same model for a running engine, as data."""

from __future__ import annotations

import msgspec

MODES = ("wait", "abort", "recompute", "keep")
SWAPPED = "weights"
"""Finish reason of the news that weights have been swapped, or cannot be: of no request."""
BUSY = "weights are being swapped already; wait for that, or abort the requests that it waits for"
FIRST_VERSION = "default"
"""What the weights that an engine starts with are called (SGLang's word)."""


class WeightFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has read. `content`: hash of the files. `fingerprint`: of what decides the bytes of keys and values,
    as the store of blocks names it."""

    content: str
    fingerprint: str
    read_s: float = 0.0


class WeightsOrder(msgspec.Struct, frozen=True, array_like=True):
    """Which weights follow, and what becomes of the requests in flight.

    Attributes:
        path: folder or file.
        version: what answers call them.
        mode: of MODES. `wait`: whoever has begun ends over the old ones, and whoever has not waits. `abort`: all are
            aborted. `recompute`, `keep`: they go on over the new ones from the next step, their keys and values
            computed again, or as they are (what follows is then that of neither weights).
        facts: of what ranks have read beside the steps, before the order enters the engine. None: nothing yet.
        problem: why they cannot be had; "": they can.
    """

    path: str
    version: str
    mode: str = "wait"
    facts: WeightFacts | None = None
    problem: str = ""
