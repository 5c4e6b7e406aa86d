"""Codecs of keys and values: what stands in a plane in place of the numbers, and what is known of each before its use.

An entry of `KV_CODECS` names a `KVCodec` of the reference operations. Another backend says itself which it reads and
writes. Sources: ZeroQuant, arXiv 2206.01861, section 4.1 (by token); FlexGen, arXiv 2303.06865, section 4.2 (by group);
KIVI, arXiv 2402.02750, section 3 (keys by channel).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from penstock.base.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GROUP = 32
"""Most numbers of a token's head that share a scale and a minimum, if they are packed."""


def group_size(dim: int) -> int:
    """Numbers that share a scale: the largest divisor of `dim` up to `GROUP`."""
    return max(n for n in range(1, min(dim, GROUP) + 1) if dim % n == 0)


class KVCodec(Protocol):
    """Vectors as elements of a plane, and back. What it lays out is what its `CodecTraits` say.

    Deterministic, and a vector's elements depend on nothing but what it shares scales with. Zeros come back as zeros.
    Where a number is not finite, all that share its scale come back as no number, so that what is sick stays visible.
    """

    def encode(self, x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """x [..., D] -> elements [..., D / per element] and their scales [..., width]; None without scales.

        With scales by block x is [blocks, S, G, D] and the scales are [blocks, 1, G, width].
        """
        ...

    def decode(self, elements: npt.NDArray[Any], scales: npt.NDArray[Any] | None) -> npt.NDArray[np.float32]:
        """The inverse of `encode`, as far as there is one. May be a view of `elements`."""
        ...


class CodecTraits(NamedTuple):
    """What must be known of a codec before anything is kept by it.

    `bits` of a number; fewer than 8 share a byte, the first number in the lowest bits. `dtype`: of its plane's
    elements (`cache_spec.CACHE_DTYPE_BYTES`). `scales`: what has a scale of its own: the head of a `token`; a `group`,
    every `group_size` numbers of one; in a `block`, each channel of a head over its tokens, so that a block is encoded
    when it is complete, and only keys are. `minima`: a minimum for every scale. `beside`: what the plane of scales is
    called behind the name of its own and an underscore; empty: as the codec. `bounds`: type in which the bounds of a
    page's keys are kept for selectors that read pages by them; empty: such selectors are refused.
    """

    bits: int = 16
    dtype: str = "float16"
    scales: Literal["none", "token", "group", "block"] = "none"
    scale_dtype: str = "float16"
    minima: bool = False
    beside: str = ""
    bounds: str = ""

    @property
    def quantises(self) -> bool:
        """Whether its numbers are others than a model computes with."""
        return self.bits < 16

    @property
    def per_element(self) -> int:
        """Numbers in an element of the plane."""
        return max(1, 8 // self.bits)

    def width(self, dim: int) -> int:
        """Numbers beside a head of `dim`: of a token, or of a block. All scales, then all minima."""
        scales = {"none": 0, "token": 1, "group": dim // group_size(dim), "block": dim}[self.scales]
        return (1 + self.minima) * scales


KV_CODECS: Registry[KVCodec, CodecTraits] = Registry("kv_cache_dtype")
_NUMBER, _PACKED = "penstock.ops.ref.codecs.number", "penstock.ops.ref.codecs.packed"
KV_CODECS.add("float32", f"{_NUMBER}:FLOAT32", CodecTraits(32, "float32", bounds="float32"))
KV_CODECS.add("float16", f"{_NUMBER}:FLOAT16", CodecTraits(16, "float16", bounds="float16"))
KV_CODECS.add("bfloat16", f"{_NUMBER}:BFLOAT16", CodecTraits(16, "bfloat16", bounds="bfloat16"))
KV_CODECS.add("int8", "penstock.ops.ref.codecs.int8:INT8",
              CodecTraits(8, "int8", "token", "float32", beside="scale", bounds="float32"))  # fmt: skip
KV_CODECS.add("int4", f"{_PACKED}:INT4", CodecTraits(4, "uint8", "group", minima=True))
KV_CODECS.add("int2", f"{_PACKED}:INT2", CodecTraits(2, "uint8", "group", minima=True))
KV_CODECS.add("channel4", f"{_PACKED}:CHANNEL4", CodecTraits(4, "uint8", "block", minima=True))
KV_CODECS.add("channel2", f"{_PACKED}:CHANNEL2", CodecTraits(2, "uint8", "block", minima=True))


def scales_name(plane: str, codec: str) -> str:
    """What the plane with the scales of a plane is called: it says how that one is encoded."""
    return f"{plane}_{KV_CODECS.traits(codec).beside or codec}"


def codecs_by_token() -> list[str]:
    """Those that encode a token as it comes."""
    return [name for name in KV_CODECS if KV_CODECS.traits(name).scales != "block"]
