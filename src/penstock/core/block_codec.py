"""How blocks are written in a store outside the process: the setting `kv_offload_format`.

`HIDDEN` is none of the codecs: pages have a plane more, with the normed hidden states that keys and values are products
of, and only that plane is written; keys and values are worked out again (`runner.restored`; HCache, Gao et al., arXiv
2410.05004). An entry of `BLOCK_CODECS` names a function that makes a `BlockCodec` for the parts of a block. Codecs of
what is in memory are another thing: `core.kv_codec`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.base.registry import Registry


class BlockPart(NamedTuple):
    """One plane of a block: [layers, tokens, heads, dim] of `dtype` (`cache_spec.CACHE_DTYPE_BYTES`).

    `depths`: of each layer, where in the model it is: 0 is the first, 1 the last.
    """

    dtype: str
    depths: tuple[float, ...]
    tokens: int
    heads: int
    dim: int

    @property
    def numbers(self) -> int:
        return len(self.depths) * self.tokens * self.heads * self.dim


class BlockCodec(Protocol):
    """The bytes of a block as others, and back. Calls may come from several threads at once.

    Equal blocks become equal bytes. What `decode` gives may be another block than `encode` was given, but encoded and
    decoded it is one and the same, whoever does it.
    """

    def encode(self, block: memoryview) -> bytes | None:
        """The planes one after the other -> fewer bytes than these; None if it takes more."""
        ...

    def decode(self, data: memoryview, block: memoryview) -> bool:
        """Mutates: block. False: `encode` has not written this, and `block` holds anything."""
        ...


class MakeBlockCodec(Protocol):
    def __call__(self, parts: tuple[BlockPart, ...]) -> BlockCodec:
        """Raises ConfigError where it cannot be had."""
        ...


class BlockCodecTraits(NamedTuple):
    """`dtypes`: types of planes that it can write. `what`: how, for people."""

    dtypes: tuple[str, ...]
    what: str


PLAIN, HIDDEN = "plain", "hidden"
BLOCK_CODECS: Registry[MakeBlockCodec, BlockCodecTraits] = Registry("kv_offload_format")
for _level in ("", "-fine", "-coarse"):
    BLOCK_CODECS.add("cachegen" + _level, f"penstock.runner.cachegen:CacheGen{_level[1:].title()}",
                     BlockCodecTraits(("float32", "float16", "bfloat16"), "rounded and range-coded"))  # fmt: skip
