"""What joins the stages of a pipeline: a channel from each rank of a stage to the same rank of the next one.

A channel is a ring of slots in memory that both ends have mapped (`PST_SEND`, `PST_RECEIVE`). Who sends waits for a
free slot and not for the other end, so a stage works on the next rows while the one behind it still has the last ones.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from penstock.ops.native.abi import CHANNEL_BYTES, StageChannel, StageChannelEnd
from penstock.parallel.comm import SLOT_BYTES, SPIN_US, mapped, unnamed_memory

SLOTS = 8
"""Pieces that are on their way at a time, at most: as many parts of a step at least."""


class Passed(NamedTuple):
    """What one end of a channel has counted. `waited_s`: seconds for the other end."""

    pieces: int
    num_bytes: int
    waited_s: float


def channel_memory(slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> int:
    """A descriptor of memory for one channel. See `comm.shared_memory`."""
    return unnamed_memory(CHANNEL_BYTES + slots * slot_bytes)


class SharedChannel:
    """`pst_stage_channel`: one end of it, or both, in this process."""

    def __init__(self, fd: int, *, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES, spin_us: int = SPIN_US) -> None:
        """`fd` stays the caller's."""
        start = mapped(self, fd, CHANNEL_BYTES + slots * slot_bytes)
        self.struct = StageChannel(start, slots, spin_us, slot_bytes)
        self._ends = (StageChannelEnd * 2).from_address(start)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)

    @property
    def sent(self) -> Passed:
        return self._passed(0)

    @property
    def received(self) -> Passed:
        return self._passed(1)

    def _passed(self, end: int) -> Passed:
        counts = self._ends[end]
        return Passed(int(counts.pieces), int(counts.bytes), int(counts.waited) / 1e9)
