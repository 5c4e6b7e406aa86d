"""What passes between a KV selector and the rank: what a sequence keeps, and what attention said about it.

A *line* is one kv head of one layer (or a whole layer, where a cache has no lanes): see `ops.plan.GroupPlan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    F32 = npt.NDArray[np.float32]
    I32 = npt.NDArray[np.int32]

Watches = Literal["nothing", "recent", "all"]
"""Whose attention a selector must see: nobody's, that of the last `observe` tokens, or every token's."""
Drops = Literal["tokens", "blocks", "nothing"]
"""What a selector gives up: single tokens, chosen on the rank; whole blocks, by position alone; or nothing at all, when
it only reads less (the memory stays)."""


BOUNDS = ("k_min", "k_max")
"""Planes of a page with the least and the largest component, each by itself, of its keys."""


@dataclass(frozen=True)
class PageReads:
    """How much of a long context a token behind its prompt reads: whole pages, chosen by their bounds. All are kept.

    Attributes:
        tokens, share: the budget, as `config.selection.Budget` has it; the pages that hold so many tokens, rounded up.
        recent: the pages of so many last tokens are always read. They count, and may be more than the budget.
        dense_layers: so many first layers read everything.

    Source: Quest, arXiv 2406.10774; two dense layers: section 4.1.
    """

    tokens: int | None = None
    share: float = 1.0
    recent: int = 32
    dense_layers: int = 2

    def first_recent(self, num_tokens: int, block_size: int) -> int:
        """The first page that is read in any case by the last of `num_tokens` tokens."""
        return max(0, num_tokens - self.recent) // block_size

    def num_pages(self, num_tokens: int, block_size: int) -> int:
        """Pages that the last of `num_tokens` tokens reads; at most all."""
        pages = -(-num_tokens // block_size)
        if self.tokens is not None:
            tokens = min(self.tokens, num_tokens)
        else:
            tokens = max(1, math.ceil(self.share * num_tokens - 1e-9))
        return min(pages, max(-(-tokens // block_size), pages - self.first_recent(num_tokens, block_size)))


PARTIAL = "k_part"
"""The plane of those components of keys by which a layer's attention is rehearsed."""


@dataclass(frozen=True)
class TokenReads:
    """How much of a long context a token behind its prompt reads: tokens, chosen for each kv head one layer ahead by
    what its queries would score, all but its own and those of the first layers. All are kept.

    Attributes:
        tokens, share: at most, as `config.selection.Budget` has it. Where all fit, all are read.
        recent: so many last tokens are always read, itself among them. They count.
        dense_layers: so many first layers read everything: one at least, for nobody can rehearse the first.
        reach: how far below the largest rehearsed score of any of a head's queries, in nats, tokens may lie: all heads
            read as many as do in the mean.
        rank: share of the keys' components that rehearsals read.

    Source: InfiniGen, arXiv 2406.19707, section 4.3 (its alpha is `reach`).
    """

    tokens: int | None = None
    share: float = 1.0
    recent: int = 8
    dense_layers: int = 1
    reach: float = 4.0
    rank: float = 1.0

    def most(self, num_tokens: int) -> int:
        """Tokens that the last of `num_tokens` may read."""
        wanted = self.tokens if self.tokens is not None else math.ceil(self.share * num_tokens - 1e-9)
        return min(num_tokens, max(wanted, self.recent, 1))


def num_components(share: float, dim: int) -> int:
    """Of `dim` components of a key, `share` of them."""
    return max(1, round(share * dim))


@dataclass
class KVLine:
    """What one line of a sequence's cache holds, slot by slot, before a selection.

    Attributes:
        layer, head: the model's layer, and the kv head in it.
        positions: int32 [n], ascending: which tokens these are.
        stats: name -> float32 [n], a selector's own numbers about each token. Those of dropped tokens are forgotten,
            new tokens begin with 0.
        keys: gives the keys [n, D], rotated as they stand in the cache.
        values: gives the values [n, W].
        coarse: bool [n], which of them are at half the bits; they can only stay so, or go. None: none are.
        recent: gives the attention weights float32 [w, H/G, n] of the last w <= `observe` tokens, head by head of those
            that read this line, over its n slots: a row sums to 1, and has zeros for tokens behind its own (it is all
            zeros for a token whose own slot and all before it are gone). Only for selectors that watch something.
    """

    layer: int
    head: int
    positions: I32
    stats: dict[str, F32] = field(default_factory=dict)
    keys: Callable[[], F32] = lambda: _missing("keys")
    values: Callable[[], F32] = lambda: _missing("values")
    recent: Callable[[], F32] = lambda: _missing("attention")
    coarse: npt.NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.positions)


def _missing(what: str) -> F32:
    raise AssertionError(f"a line without {what}")


@dataclass(frozen=True)
class Selecting:
    """One selection of one sequence: `budget` of its `num_tokens` tokens per line; `tokens` [num_tokens] are their ids.

    A selector may give some lines more and others less, as long as all together keep at most budget x lines.
    `prompt_len`: how many of the tokens are the prompt.
    """

    num_tokens: int
    prompt_len: int
    budget: int
    tokens: I32


class KVSelector(Protocol):
    """Decides what of a sequence's cache is kept. One file each in `penstock.select`; `make(SelectionBench)`."""

    name: str
    drops: Drops
    watches: Watches
    per_head: bool
    """Whether kv heads of a layer may keep different tokens; else a layer is a line."""
    cache_positions: bool
    """Whether tokens stand, for rotary positions, where they stand in the cache (StreamingLLM), not where they came."""
    aside: bool
    """Whether what is not chosen is set aside (`kv.aside`): its lines hold all tokens, and all may be chosen again."""
    halves: bool
    """Whether it keeps some tokens at half the bits, two in the room of one: then `levels` is asked."""

    def watch(self, line: KVLine, weights: F32, first: int) -> None:
        """Told of tokens that have just run, if it watches all: attention weights float32 [t, H/G, n] of tokens at
        positions first ... first+t-1 over the line's n slots, which theirs are among. Mutates: line.stats.
        """
        ...

    def select(self, at: Selecting, lines: Seq[KVLine]) -> list[I32]:
        """Ascending slots that each line keeps, int32, in the order of `lines` (layer by layer, head by head).

        Must follow from its arguments alone. At a full budget everything is kept, unless the selector is one that
        `always` chooses (`select.Traits`). Mutates: nothing but line.stats.
        """
        ...

    def levels(self, at: Selecting, lines: Seq[KVLine]) -> tuple[list[I32], list[I32]]:
        """As `select`, of a selector with `halves`: what is kept whole, ascending, and what at half the bits, the best
        first, of which as many stay as fill pages. Half of the second and all of the first are within the budget."""
        ...
