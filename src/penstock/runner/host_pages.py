"""Host memory as a tier: a second array for each plane, and on request a checksum for each page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import LoadOp, StoreOp
from penstock.ops.plan import I32, Planes
from penstock.runner.storage import filled, planes_of


class HostPages:
    """A `PageStore`. Shapes: `planes[g][name]` as in `Storage`, for `num_pages[g]` pages.

    `checked`: a page that is not what was stored is not brought back. It costs a look at every byte, both ways.
    """

    threads = 1
    """More do not copy sooner."""

    def __init__(
        self, groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *, checked: bool = False
    ) -> None:
        self.num_pages = tuple(n * group.pages_per_slab for group, n in zip(groups, num_slabs, strict=True))
        self.planes: tuple[Planes, ...] = tuple(
            planes_of(group, n, block_size, checked, filled) for group, n in zip(groups, self.num_pages, strict=True)
        )
        self._sums: dict[tuple[int, int], int] | None = {} if checked else None

    def store(self, op: StoreOp, planes: Planes) -> None:
        assert 0 <= op.dst <= self.num_pages[op.group] - op.count, f"{op}: destination outside the tier"
        for name, array in self.planes[op.group].items():
            array[op.dst : op.dst + op.count] = planes[name][op.src : op.src + op.count]
        self.sum_up(op.group, range(op.dst, op.dst + op.count))

    def load(self, op: LoadOp, planes: Planes) -> bool | None:
        assert 0 <= op.src <= self.num_pages[op.group] - op.count, f"{op}: source outside the tier"
        if not self.is_good(op.group, range(op.src, op.src + op.count)):
            return False
        for name, array in self.planes[op.group].items():
            planes[name][op.dst : op.dst + op.count] = array[op.src : op.src + op.count]
        return True

    def look(self, group: int) -> Planes:
        return self.planes[group]

    def read(self, group: int, pages: I32, planes: Planes, into: I32) -> bool:
        """See `runner.layer_streams.LayerStore`."""
        if not self.is_good(group, pages.tolist()):
            return False
        for name, array in self.planes[group].items():
            planes[name][into] = array[pages]
        return True

    def write(self, group: int, pages: I32, planes: Planes, source: I32) -> None:
        """See `runner.layer_streams.LayerStore`."""
        for name, array in self.planes[group].items():
            array[pages] = planes[name][source]
        self.sum_up(group, pages)

    def begin(self) -> None:
        """Nothing is done beside the steps."""

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        return {}

    def sum_up(self, group: int, pages: Iterable[int]) -> None:
        """These have been stored."""
        if self._sums is not None:
            for page in pages:
                self._sums[group, int(page)] = self._sum(group, int(page))

    def is_good(self, group: int, pages: Iterable[int]) -> bool:
        """Whether these are what was stored."""
        sums = self._sums
        return sums is None or all(sums.get((group, int(page))) == self._sum(group, int(page)) for page in pages)

    def _sum(self, group: int, page: int) -> int:
        total = 0
        for array in self.planes[group].values():
            total = crc32(array[page].tobytes(), total)
        return total
