"""CacheGen: keys and values of a block as a stream of bits, some 2.6 for a number; another text than was written.

Three levels: `cachegen`, a finer one of some 3.5 bits and a coarser one of some 2. Streams say how they were rounded:
any of them reads all three. Which one is written is a setting, not what a link was measured to bear: what is read would
then differ from run to run.

Of a head's tokens in a block a step is derived (`BINS` quarters of the median range of its components), numbers become
whole steps, and each component sends how far a token is from what the ones before it let expect, by range coding with
the table that fits it (`csrc/src/kv_stream.cpp`).

Source: CacheGen, Liu et al., arXiv 2310.07240, section 5. Other than there: a block is the group of tokens, its first
token the anchor; deltas are to the token before or to means, whichever a component needs fewest bits by (to the anchor
alone takes a quarter more); tables are of 16 shapes, chosen by layer and channel in each block, so that a file needs
nothing besides; and every layer has the same bins: see docs/concepts/kv-store.md for what the paper's do here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError
from penstock.core.block_codec import BlockPart
from penstock.core.cache_spec import CACHE_DTYPE_BYTES
from penstock.ops.native.library import best_library

BINS = (1.0, 0.75, 0.75)
"""Steps in quarters of a head's range, for the first, the middle and the last third of the layers."""
FINE, COARSE = (0.5, 0.375, 0.375), (1.5, 1.25, 1.25)
_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


def bins_of(part: BlockPart, bins: tuple[float, ...]) -> npt.NDArray[np.float32]:
    """[layers]"""
    return np.array([bins[min(int(depth * len(bins)), len(bins) - 1)] for depth in part.depths], np.float32)


class CacheGen:
    """A `BlockCodec`. Raises ConfigError where there are no native kernels."""

    bins: tuple[float, ...] = BINS

    def __init__(self, parts: tuple[BlockPart, ...]) -> None:
        library = best_library()
        if library is None:
            raise ConfigError(
                "kv_offload_format: cachegen needs the native kernels, which this installation has not; use plain",
                field="kv_offload_format",
            )
        self._encode, self._decode = library.pst_kv_encode, library.pst_kv_decode
        self._parts = [
            (part.numbers * CACHE_DTYPE_BYTES[part.dtype], bins_of(part, self.bins),
             (_DTYPES[part.dtype], len(part.depths), part.tokens, part.heads, part.dim))
            for part in parts
        ]  # fmt: skip

    def encode(self, block: memoryview) -> bytes | None:
        """Of every plane its length in 4 bytes, then all streams."""
        given = np.frombuffer(block, np.uint8)
        out, at, left, lengths = np.empty(block.nbytes, np.uint8), 0, 4 * len(self._parts), []
        for num_bytes, bins, shape in self._parts:
            room = out.nbytes - left
            length = self._encode(given[at:].ctypes.data, *shape, bins.ctypes.data, out[left:].ctypes.data, room)
            if length < 0:
                return None
            at, left = at + num_bytes, left + length
            lengths.append(length)
        out[: 4 * len(lengths)] = np.array(lengths, "<u4").view(np.uint8)
        return out[:left].tobytes()

    def decode(self, data: memoryview, block: memoryview) -> bool:
        found, into = np.frombuffer(data, np.uint8), np.frombuffer(block, np.uint8)
        first = 4 * len(self._parts)
        if found.nbytes < first:
            return False
        lengths = found[:first].view("<u4").tolist()
        if first + sum(lengths) != found.nbytes:
            return False
        at = 0
        for (num_bytes, _, shape), length in zip(self._parts, lengths, strict=True):
            if self._decode(found[first:].ctypes.data, length, *shape, into[at:].ctypes.data):
                return False
            at, first = at + num_bytes, first + length
        return True


class CacheGenFine(CacheGen):
    """For links that bear more."""

    bins = FINE


class CacheGenCoarse(CacheGen):
    """For links that bear less."""

    bins = COARSE
