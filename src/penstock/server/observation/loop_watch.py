"""How long single pieces of work hold the event loop: while one does, nobody's stream, and no /health, gets anywhere.

A timer on the loop that should come every few milliseconds comes late by as long as something held it. CPU time of the
loop's thread tells that apart from a machine that had no processor to give.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.server.context import Server

log = logging.getLogger("penstock.server")

HOLD_S = 0.05
"""Nothing on the loop may take longer."""
TICK_S = 0.01
MAX_PLACES = 32
"""Places that are remembered, so that each is logged once."""


class LoopWatch:
    """Runs from `start`, on the loop that is running then, until `stop`. Units: seconds.

    Attributes:
        longest_s: longest hold in CPU time of the loop's thread; true to `tick_s`, never too long.
        latest_s: the same in time that passed: what others have waited.
        num_long: holds of more than HOLD_S (CPU time).
    """

    def __init__(self, tick_s: float = TICK_S, *, warns: bool = True) -> None:
        self.tick_s = tick_s
        self.longest_s = self.latest_s = 0.0
        self.num_long = 0
        self.places: dict[str, float] = {}
        """Where long holds were, and the longest of each."""
        self._warns = warns
        self._due_s = self._cpu_s = 0.0
        self._seen: tuple[float, str] = (0.0, "")
        """When the tick was due that a hold has kept waiting, and where the loop was then."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._ended = threading.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._arm()
        threading.Thread(target=self._look, name="penstock-loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def reset(self) -> None:
        """Forget what was measured. For tests."""
        self.longest_s = self.latest_s = 0.0
        self.num_long = 0
        self.places.clear()

    def _arm(self) -> None:
        assert self._loop is not None
        self._due_s = time.perf_counter() + self.tick_s
        self._cpu_s = time.thread_time()
        self._timer = self._loop.call_later(self.tick_s, self._tick)

    def _tick(self) -> None:
        due_s = self._due_s
        late_s = time.perf_counter() - due_s
        held_s = min(late_s, time.thread_time() - self._cpu_s)
        self.latest_s = max(self.latest_s, late_s)
        self.longest_s = max(self.longest_s, held_s)
        if held_s > HOLD_S:
            self.num_long += 1
            self._tell(held_s, late_s, self._seen[1] if self._seen[0] == due_s else "an unknown place")
        self._arm()

    def _tell(self, held_s: float, late_s: float, place: str) -> None:
        known = place in self.places
        if not known and len(self.places) >= MAX_PLACES:
            return
        self.places[place] = max(held_s, self.places.get(place, 0.0))
        if self._warns and not known:
            log.warning(
                "the event loop was held for %.0f ms (%.0f ms of CPU time) at %s", late_s * 1000, held_s * 1000, place
            )

    def _look(self) -> None:
        """In a thread of its own: where the loop is while it is held. Python's lock makes it a little late."""
        while not self._ended.wait(HOLD_S / 2):
            due_s = self._due_s
            if due_s != self._seen[0] and time.perf_counter() - due_s > HOLD_S / 2:
                frame = sys._current_frames().get(self._thread)
                if frame is not None:
                    self._seen = (due_s, _place(frame))


def _place(frame: FrameType) -> str:
    """Our innermost functions, the first the deepest; nothing of what they work on."""
    found: list[str] = []
    walk: FrameType | None = frame
    while walk is not None and len(found) < 3:
        name = walk.f_globals.get("__name__", "")
        if name.startswith("penstock.") and name != __name__:
            found.append(f"{name}.{walk.f_code.co_qualname}:{walk.f_lineno}")
        walk = walk.f_back
    return " in ".join(found) or "code of others"


async def install(server: Server) -> None:
    """Watch this server's loop until it ends."""
    watch = server.parts["loop_watch"] = LoopWatch()
    watch.start()
    server.closers.append(watch.stop)
