"""Which servers of layers a sequence goes through: the chain with the least time for a row.

Any server's layers may be used in part, so a chain is a path over the boundaries between layers: a server that has
layer n leads from the boundary before it to any other up to its last. A hop costs the way there and back, as measured,
and what the layers take. Dynamic programming over boundaries finds the least sum; Petals (Borzunov et al., arXiv
2312.08361, section 3.2) does the same by Dijkstra's algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Layers `first` ... `last` - 1 on one server. `way_s`: there and back; `layer_s`: a row in one of its layers."""

    server: str
    first: int
    last: int
    way_s: float
    layer_s: float


class Hop(NamedTuple):
    """Layers `first` ... `last` - 1 of a chain are run by `server`."""

    server: str
    first: int
    last: int


def least_chain(spans: Sequence[Span], first: int, last: int) -> list[Hop] | None:
    """Hops over layers `first` ... `last` - 1 in order, with the least sum of ways and layers; None: some layer is
    nowhere. Of equal chains the one with fewer hops, then with the lesser names."""
    best: dict[int, tuple[float, int, tuple[Hop, ...]]] = {first: (0.0, 0, ())}
    for at in range(first, last):
        if at not in best:
            continue
        so_far, hops, chain = best[at]
        for span in spans:
            if not span.first <= at < span.last:
                continue
            for end in range(at + 1, min(span.last, last) + 1):
                cost = so_far + span.way_s + (end - at) * span.layer_s
                found = (cost, hops + 1, (*chain, Hop(span.server, at, end)))
                if end not in best or found < best[end]:
                    best[end] = found
    return list(best[last][2]) if last in best else None


def missing_layers(spans: Sequence[Span], first: int, last: int) -> list[int]:
    """Layers that no server has."""
    return [n for n in range(first, last) if not any(span.first <= n < span.last for span in spans)]
