"""What a prefix tree is made of: nodes, and the checkpoints at their ends."""

from __future__ import annotations

TOKEN_BYTES = 4
Slabs = tuple[int, ...]


class SlotCheckpoint:
    """State of the slot groups at the end of `node`: one slab per slot group."""

    __slots__ = ("found", "node", "queued", "slabs", "tick")

    def __init__(self, node: PrefixNode, slabs: Slabs) -> None:
        self.node = node
        self.found = False
        """A sequence has begun from it."""
        self.slabs = slabs
        self.tick = 0
        self.queued = 0


class PrefixNode:
    """A run of blocks that follow one another, all in one place; a root stands for a namespace and has no blocks.

    Attributes:
        key: its name among its parent's children (a root: the namespace).
        tokens: ids of its blocks, 4 bytes each.
        slabs: per block, one slab per paged group; empty if it is not on the device.
        copies: per block, one id per paged group in the tier where it waits; empty if it is on the device.
        near: children that are on the device.
        start: blocks before it.
        locks: holders that stand on this node or below it. A node is evictable when it is 0, and then so is all
            below.
    """

    __slots__ = (
        "checkpoint", "children", "copies", "key", "locks", "near", "parent", "queued", "slabs", "start", "tick",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, parent: PrefixNode | None, key: bytes, start: int, tokens: bytes | bytearray, slabs: list[Slabs]
    ) -> None:
        self.parent = parent
        self.key = key
        self.start = start
        self.tokens = bytearray(tokens)
        self.slabs = slabs
        self.copies: list[Slabs] = []
        self.near = 0
        self.children: dict[bytes, PrefixNode] = {}
        self.locks = 0
        self.tick = 0
        self.queued = 0
        self.checkpoint: SlotCheckpoint | None = None

    @property
    def end(self) -> int:
        """Blocks up to its end."""
        return self.start + len(self.slabs) + len(self.copies)
