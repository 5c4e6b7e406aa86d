"""Where the tokens of a line are that was cut and lost none (`kv.aside`), and what they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.ops.plan import I32, Planes

Array = npt.NDArray[Any]


class Whole(NamedTuple):
    """All tokens of a sequence: those before position `cut` in `aside` (`BlockTable.aside`), of which each line has a
    choice besides, and in its own slots behind these the others."""

    aside: tuple[int, ...]
    cut: int
    num_chosen: list[int]

    def read(
        self, planes: Planes, far: Planes, names: Iterable[str], line: int, num_lines: int, pages: Sequence[int] | I32,
        positions: I32,
    ) -> dict[str, Array]:  # fmt: skip
        """Of each plane [pages, S, ...] among `names` the tokens at ascending `positions` [n] of a line: [n, ...].

        `pages`: the line's own. `far`: the planes of host memory.
        """
        early = int(np.searchsorted(positions, self.cut))
        before, behind = positions[:early], positions[early:]
        own, slabs = np.asarray(pages, np.int32), np.array(self.aside, np.int32)
        out = {}
        for name in names:
            plane = planes[name]
            size = plane.shape[1]
            out[name] = tokens = np.empty((len(positions), *plane.shape[2:]), plane.dtype)
            there = slabs[before // size] if early else before
            for array, mine, ids in ((plane, there >= 0, there), (far.get(name), there < 0, ~there)):
                if mine.any():
                    assert array is not None, "there is no such memory"
                    tokens[:early][mine] = array[ids[mine] * num_lines + line, before[mine] % size]
            slots = behind - self.cut + self.num_chosen[line]
            tokens[early:] = plane[own[slots // size], slots % size] if len(slots) else tokens[early:]
        return out

    def num_far(self, positions: I32, block_size: int) -> int:
        """How many tokens at `positions` are in host memory."""
        blocks = positions[positions < self.cut] // block_size
        return int((np.array(self.aside, np.int32)[blocks] < 0).sum()) if len(blocks) else 0

    def first_new(self, aside: Sequence[int], block_size: int) -> int:
        """The first block of which `aside`, that begins like `self.aside`, does not have all tokens yet."""
        for b, (had, has) in enumerate(zip(self.aside, aside, strict=False)):
            if had != has or (b + 1) * block_size > self.cut:
                return b
        return min(len(self.aside), len(aside))
