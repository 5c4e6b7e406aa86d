"""The order in which blocks leave a store outside the process: of a text the end first, or its beginning.

`lru`: the text used longest ago, its end first: what is left of it is found without a gap. `recompute`: blocks count as
last used `RETAIN` texts later for each block before them, so leading ones go first: they are the cheapest to compute
again, for they look at fewer keys. What is left of a text is read while its beginning is computed (`store_load`).
Source: Pensieve, Yu et al., arXiv 2312.05516, section 4.3 (eviction by the cost of recomputing, leading tokens first).
"""

from __future__ import annotations

STORE_ORDERS = ("lru", "recompute")
RETAIN = 1 / 64


def order_of(name: str, tick: int, depth: int) -> tuple[float, int]:
    """Smaller goes first. `tick`: of the last use of the text; `depth`: which block of it."""
    if name == "recompute":
        return tick + RETAIN * depth, depth
    return tick, -depth
