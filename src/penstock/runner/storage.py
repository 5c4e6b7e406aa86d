"""The bytes of the caches of one rank. It moves what `kv` decided and decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import (
    GIVEN_UP,
    HOST,
    AdapterOp,
    AnyPageOp,
    BlendOp,
    LoadOp,
    OutsideOp,
    PackOp,
    StoreOp,
    StreamOp,
)  # fmt: skip
from penstock.core.protocols import PageStore
from penstock.ops.plan import I32, Planes
from penstock.runner.memory import Part, give_back, populate, zeroed
from penstock.runner.outside import Outside
from penstock.runner.placed import OwnBlocks
from penstock.runner.tiers import PAGE_STORES

if TYPE_CHECKING:
    from penstock.runner.adapters import RankAdapters

Array = npt.NDArray[Any]

# bfloat16 is kept as its bit pattern (see base.bf16); its NaN therefore has to be spelt as an integer. Of int8 the
# scales are NaN; -128 is the number that is never written.
_ARRAYS: dict[str, tuple[type[np.generic], Any]] = {
    "float32": (np.float32, np.nan),
    "float16": (np.float16, np.nan),
    "bfloat16": (np.uint16, 0x7FC0),
    "int8": (np.int8, -128),
    "uint8": (np.uint8, 255),
}


class Storage:
    """One array per plane per cache group.

    Shapes: `planes[g][name]` is [num_pages, S, heads, dim] for a paged or window group ([num_pages, rows, heads, dim]
    for its `page_planes`, see `PlaneSpec.page_rows`; with lanes a page has heads / lanes heads) and
    [num_pages, heads, dim] for a slot group, where num_pages = num_slabs[g] * pages_per_slab.

    `tiers`: who keeps the bytes outside the device, by the number that StoreOp and LoadOp have; `host_slabs` of each
    group in the tier `tier` (a name in PAGE_STORES).
    `poison` fills fresh memory with NaN instead of zero, so that a test sees any read of a page nobody handed out, and
    lets tiers check what they bring back.
    """

    touches = True
    """Whether `back` does anything: memory is taken before it is used, and given back when it is told to."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        num_slabs: Sequence[int],
        block_size: int,
        *,
        host_slabs: Sequence[int] | None = None,
        tier: str = "host",
        poison: bool = False,
        new: Callable[[tuple[int, ...], type[np.generic], Any], Any] | None = None,
    ) -> None:
        """`new`: makes a device plane of shape, dtype and what fills it; None: an array of this process."""
        if new is not None:
            self._new, self.touches = new, False  # type: ignore[method-assign, assignment]
        assert len(groups) == len(num_slabs)
        self._block_size = block_size
        self.pages_per_slab = tuple(group.pages_per_slab for group in groups)
        self.num_pages = tuple(slabs * group.pages_per_slab for group, slabs in zip(groups, num_slabs, strict=True))
        self.planes: tuple[Planes, ...] = tuple(
            planes_of(group, pages, block_size, poison, self._new)
            for group, pages in zip(groups, self.num_pages, strict=True)
        )
        self.tiers: dict[int, PageStore] = {
            HOST: PAGE_STORES.get(tier)(groups, host_slabs or [0] * len(groups), block_size, checked=poison)
        }
        self.outside: Outside | None = None
        """Tiers outside this process, if there are any."""
        self.placed: OwnBlocks | None = None
        """Which blocks are on this rank, where each lies on one of several: `planes` has room for these alone."""
        self.adapters: RankAdapters | None = None
        """Who reads adapters, if there are any."""
        self.streams: list[StreamOp] = []
        """Of the step that was planned last: `runner.layer_streams` carries them out while it runs."""
        self._backed = [0] * len(groups)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays, as numpy counts them."""
        return sum(array.nbytes for planes in self.planes for array in planes.values())

    def back(self, num_slabs: Sequence[int]) -> None:
        """Take memory for the first `num_slabs` of each group, in a thread, and give that behind them back.

        What is given back reads as zeros, and is taken again when it is written to. No step may be in flight then.
        """
        if not self.touches:
            return
        num_slabs = num_slabs if self.placed is None else self.placed.num_slabs(num_slabs)
        more: list[Part] = []
        for g, (had, wanted) in enumerate(zip(self._backed, num_slabs, strict=True)):
            first, last = (n * self.pages_per_slab[g] for n in (min(had, wanted), max(had, wanted)))
            parts = [(array, first * array.strides[0], last * array.strides[0]) for array in self.planes[g].values()]
            if wanted > had:
                more += parts
            elif wanted < had:
                give_back(parts)
        self._backed = list(num_slabs)
        self._populating = populate(more)

    def apply(
        self, ops: Iterable[AnyPageOp], pack: Callable[[PackOp], None] | None = None,
        blend: Callable[[BlendOp], None] | None = None,
    ) -> dict[int, bool]:  # fmt: skip
        """Zero and copy pages, strictly in order: a later op may read what an earlier one wrote. `pack` does PackOps,
        `blend` BlendOps.

        Returns the loads that have ended, late ones too, and whether they brought what had been stored
        (`StepOutput.moves`). Mutates: `planes`, `tiers`. A page id outside its group, or a copy onto itself, is our own
        bug (AssertionError).
        """
        moves = self.ended()
        self.streams = []
        for op in ops if self.placed is None else self.placed.ops(ops):
            if isinstance(op, StreamOp):
                self.streams.append(op)
                continue
            if isinstance(op, AdapterOp):
                assert self.adapters is not None, f"{op}: this rank has no adapters"
                self.adapters.order(op)
                continue
            if isinstance(op, OutsideOp):
                assert self.outside is not None, f"{op}: there is no such tier"
                self.outside.order(op)
                continue
            if isinstance(op, BlendOp):
                assert blend is not None, f"{op}: nobody computes anything again"
                blend(op)
                continue
            assert 0 <= op.group < len(self.planes), f"{op}: no such cache group"
            if isinstance(op, PackOp):
                assert pack is not None, f"{op}: nobody selects"
                pack(op)
                continue
            assert op.count > 0, f"{op}: nothing to do"
            planes, last = self.planes[op.group], self.num_pages[op.group] - op.count
            if isinstance(op, StoreOp):
                assert 0 <= op.src <= last, f"{op}: source outside its group's pages"
                self.tiers[op.tier].store(op, planes)
                continue
            assert 0 <= op.dst <= last, f"{op}: destination outside its group's pages"
            if isinstance(op, LoadOp):
                good = self.tiers[op.tier].load(op, planes)
                if good is not None:
                    moves[op.move] = good and moves.get(op.move, True)
            elif op.src == GIVEN_UP:
                for array in planes.values():
                    self._give_up(array, op.dst, op.count)
            elif op.src < 0:
                for array in planes.values():
                    self._zero(array, op.dst, op.count)
            else:
                assert op.src <= last, f"{op}: source outside its group's pages"
                assert abs(op.src - op.dst) >= op.count, f"{op}: source and destination overlap"
                for array in planes.values():
                    array[op.dst : op.dst + op.count] = array[op.src : op.src + op.count]
        if self.outside is not None:
            self.outside.begin()
        for tier in self.tiers.values():
            tier.begin()
        return moves

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        """Late loads that have ended, and whether they are good. With `wait_s` it waits so long for one of them."""
        moves = {} if self.outside is None else self.outside.ended(wait_s)
        for tier in self.tiers.values():
            moves |= tier.ended(wait_s)
        return moves

    def move_slots(self, tables: Sequence[I32], source: Sequence[int] | I32, target: Sequence[int] | I32) -> None:
        """Copy tokens of one sequence from slots `source` [n] to `target` [n], in all layers: what a tree of drafts
        needs once a path of it is accepted, whose i-th token belongs into slot start + i (see `ops.tree`).

        Shapes: tables[g] is the sequence's line(s) in group g, [1, M] or [num_layers, M], as in `ops.plan.GroupPlan`.
        All slots are read before one is written. Mutates: `planes`. A slot without a page, or a group that keeps no
        tokens, is our own bug (AssertionError).
        """
        assert len(tables) == len(self.planes), f"{len(tables)} tables for {len(self.planes)} cache groups"
        here, there = np.asarray(source, np.int32), np.asarray(target, np.int32)
        assert here.shape == there.shape == (here.size,), f"{here.shape} slots to {there.shape}"
        assert np.unique(there).size == there.size, "two tokens for one slot"
        for g, table in enumerate(tables):
            for array in self.planes[g].values():
                assert array.ndim == 4, f"group {g} keeps no tokens"
                assert array.shape[1] == self._block_size, "entries of several tokens follow one path"
                array[self._place(g, table, there, array)] = array[self._place(g, table, here, array)]

    def clear_slots(self, tables: Sequence[I32], slots: Sequence[int] | I32) -> None:
        """Zero tokens of one sequence (shapes as in `move_slots`): drafts that were wrong leave nothing behind.

        Mutates: `planes`.
        """
        there = np.asarray(slots, np.int32)
        for g, table in enumerate(tables):
            if self.placed is not None and g in self.placed.groups:
                continue  # they stay unseen
            for array in self.planes[g].values():
                if array.ndim == 4 and array.shape[1] == self._block_size:  # others are made anew, or stay unseen
                    array[self._place(g, table, there, array)] = 0

    def _place(self, g: int, table: I32, slots: I32, array: Array) -> tuple[Array, Array]:
        """Pages [layers, n] and offsets [n]."""
        blocks, offsets = np.divmod(slots, array.shape[1])
        assert not slots.size or 0 <= slots.min() <= slots.max() < table.shape[1] * array.shape[1], (
            "a slot has no block"
        )
        pages = table[:, blocks]
        if len(table) == 1:
            layers = self.pages_per_slab[g]
            pages = pages * layers + np.arange(layers)[:, None]
        assert not pages.size or 0 <= pages.min() <= pages.max() < self.num_pages[g], "a slot has no page"
        return pages, offsets

    def _new(self, shape: tuple[int, ...], dtype: type[np.generic], content: Any) -> Array:
        """A device plane."""
        return filled(shape, dtype, content)

    def _zero(self, array: Array, first: int, count: int) -> None:
        array[first : first + count] = 0

    def _give_up(self, array: Array, first: int, count: int) -> None:
        """Nobody looks at these pages before they are zeroed."""


def filled(shape: tuple[int, ...], dtype: type[np.generic], content: Any) -> Array:
    """Filled now, and so in memory; zeros of large arrays are not (`memory`)."""
    if content == 0:
        return zeroed(shape, dtype)
    array: Array = np.empty(shape, dtype)
    array.fill(content)
    return array


def planes_of(
    group: CacheGroup,
    num_pages: int,
    block_size: int,
    poison: bool,
    new: Callable[[tuple[int, ...], type[np.generic], Any], Array],
) -> Planes:
    """Arrays for so many pages of a group, each made by `new` (shape, dtype, what fills it)."""
    per_page = (group.spec.page_tokens(block_size),) if group.spec.per_token else ()
    planes: Planes = {}
    for besides, plane in [(False, p) for p in group.spec.planes] + [(True, p) for p in group.spec.page_planes]:
        dtype, nan = _ARRAYS[plane.dtype]
        rows = (plane.page_rows(block_size),) if besides else per_page
        shape = (num_pages, *rows, plane.heads // group.spec.lanes, plane.dim)
        planes[plane.name] = new(shape, dtype, nan if poison else 0)
    return planes
