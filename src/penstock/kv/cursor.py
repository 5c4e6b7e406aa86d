"""What the prefix cache knows of one sequence: before its admission (a match) and while it runs (a cursor)."""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.core.sequence import NEVER, NO_LOAD


class PrefixMatch(NamedTuple):
    """What `match` found: a claim on nothing. It is looked up again if the cache has forgotten something since.

    `tails`: for each window group, handles of the matched blocks that the next token can still see.
    """

    num_tokens: int
    namespace: bytes
    entry: Any
    version: int
    tails: tuple[tuple[int, ...], ...] = ()


class PrefixCursor:
    """Lives in `Sequence.node` while the sequence owns memory.

    Attributes:
        entry: where in the prefix cache the sequence stands. The cache keeps the path up to there.
        num_blocks: blocks up to `entry`; the sequence's tables hold the very slabs of the cache there.
        next_commit: `num_computed` from which on commit has something to insert; NEVER once nothing more may enter.
        next_slide: `num_computed` from which on a block lies before a window; NEVER without window groups.
        generation: number of the cache's last reset; an older cursor's `entry` is void.
        holding: False once the entry was left (all tables are ragged).
        branch: position at which the sequence's known tokens part from what the cache knew when it was admitted, 0 if
            it began from all of that.
        staged: a checkpoint that is being copied and cannot be attached yet: (tokens, one slab per slot group).
        last: the checkpoint that goes on with the sequence: (entry, slabs); see `checkpoints.AtBranches`.
        front: what is read from the end of the sequence's text while it is computed (`store_load.BothEnds`), or None.
        reading: the load of that, which may outlast the sequence; NO_LOAD without one.
        tick: when the sequence's blocks in a store (`stored`) were last of use; 0: never.
    """

    __slots__ = (
        "branch", "entry", "front", "generation", "holding", "last", "next_commit", "next_slide", "num_blocks",
        "reading", "staged", "tick",
    )  # fmt: skip

    def __init__(self, entry: Any, num_blocks: int, next_commit: int, generation: int, branch: int = 0) -> None:
        self.entry = entry
        self.num_blocks = num_blocks
        self.next_commit = next_commit
        self.next_slide = NEVER
        self.generation = generation
        self.holding = True
        self.branch = branch
        self.staged: tuple[int, tuple[int, ...]] | None = None
        self.last: tuple[Any, tuple[int, ...]] | None = None
        self.tick = 0
        self.front: Any = None
        self.reading = NO_LOAD

    def copy(self) -> PrefixCursor:
        """Of a fork: where the sequence stands, without its own checkpoints."""
        copy = PrefixCursor(self.entry, self.num_blocks, self.next_commit, self.generation, self.branch)
        copy.next_slide, copy.holding = self.next_slide, self.holding
        copy.tick = self.tick
        return copy
