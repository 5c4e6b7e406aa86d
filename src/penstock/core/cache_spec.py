"""What a layer keeps between steps, and how layers that keep the same are grouped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from penstock.core.kv_format import CHANNEL, PACKED_BITS

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Types that a model computes with, and bytes of a number."""
CACHE_DTYPE_BYTES = DTYPE_BYTES | {"int8": 1, "uint8": 1}
"""Types that a plane may hold. int8 goes with scales, uint8 with scales and minima: see `vector_planes`."""
GROUP = 32
"""Most numbers of a token's head that share a scale and a minimum, if they are packed."""


class Plane(NamedTuple):
    """One named array of a cache: `heads` x `dim` elements of `dtype`, per token or per sequence (slot)."""

    name: str
    heads: int
    dim: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.heads * self.dim * CACHE_DTYPE_BYTES[self.dtype]


def scale_name(plane: str) -> str:
    """What the plane with the scales of an int8 plane is called."""
    return plane + "_scale"


def bounds_name(plane: str, codec: str) -> str:
    """What the plane with scales and minima of a packed plane is called: it says how that one is packed."""
    return f"{plane}_{codec}"


def run_name(plane: str, run: int) -> str:
    """Heads next to each other that share a codec have planes of their own: `k`, `k.1`, `k.2`."""
    return f"{plane}.{run}" if run else plane


def group_size(dim: int) -> int:
    """Numbers that share a scale: the largest divisor of `dim` up to `GROUP`."""
    return max(n for n in range(1, min(dim, GROUP) + 1) if dim % n == 0)


def vector_planes(shapes: Mapping[str, tuple[int, int]], dtype: str) -> tuple[Plane, ...]:
    """Planes for the vectors of a token: name -> (heads, dim). Those of int8 are followed by one float32 each per head.
    Those of int4 and int2 are packed into bytes, the first number in the lowest bits, and followed by a scale and a
    minimum for every `group_size` numbers, float16: all scales, then all minima.

    A scale per token and head: a page is written token by token, so nothing wider would leave old tokens as they were.
    """
    if dtype in PACKED_BITS:
        packed = [Plane(name, heads, dim * PACKED_BITS[dtype] // 8, "uint8") for name, (heads, dim) in shapes.items()]
        return (*packed, *(Plane(bounds_name(name, dtype), heads, 2 * dim // group_size(dim), "float16")
                           for name, (heads, dim) in shapes.items()))  # fmt: skip
    planes = [Plane(name, *shape, dtype) for name, shape in shapes.items()]
    if dtype == "int8":
        planes += [Plane(scale_name(name), heads, 1, "float32") for name, (heads, _) in shapes.items()]
    return tuple(planes)


def head_planes(name: str, heads: int, dim: int, codecs: tuple[str, ...]) -> tuple[list[Plane], list[Plane]]:
    """Planes of vectors of which each head has its codec (`codecs`: one for all, or one per head): those of a token,
    and those of a page, which hold scale and minimum of every channel, [heads, 2 dim] in float16."""
    each = codecs * heads if len(codecs) == 1 else codecs
    tokens: list[Plane] = []
    pages: list[Plane] = []
    for run, (codec, group) in enumerate(groupby(each)):
        own, count = run_name(name, run), len(list(group))
        if codec in CHANNEL:
            tokens.append(Plane(own, count, dim * PACKED_BITS[codec] // 8, "uint8"))
            pages.append(Plane(bounds_name(own, codec), count, 2 * dim, "float16"))
        else:
            tokens += vector_planes({own: (count, dim)}, codec)
    return tokens, pages


class CacheSpec(msgspec.Struct, frozen=True):
    """The cache of one layer. `paged` and `window` grow by the token; `slot` is a fixed state per sequence.

    `window`: tokens that a query may see, itself included; blocks that lie wholly before it are given up (kind `window`
    only).
    `lanes`: runs of kv heads that have pages of their own, so that they may keep different tokens: 1, or the number of
    kv heads. A page then holds heads / lanes heads; the pages of a slab are those of layer 0, lane by lane, and so on.
    `page_planes`: what a page has besides its tokens, `heads` x `dim` numbers each (bounds of its keys, say).
    """

    kind: Literal["paged", "window", "slot"]
    planes: tuple[Plane, ...]
    window: int | None = None
    lanes: int = 1
    page_planes: tuple[Plane, ...] = ()

    def __post_init__(self) -> None:
        assert (self.window is not None) == (self.kind == "window"), f"{self.kind} with window {self.window}"
        assert self.window is None or self.window > 0, f"window {self.window}"
        assert all(p.heads % self.lanes == 0 for p in (*self.planes, *self.page_planes)), f"{self.lanes} lanes"
        assert self.kind == "paged" or (self.lanes == 1 and not self.page_planes), f"{self.kind} with lanes or bounds"

    @property
    def per_token(self) -> bool:
        """Whether it is kept in blocks of tokens, found through a block table."""
        return self.kind != "slot"

    @property
    def num_bytes(self) -> int:
        """Bytes per token (paged, window) or per sequence (slot), of one layer, without what a page has besides."""
        return sum(p.num_bytes for p in self.planes)

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
        tokens = block_size if self.spec.per_token else 1
        besides = sum(p.num_bytes for p in self.spec.page_planes)
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
