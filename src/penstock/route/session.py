"""Everything of one session goes to one engine, which has its beginning cached."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.base.hashing import digest
from penstock.route.plain import FewestRequests
from penstock.route.router import EngineLoad, RoutedRequest, RoutePolicy


class Session(RoutePolicy):
    """Rendezvous hashing: if an engine leaves, only its own sessions move. Without a session: least requests.

    Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates (1998).
    """

    reads_tokens = False

    def __init__(self) -> None:
        self._others = FewestRequests()

    def choose(self, asked: RoutedRequest, loads: Sequence[EngineLoad]) -> int:
        if not asked.session:
            return self._others.choose(asked, loads)
        return max(range(len(loads)), key=lambda i: digest(f"{asked.session} {loads[i].number}".encode(), size=8))
