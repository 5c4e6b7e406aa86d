"""What a layer keeps between steps, and how layers that keep the same are grouped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from penstock.core.kv_codec import KV_CODECS, scales_name

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Types that a model computes with, and bytes of a number."""
CACHE_DTYPE_BYTES = DTYPE_BYTES | {"int8": 1, "uint8": 1}
"""Types that a plane may hold."""
HIDDEN = "hidden"
"""The plane with what keys and values are made of, where a store is given that (`core.block_codec.HIDDEN`)."""


class PlaneSpec(NamedTuple):
    """One named array of a cache: `heads` x `dim` elements of `dtype`, per token or per sequence (slot).

    `every`, of a page's own planes: one row per so many tokens, in the page of the last of them; None: one row.
    """

    name: str
    heads: int
    dim: int
    dtype: str
    every: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.heads * self.dim * CACHE_DTYPE_BYTES[self.dtype]

    def page_rows(self, block_size: int) -> int:
        """Rows that a page has of it, if it is one of a page's own. Blocks that are no multiple of `every` have some
        that no run of tokens ends in."""
        return 1 if self.every is None else -(-block_size // self.every)


def run_name(plane: str, run: int) -> str:
    """Heads next to each other that share a codec have planes of their own: `k`, `k.1`, `k.2`."""
    return f"{plane}.{run}" if run else plane


def vector_planes(shapes: Mapping[str, tuple[int, int]], codec: str) -> tuple[PlaneSpec, ...]:
    """Planes for the vectors of a token by one codec: name -> (heads, dim). Those with their scales follow.

    A scale per token and head at most: a page is written token by token, so nothing wider would leave old tokens as
    they were. Codecs by block go through `head_planes`.
    """
    traits = KV_CODECS.traits(codec)
    assert traits.scales != "block", f"{codec} has scales of pages"
    own = tuple(
        PlaneSpec(name, heads, dim // traits.per_element, traits.dtype) for name, (heads, dim) in shapes.items()
    )
    return own if traits.scales == "none" else (*own, *(_scales(name, *shape, codec) for name, shape in shapes.items()))


def _scales(name: str, heads: int, dim: int, codec: str) -> PlaneSpec:
    traits = KV_CODECS.traits(codec)
    return PlaneSpec(scales_name(name, codec), heads, traits.width(dim), traits.scale_dtype)


def head_planes(name: str, heads: int, dim: int, codecs: tuple[str, ...]) -> tuple[list[PlaneSpec], list[PlaneSpec]]:
    """Planes of vectors of which each head has its codec (`codecs`: one for all, or one per head): those of a token,
    and those of a page, which hold the scales of codecs by block."""
    each = codecs * heads if len(codecs) == 1 else codecs
    tokens: list[PlaneSpec] = []
    pages: list[PlaneSpec] = []
    for run, (codec, group) in enumerate(groupby(each)):
        own, count = run_name(name, run), len(list(group))
        traits = KV_CODECS.traits(codec)
        if traits.scales == "block":
            tokens.append(PlaneSpec(own, count, dim // traits.per_element, traits.dtype))
            pages.append(_scales(own, count, dim, codec))
        else:
            tokens += vector_planes({own: (count, dim)}, codec)
    return tokens, pages


class CacheSpec(msgspec.Struct, frozen=True):
    """The cache of one layer. `paged` and `window` grow by the token; `slot` is a fixed state per sequence.

    `window`: tokens that a query may see, itself included; blocks that lie wholly before it are given up (kind `window`
    only).
    `lanes`: runs of kv heads that have pages of their own, so that they may keep different tokens: 1, or the number of
    kv heads. A page then holds heads / lanes heads; the pages of a slab are those of layer 0, lane by lane, and so on.
    `ranks`: over how many ranks tokens are shared out: a page has the tokens of its block whose position leaves the
    rank's number when it is divided by so many, in order (`plan.ranks.ranked_groups`). `whole`: or each block lies on
    one of them, any one, with all of its tokens; on average a rank has 1 / ranks of each.
    `page_planes`: what a page has besides its tokens, `heads` x `dim` numbers each (bounds of its keys, say), or, with
    `every`, what several tokens have together (entries of compressed attention). There may be nothing else: no planes.
    """

    kind: Literal["paged", "window", "slot"]
    planes: tuple[PlaneSpec, ...]
    window: int | None = None
    lanes: int = 1
    page_planes: tuple[PlaneSpec, ...] = ()
    ranks: int = 1
    whole: bool = False

    def __post_init__(self) -> None:
        assert (self.window is not None) == (self.kind == "window"), f"{self.kind} with window {self.window}"
        assert self.window is None or self.window > 0, f"window {self.window}"
        assert all(p.heads % self.lanes == 0 for p in (*self.planes, *self.page_planes)), f"{self.lanes} lanes"
        assert self.ranks == 1 or (self.per_token and self.lanes == 1 and not self.page_planes), f"{self.ranks} ranks"
        assert not self.whole or (self.ranks > 1 and self.kind == "paged"), "blocks lie on one of several ranks"
        assert self.kind == "paged" or (self.lanes == 1 and not self.page_planes), f"{self.kind} with lanes or bounds"

    @property
    def per_token(self) -> bool:
        """Whether it is kept in blocks of tokens, found through a block table."""
        return self.kind != "slot"

    @property
    def num_bytes(self) -> int:
        """Bytes per token (paged, window) or per sequence (slot), of one layer, without what a page has besides."""
        return sum(p.num_bytes for p in self.planes)

    def page_tokens(self, block_size: int) -> int:
        """Tokens of a block that a page has."""
        return block_size if self.whole else block_size // self.ranks

    def first_block(self, num_computed: int, block_size: int) -> int:
        """The first block that tokens from position `num_computed` on can see; all before it may be forgotten."""
        return 0 if self.window is None else max(0, num_computed + 1 - self.window) // block_size

    def most_blocks(self, num_tokens: int, step_tokens: int, block_size: int) -> int:
        """Blocks that a sequence of at most `num_tokens` tokens holds at any one time.

        `step_tokens`: how many of them steps in flight and the one being planned may have between them.
        """
        most = -(-num_tokens // block_size)
        return most if self.window is None else min(most, -(-(self.window - 1 + step_tokens) // block_size) + 1)


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers with equal CacheSpecs: one pool and one block table per sequence serve them all.

    A *slab* is one block of all layers of the group: W = len(layers) * lanes consecutive pages, page = slab * W +
    i * lanes + j for lane j of the i-th layer of the group. For `slot` groups a slab is the whole state of one
    sequence.
    """

    index: int
    spec: CacheSpec
    layers: tuple[int, ...]

    @property
    def pages_per_slab(self) -> int:
        return len(self.layers) * self.spec.lanes

    def slab_bytes(self, block_size: int) -> int:
        """Of a slab on one rank; where each lies on one of several, its part if all have as many."""
        tokens = block_size // self.spec.ranks if self.spec.per_token else 1
        besides = sum(p.num_bytes * p.page_rows(block_size) for p in self.spec.page_planes)
        return len(self.layers) * (self.spec.num_bytes * tokens + besides)

    def token_bytes(self, block_size: int) -> int:
        """Bytes of a token in all layers (of a sequence: slot), its share of what pages have besides included."""
        return -(-self.slab_bytes(block_size) // (block_size if self.spec.per_token else 1))


def without_windows(groups: Iterable[CacheGroup]) -> tuple[CacheGroup, ...]:
    """The groups with every window group as a full one, which keeps all its blocks."""
    return tuple(
        g if g.spec.window is None else CacheGroup(g.index, CacheSpec("paged", g.spec.planes), g.layers) for g in groups
    )


def group_layers(specs: Sequence[CacheSpec | None]) -> tuple[CacheGroup, ...]:
    """Layers of equal spec, in order of first appearance; a layer that keeps nothing (None) is in no group."""
    order: list[CacheSpec] = []
    for spec in specs:
        if spec is not None and spec not in order:
            order.append(spec)
    return tuple(
        CacheGroup(i, spec, tuple(n for n, s in enumerate(specs) if s == spec)) for i, spec in enumerate(order)
    )
