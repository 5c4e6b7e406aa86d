"""What a rank does with pages before a step: one list of operations of several kinds, carried out strictly in order."""

from __future__ import annotations

import msgspec

from penstock.core.adapter import AdapterRef

STATE = ".state"
"""Ends the path of what a sequence's slots hold; other paths are those of blocks, of all groups with tokens."""
HOST, DISK, REMOTE = 1, 2, 3
"""Numbers of tiers: host memory, files, another process; 0 would be the device. The nearer one has the lower number."""
TIER_NAMES = {HOST: "host", DISK: "disk", REMOTE: "remote"}


GIVEN_UP = -2
"""As source of a PageOp: its pages are of no use before they are filled with zeros again."""


class PageOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    """Within the device. `src` < 0: fill pages `dst ... dst+count` of the group with zeros; otherwise copy `count`
    pages src -> dst."""

    group: int
    src: int
    dst: int
    count: int


class StoreOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """Copy `count` pages of the device from `src` on into a tier from `dst` on, as they are at this place of the list:
    right behind it they may be somebody else's."""

    group: int
    src: int
    dst: int
    count: int
    tier: int = HOST


class LoadOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """Copy `count` pages of a tier from `src` on into the device from `dst` on, as a part of load number `move`.

    All operations of one load come in one step, whose rows may read its pages. A `late` load may be finished by any
    later step; until one reports it (`StepOutput.moves`) nobody reads its pages, and neither they nor what is copied
    into them are given to anybody else.
    """

    group: int
    src: int
    dst: int
    count: int
    move: int
    late: bool = False
    tier: int = HOST


class PackOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """What the selection of sequence `seq_id` keeps moves, line by line, from the pages `sources` (one line: slabs, of
    all lines) into the pages `lines`.

    `aside`: where all of its tokens are from now on, block by block (`BlockTable.aside`); those that are not there yet
    are copied there. Without `lines` nothing else moves. Without `sources` all of them are there already.
    """

    group: int
    seq_id: int
    lines: tuple[tuple[int, ...], ...]
    sources: tuple[tuple[int, ...], ...]
    aside: tuple[int, ...] = ()


class PutOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """Keep one block of the device, of group g the slab that begins at page `pages[g]` (-1: the file has none of it),
    under `path`: as it is at this place of the list.

    A later step reports move `move` (`StepOutput.moves`), with False if it could not be kept.
    """

    path: str
    pages: tuple[int, ...]
    move: int
    tier: int = DISK


class GetOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """Bring back the block that is kept under `path`, as a part of the late load `move` (see `LoadOp`). It has a number
    of its own, too, `block`, under which it is told whether what is kept is good. Groups with page -1 want none of it.
    """

    path: str
    pages: tuple[int, ...]
    move: int
    block: int
    tier: int = DISK


class DropOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """What is kept under these paths is given up."""

    paths: tuple[str, ...]
    tier: int = DISK


class StreamOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """Layers of one sequence that are away take two sets of pages in turns (`kv.layerkv`), within this step.

    Before the `layers[i]`-th layer of the group runs, its blocks below `old` are copied from host memory, where that of
    block b is page `homes[b] + layers[i]`, into the pages `sets[i % 2]`; behind it blocks `first` to `last` are
    copied back.
    """

    group: int
    layers: tuple[int, ...]
    sets: tuple[tuple[int, ...], ...]
    homes: tuple[int, ...]
    old: int
    first: int
    last: int

    @property
    def num_pages(self) -> int:
        """Pages that are copied."""
        return len(self.layers) * (self.old + self.last - self.first)


class KeepOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """What is kept under these paths leaves after all others for so many seconds from now on; before all others, if
    they are none."""

    paths: tuple[str, ...]
    seconds: float
    tier: int = DISK


class FetchOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=9):
    """Read the block that is kept under `path` into host memory, for loads that are to come; behind all loads that have
    been ordered. A later step reports move `move`, with False if what is kept is not good. -1: it is needed no more.
    """

    path: str
    move: int
    tier: int = DISK


class BlendOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=10):
    """Compute `num_tokens` tokens of the modules of sequence `seq_id` behind its first again, in the whole context
    (`runner.blending`). `ends`: where modules end."""

    seq_id: int
    ends: tuple[int, ...]
    num_tokens: int


class AdapterOp(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=11):
    """Somebody who waits has this adapter: read it beside the steps. No page moves. `merge`: steps of it alone run on
    weights with the adapter in them from now on (True), on the model's own again (False).

    `blocks`: of the pool, one slab of each full group: from here on they are the adapter's, which is to be read into
    them beside the steps; none: it is given up, and what it had is anybody's."""

    adapter: AdapterRef
    merge: bool | None = None
    blocks: tuple[tuple[int, ...], ...] | None = None


OutsideOp = PutOp | GetOp | DropOp | KeepOp | FetchOp | AdapterOp
"""What tiers outside the engine are told (`runner.outside`), and who reads adapters: no page of the device is named."""
AnyPageOp = PageOp | StoreOp | LoadOp | PackOp | StreamOp | OutsideOp | BlendOp
