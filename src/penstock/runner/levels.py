"""Lines of three levels (`select.leankv`): pages at half the bits in front, and behind them those that have all."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import F32
from penstock.ops.plan import I32, Planes
from penstock.ops.ref.codecs.halves import read_halves, store_halves
from penstock.ops.ref.storage import read_kv

NAMES = ("k", "v")


class Levels(NamedTuple):
    """Which tokens a line holds, by position, ascending: `low` of them, as many as fill pages, at half the bits."""

    low: I32
    whole: I32

    @property
    def positions(self) -> I32:
        out: I32 = np.sort(np.concatenate([self.low, self.whole]))
        return out

    @property
    def coarse(self) -> npt.NDArray[np.bool_]:
        """[n] of `positions`: which are at half the bits."""
        return np.isin(self.positions, self.low)

    def num_low(self, size: int) -> int:
        """Pages of S slots at half the bits."""
        return len(self.low) // (2 * size)

    def num_slots(self) -> int:
        return len(self.low) // 2 + len(self.whole)

    def read(self, planes: Planes, name: str, pages: I32) -> F32:
        """[n, G, D] in the order of `positions`."""
        size = planes[name].shape[1]
        low = self.num_low(size)
        whole = read_kv(planes, name, pages, low * size, low * size + len(self.whole))
        both = np.concatenate([read_halves(planes, name, pages[:low]), whole]) if low else whole
        order = np.argsort(np.concatenate([self.low, self.whole]), kind="stable")
        x: F32 = both[order]
        return x

    def cut(self, whole: I32, middle: I32, size: int) -> Levels:
        """What a selector chose, as slots of `positions`; of the middle ones, the best first, what fills pages."""
        at = self.positions
        return Levels(np.sort(at[middle[: len(middle) // (2 * size) * 2 * size]]), at[whole])

    def take(self, planes: Planes, pages: I32, new: Levels) -> tuple[dict[str, npt.NDArray[Any]], dict[str, F32]]:
        """What `new` keeps of this line, which is in `pages`: elements of whole tokens as they are, by plane, and
        numbers of the others."""
        size = planes["k"].shape[1]
        slots = self.num_low(size) * size + np.searchsorted(self.whole, new.whole)
        raw = {name: plane[pages[slots // size], slots % size] for name, plane in planes.items()}
        if not len(new.low):
            return raw, {}
        which = np.searchsorted(self.positions, new.low)
        return raw, {name: self.read(planes, name, pages)[which] for name in NAMES}

    def put(self, planes: Planes, pages: I32, raw: dict[str, npt.NDArray[Any]], numbers: dict[str, F32]) -> None:
        """Write what `take` gave into the line's new pages. Mutates: planes."""
        size = planes["k"].shape[1]
        low = self.num_low(size)
        slots = low * size + np.arange(len(self.whole))
        for name, plane in planes.items():
            plane[pages] = 0
            plane[pages[slots // size], slots % size] = raw[name]
        for name, x in numbers.items():
            store_halves(planes, name, pages[:low], x)
