"""What a prefix tree is made of: nodes, and the checkpoints at their ends."""

from __future__ import annotations

TOKEN_BYTES = 4
DEMOTED, PLAIN, RETAINED = -1, 0, 1
"""Ranks: the smaller goes first, whatever the policy says."""
Slabs = tuple[int, ...]


class Owner:
    """Whose blocks they are (`shares`). `share`: its part of a tier, compared with others' only. `num_idle`: blocks on
    the device that nobody stands on; `num_kept`: in the tier below."""

    __slots__ = ("name", "num_idle", "num_kept", "share")

    def __init__(self, name: str = "", share: float = 1.0) -> None:
        self.name, self.share = name, share
        self.num_idle = self.num_kept = 0


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

    @property
    def rank(self) -> int:
        return self.node.rank


class PrefixNode:
    """A run of blocks that follow one another, all in one place; a root stands for a namespace and has no blocks.

    Attributes:
        key: its name among its parent's children (a root: the namespace).
        tokens: ids of its blocks, 4 bytes each.
        slabs: per block, one slab per paged group; empty if it is not on the device.
        copies: per block, one id per paged group in the tier where it waits; empty if it is on the device.
        near: children that are on the device.
        start: blocks before it.
        owner, space: whose it is, and its namespace, as the one before it.
        rank, until_s: DEMOTED, PLAIN, or RETAINED until a time (`retained`).
        used_s: when somebody last stood on it, in seconds.
        locks: holders that stand on this node or below it. A node is evictable when it is 0, and then so is all
            below.
    """

    __slots__ = (
        "checkpoint", "children", "copies", "key", "locks", "near", "owner", "parent", "queued", "rank", "slabs",
        "space", "start", "tick", "tokens", "until_s", "used_s",
    )  # fmt: skip

    def __init__(
        self, parent: PrefixNode | None, key: bytes, start: int, tokens: bytes | bytearray, slabs: list[Slabs]
    ) -> None:
        self.parent = parent
        if parent is not None:
            self.owner: Owner = parent.owner
        self.space: bytes = key if parent is None else parent.space
        self.rank = PLAIN
        self.until_s = self.used_s = 0.0
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
