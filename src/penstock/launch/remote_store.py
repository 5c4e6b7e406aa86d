"""What servers of blocks hold, as an engine hears of it: asked by threads, told as news that enter the run's log."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from penstock.core.events import StoreNews
from penstock.core.page_ops import REMOTE
from penstock.runner.block_peer import Address, peer_of
from penstock.runner.block_wire import Ask, PeerError

LOOK_S = 2.0
"""Between two questions."""


class RemoteStore:
    """Of all servers together: a block is there as long as one of them has it. `print_`: of the model, whose blocks
    alone are of use."""

    def __init__(self, addresses: Sequence[Address], print_: str) -> None:
        self._telling = threading.Lock()
        self._holders: Counter[str] = Counter()
        self._news: deque[StoreNews] = deque()
        self.sides = [_Served(address, print_, self) for address in addresses]
        self._next_s = float("-inf")
        self.look()  # what is there at the start, is there for the first request

    def news(self, now_s: float) -> list[StoreNews]:
        """What has changed, if it is time to say; threads ask: who does not answer holds up no news of others."""
        news = [self._news.popleft() for _ in range(len(self._news))]  # threads add to it meanwhile
        if now_s >= self._next_s:
            if self._next_s > float("-inf"):
                for side in self.sides:
                    side.begin()
            self._next_s = now_s + LOOK_S
        return news

    def look(self) -> None:
        """Ask each once, and wait for the answers."""
        for side in self.sides:
            side.ask()

    def look_for(self, paths: Iterable[str], *, comes: bool) -> None:
        """Ask each at once if a request `comes` from another engine: then what it had just written is news."""
        if comes:
            self.look()

    def tell(self, found: list[tuple[str, int]], gone: list[str]) -> None:
        """A server has these now, and has those no more."""
        with self._telling:
            for path in gone:
                self._holders[path] -= 1
            left = [path for path in gone if not self._holders[path]]
            for path in left:
                del self._holders[path]
            came = [(path, num_bytes) for path, num_bytes in found if path not in self._holders]
            self._holders.update(path for path, _ in found)
            if came or left:
                told = [(path, num_bytes, at) for at, (path, num_bytes) in enumerate(came)]
                self._news.append(StoreNews(found=told, gone=left, tier=REMOTE))


class _Served:
    """One server, and what it is known to have."""

    def __init__(self, address: Address, print_: str, store: RemoteStore) -> None:
        self._peer = peer_of(address)
        self._prefix = f"{print_}/"
        self._store = store
        self._epoch, self._since = "", 0
        self._thread: threading.Thread | None = None
        self._asking = threading.Lock()
        self.seen: set[str] = set()

    def begin(self) -> None:
        """Ask by a thread, unless one is still asking."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.ask, name="penstock-remote", daemon=True)
            self._thread.start()

    def ask(self) -> None:
        """Once. Who does not answer has nothing, until it does again: then nobody waits for it in vain."""
        with self._asking:
            self._ask()

    def _ask(self) -> None:
        try:
            listing = self._peer.list(Ask(self._prefix, self._epoch, self._since))
        except PeerError:
            gone, self.seen = sorted(self.seen), set()
            self._epoch, self._since = "", 0
            self._store.tell([], gone)
            return
        gone = sorted(self.seen - {path for path, _ in listing.found}) if listing.anew else listing.gone
        gone = [path for path in gone if path in self.seen]
        found = [(path, num_bytes) for path, num_bytes in listing.found if path not in self.seen]
        self.seen = (self.seen | {path for path, _ in found}) - set(gone)
        self._epoch, self._since = listing.epoch, listing.until
        self._store.tell(found, gone)
