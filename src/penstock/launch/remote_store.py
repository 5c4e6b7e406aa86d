"""What a server of blocks holds, as an engine hears of it: asked by a thread, told as news that enter the run's log."""

from __future__ import annotations

import threading
from collections import deque

from penstock.core.events import StoreNews
from penstock.core.page_ops import REMOTE
from penstock.runner.block_peer import Address, peer_of
from penstock.runner.block_wire import Ask, PeerError

LOOK_S = 2.0
"""Between two questions."""


class RemoteStore:
    """`print_`: of the model, whose blocks alone are of use."""

    def __init__(self, address: Address, print_: str) -> None:
        self._peer = peer_of(address)
        self._prefix = f"{print_}/"
        self._epoch, self._since = "", 0
        self._seen: set[str] = set()
        self._thread: threading.Thread | None = None
        self._next_s = float("-inf")
        self._news: deque[StoreNews] = deque()
        self.look()  # what is there at the start, is there for the first request

    def news(self, now_s: float) -> list[StoreNews]:
        """What has changed, if it is time to say; a thread asks."""
        news = [self._news.popleft() for _ in range(len(self._news))]  # a thread adds to it meanwhile
        if now_s >= self._next_s and (self._thread is None or not self._thread.is_alive()):
            if self._next_s > float("-inf"):
                self._thread = threading.Thread(target=self.look, name="penstock-remote", daemon=True)
                self._thread.start()
            self._next_s = now_s + LOOK_S
        return news

    def look(self) -> None:
        """Ask once. Who does not answer has nothing, until it does again: then nobody waits for it in vain."""
        try:
            listing = self._peer.list(Ask(self._prefix, self._epoch, self._since))
        except PeerError:
            self._tell([], sorted(self._seen))
            self._epoch, self._since, self._seen = "", 0, set()
            return
        gone = sorted(self._seen - {path for path, _ in listing.found}) if listing.anew else listing.gone
        found = [(path, num_bytes) for path, num_bytes in listing.found if path not in self._seen]
        self._seen = (self._seen | {path for path, _ in found}) - set(gone)
        self._epoch, self._since = listing.epoch, listing.until
        self._tell(found, gone)

    def _tell(self, found: list[tuple[str, int]], gone: list[str]) -> None:
        if found or gone:
            told = [(path, num_bytes, at) for at, (path, num_bytes) in enumerate(found)]
            self._news.append(StoreNews(found=told, gone=gone, tier=REMOTE))
