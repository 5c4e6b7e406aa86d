"""The store of blocks of a simulated engine: its books are the engine's own, its disk is a formula.

Engines that follow one another over one `SimFolder`, on one clock, are a server that was restarted; engines beside one
another share it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from penstock.base.errors import InputError
from penstock.core.events import StoreNews
from penstock.core.page_ops import DISK
from penstock.executor.sim_files import DiskRates, SimFiles, SimFolder
from penstock.kv.stored import StoreSettings
from penstock.plan.resolve import Plan
from penstock.runner.block_files import file_bytes

LOOK_S = 10.0
"""Between two looks at what others do in the folder, as of servers."""


class SimStore:
    """In place of `launch.kv_store.KVStore`. `settings`: for the books; `files`: for the executor."""

    def __init__(self, folder: SimFolder, settings: StoreSettings) -> None:
        self.folder, self.settings = folder, settings
        self.files = SimFiles(folder, settings.block_bytes, settings.state_bytes)
        self._seen: set[str] = set()
        self._next_s = float("-inf")
        self.asked_only = False
        """It hears of what `look_for` finds alone: nothing of what others write is used unasked."""
        self._found: list[tuple[str, int, int]] = []

    @classmethod
    def of(
        cls, plan: Plan, limit_bytes: int, folder: SimFolder | None = None, *, load: str = "wait", ahead_bytes: int = 0
    ) -> SimStore:
        """For the engine of a plan. `load`, `ahead_bytes`: see StoreSettings."""
        block_bytes, state_bytes = file_bytes(plan.own_groups, plan.block_size)
        both = all(group.spec.kind == "paged" for group in plan.groups)
        settings = StoreSettings(
            bytes(32), "simulated", {DISK: limit_bytes}, block_bytes, state_bytes, both_ends=both,
            num_groups=len(plan.own_groups), load=load, ahead_bytes=ahead_bytes,
        )  # fmt: skip
        return cls(folder or SimFolder(), settings)

    def news(self, now_s: float) -> list[StoreNews]:
        """What others have changed, if it is time to look."""
        news, self._found = [StoreNews(found=self._found)] if self._found else [], []
        if now_s < self._next_s or self.asked_only:
            return news
        self._next_s = now_s + LOOK_S
        evicts = None
        if self.folder.evictor is None:
            self.folder.evictor, evicts = self, True
        elif not self._seen and self.folder.evictor is not self:
            evicts = False
        there = {path: size for path, (size, since_s) in self.folder.blocks.items() if since_s <= now_s}
        found = [(path, size, 0) for path, size in there.items() if path not in self._seen]
        gone = sorted(path for path in self._seen if path not in there)
        self._seen = set(there)
        if found or gone or evicts is not None:
            news.append(StoreNews(found=found, gone=gone, evicts=evicts))
        return news

    def look_for(self, paths: Iterable[str], now_s: float) -> None:
        """These alone, at once: what is there of them is news before the next step, as for a server's new request."""
        there = (path for path in paths if self.folder.holds(path, now_s))
        self._found += [(path, self.folder.blocks[path][0], 0) for path in there]

    def look_soon(self) -> None:
        """Whoever comes next comes from another engine, which has just written its blocks."""
        self._next_s = float("-inf")

    def close(self) -> None:
        """The engine ends: others may make room."""
        if self.folder.evictor is self:
            self.folder.evictor = None


def parse_rates(text: str) -> DiskRates:
    """`read=2e9,write=1e9,seconds=1e-4`: bytes/s of reads and writes, and what a file costs besides; any of them.

    Raises InputError.
    """
    fields = {"read": ("read_bytes_per_s",), "write": ("write_bytes_per_s",), "seconds": ("read_s", "write_s")}
    rates = DiskRates()
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        least = 0.0 if name == "seconds" else 1.0
        if name not in fields or not least <= number <= 1e15:
            raise InputError(
                f"disk-rates: {part.strip()!r} is not read=BYTES/S, write=BYTES/S or seconds=S of a file",
                param="disk_rates",
            )
        given: Any = dict.fromkeys(fields[name], number)
        rates = rates._replace(**given)
    return rates
