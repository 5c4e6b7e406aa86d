"""CacheGen's codec: what comes back is what was rounded, bit for bit, and nothing else passes for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from penstock.base.bf16 import narrow, widen
from penstock.core.block_codec import BLOCK_CODECS, BlockPart
from penstock.ops.native.library import best_library
from penstock.runner.cachegen import BINS, CacheGen, bins_of

pytestmark = pytest.mark.skipif(best_library() is None, reason="needs the native kernels")
F32 = npt.NDArray[np.float32]
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def part(dtype: str = "float32", layers: int = 3, tokens: int = 32, heads: int = 2, dim: int = 16) -> BlockPart:
    return BlockPart(dtype, tuple(n / max(1, layers - 1) for n in range(layers)), tokens, heads, dim)


def drawn(p: BlockPart, seed: int = 0) -> F32:
    """[layers, tokens, heads, dim]: components of their own sizes and means, that drift."""
    rng = np.random.default_rng(seed)
    shape = (len(p.depths), p.tokens, p.heads, p.dim)
    size = np.exp(rng.normal(size=(shape[0], 1, *shape[2:])))
    drift = np.cumsum(rng.normal(size=shape) * 0.3, axis=1)
    return (size * (rng.normal(size=shape) + drift + 5 * rng.normal(size=(shape[0], 1, *shape[2:])))).astype(np.float32)


def held(x: F32, dtype: str) -> npt.NDArray[np.generic]:
    return narrow(x) if dtype == "bfloat16" else x.astype(TYPES[dtype])


def rounded(given: npt.NDArray[np.generic], p: BlockPart) -> npt.NDArray[np.generic]:
    """What the codec rounds to, in numpy: the rule of `pst_kv_encode`."""
    x = widen(given) if p.dtype == "bfloat16" else given.astype(np.float32)
    with np.errstate(all="ignore"):
        ranges = np.sort(x.max(1) - x.min(1), axis=-1)[..., p.dim // 2]  # [layers, heads]
        step = ranges * (bins_of(p, BINS)[:, None] * np.float32(0.25))
        step = np.maximum(step, np.abs(x).max((1, 3)) / np.float32(16000))
        step = np.where(np.isfinite(x).all((1, 3)), step, np.float32(np.nan))[:, None, :, None].astype(np.float32)
        q = np.where(step > 0, np.clip(np.rint(x / step), -16000, 16000), np.float32(0))
        return held(q.astype(np.int32).astype(np.float32) * step, p.dtype)  # no -0


def there_and_back(codec: CacheGen, given: npt.NDArray[np.generic]) -> tuple[bytes, npt.NDArray[np.generic]]:
    data = codec.encode(memoryview(given.tobytes()))
    assert data is not None
    back = bytearray(given.nbytes)
    assert codec.decode(memoryview(data), memoryview(back))
    return data, np.frombuffer(back, given.dtype).reshape(given.shape)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(32, 2, 16), (16, 1, 64), (5, 3, 7), (32, 1, 1)])
def test_F42_decoded_is_what_was_rounded_bit_for_bit(dtype: str, tokens: int, heads: int, dim: int) -> None:
    p = part(dtype, tokens=tokens, heads=heads, dim=dim)
    codec = CacheGen((p,))
    for seed in range(8):
        x = drawn(p, seed)
        x[0, :, :, dim // 2] *= 10.0 ** (seed - 4)  # one stands out, or is next to nothing
        if seed == 1:
            x[1] = 0
        if seed == 2:
            x[1] = 3.0
        if seed == 3:
            x[0, 0] *= 300  # the first token, as models have it
        given = held(x, dtype)
        data, back = there_and_back(codec, given)
        assert back.tobytes() == rounded(given, p).tobytes()
        assert codec.encode(memoryview(given.tobytes())) == data, "equal blocks, equal bytes"


def test_F42_what_is_sick_stays_visible_and_with_its_own_head() -> None:
    p = part()
    x = drawn(p)
    x[1, 7, 0, 3] = np.inf
    _, back = there_and_back(CacheGen((p,)), x)
    assert np.isnan(back[1, :, 0]).all()
    assert np.isfinite(back[1, :, 1]).all()
    assert np.isfinite(back[[0, 2]]).all()


def test_F42_rounding_is_by_the_layer_and_bounded() -> None:
    p = part(layers=6)
    x = drawn(p, 3)
    _, back = there_and_back(CacheGen((p,)), x)
    assert bins_of(p, BINS).tolist() == [BINS[0]] * 2 + [BINS[1]] * 2 + [BINS[2]] * 2
    ranges = np.sort(x.max(1) - x.min(1), axis=-1)[..., p.dim // 2]
    error = np.abs(back - x).max((1, 3))
    assert (error <= ranges * bins_of(p, BINS)[:, None] * 0.126).all()
    assert (error >= ranges * bins_of(p, BINS)[:, None] * 0.1).all(), "half a step, nearly"


def test_several_planes_and_what_is_too_large() -> None:
    parts = (part("bfloat16"), part("float32", layers=2, tokens=4, heads=1, dim=8))
    blocks = [held(drawn(p), p.dtype) for p in parts]
    codec = CacheGen(parts)
    whole = b"".join(b.tobytes() for b in blocks)
    data = codec.encode(memoryview(whole))
    assert data is not None
    assert len(data) < len(whole) / 3
    back = bytearray(len(whole))
    assert codec.decode(memoryview(data), memoryview(back))
    assert bytes(back) == b"".join(rounded(b, p).tobytes() for b, p in zip(blocks, parts, strict=True))
    tiny = CacheGen((part("bfloat16", layers=1, tokens=1, heads=1, dim=2),))
    assert tiny.encode(memoryview(bytes(4))) is None, "it would take more than it is"


def test_what_it_has_not_written_is_refused_or_some_block() -> None:
    """Files carry a MAC; this is about memory alone."""
    p = part("bfloat16")
    codec, given = CacheGen((p,)), held(drawn(p), "bfloat16")
    data, _ = there_and_back(codec, given)
    rng, back, refused = np.random.default_rng(1), bytearray(given.nbytes), 0
    for n in range(300):
        bad = bytearray(data)
        for _ in range(1 + n % 5):
            bad[int(rng.integers(len(bad)))] ^= int(rng.integers(1, 256))
        refused += not codec.decode(memoryview(bad), memoryview(back))
    assert refused > 200
    for cut in (0, 3, 4, 20, len(data) // 2, len(data) - 1):
        assert not codec.decode(memoryview(data[:cut]), memoryview(back))
        short = len(data[4:cut]).to_bytes(4, "little") + data[4:cut]
        assert not codec.decode(memoryview(short), memoryview(back)), "whole by its length, but not by its end"


def test_it_is_registered() -> None:
    assert BLOCK_CODECS.get("cachegen") is CacheGen


def test_F42_a_coarser_level_has_fewer_bytes_and_any_level_reads_all() -> None:
    p = part(layers=6)
    x = drawn(p)
    given = x.tobytes()
    sizes, errors = [], []
    for name in ("cachegen-fine", "cachegen", "cachegen-coarse"):
        made = {other: BLOCK_CODECS.get(other)((p,)) for other in BLOCK_CODECS.names()}
        data = made[name].encode(memoryview(given))
        read = set()
        for codec in made.values():
            back = bytearray(len(given))
            assert codec.decode(memoryview(data), memoryview(back))
            read.add(bytes(back))
        assert len(read) == 1
        sizes.append(len(data))
        errors.append(float(np.abs(np.frombuffer(read.pop(), np.float32) - x.ravel()).mean()))
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert sizes[0] > 1.2 * sizes[1] > 1.4 * sizes[2]
