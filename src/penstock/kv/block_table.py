"""Where one sequence keeps one cache group."""

from __future__ import annotations


class BlockTable:
    """Shared (block b is slab `ids[b]`, for all layers) or ragged (block b of the i-th layer is page `layers[i][b]`).

    A slot group's table is a shared one of length 1. Only the manager changes tables.

    Attributes:
        ids: slabs, block by block; empty when ragged.
        layers: None, or one list of pages per layer of the group.
        base: blocks at the beginning that left the window; they are given up and stand as `core.batch.GONE`.
        dropped: tokens that a selection has taken out of each line (of a shared table: one number for all), so that the
            token at position p is in slot p - dropped; empty as long as nothing was.
        away: layers whose content is in host memory between their turns; they have the same pages by turns, in two sets
            (`kv.layerkv`).
        spare: slabs set aside for what a selection at the end of a step in flight will copy.
        aside: of a table that chose some tokens and lost none (`kv.aside`), where all are that it had computed by then,
            block by block: a slab, or ~i for the tier's i; one that is not full is not there.
    """

    __slots__ = ("aside", "away", "base", "dropped", "ids", "layers", "spare")

    def __init__(self, ids: list[int] | None = None, layers: list[list[int]] | None = None, base: int = 0) -> None:
        self.ids: list[int] = [] if ids is None else ids
        self.layers = layers
        self.base = base
        self.dropped: list[int] = []
        self.spare: list[int] = []
        self.aside: list[int] = []
        self.away: list[int] = []

    @property
    def held(self) -> list[int]:
        """The slabs that it has (a copy), block by block; none when ragged."""
        return self.ids[self.base :]

    @property
    def held_pages(self) -> list[list[int]]:
        """Layer by layer, the pages that it has (copies), each once; no layer unless ragged."""
        twice = self.away[2:]
        return [pages[self.base :] for i, pages in enumerate(self.layers or ()) if i not in twice]

    @property
    def num_blocks(self) -> int:
        """Blocks that it covers, those that are gone included."""
        return len(self.ids) if self.layers is None else len(self.layers[0])

    def __repr__(self) -> str:
        return f"BlockTable({self.ids})" if self.layers is None else f"BlockTable(layers={self.layers})"
