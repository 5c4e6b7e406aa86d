"""Decoders of ggml's blocks: bit for bit those of a scalar reading of the layout, and inverse to quantising."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.families.checkpoint import BLOCK_DTYPES
from penstock.formats.ggml import GGML_FORMATS
from penstock.formats.tensor_ref import BLOCKS, stored_bytes
from penstock.weights.stored.ggml.matrix import decoded_blocks
from penstock.weights.stored.ggml.types import BLOCK_TYPES, GRID_TYPES
from tests.ggml import CODED, half_at, quantised, scalar_decode, scale_and_minimum


def test_every_coded_type_has_a_decoder() -> None:
    assert BLOCK_TYPES.keys() | GRID_TYPES.keys() == GGML_FORMATS.keys() == BLOCK_DTYPES >= set(CODED)
    assert BLOCK_TYPES.keys() & GRID_TYPES.keys() == set()
    assert stored_bytes("Q6_K", 512) == 420
    assert stored_bytes("F4", 3) == 2


@pytest.mark.parametrize("kind", CODED)
def test_random_blocks_decode_as_the_scalar_oracle_does(kind: str) -> None:
    """Every bit of every byte is drawn; only the float16 scales are kept from being NaN or infinite."""
    rng = np.random.default_rng(CODED.index(kind))
    _, nbytes = BLOCKS[kind]
    blocks = rng.integers(0, 256, (40, nbytes), dtype=np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2)):
        if at == 0 or not kind.endswith("_0"):
            blocks[:, at : at + 2] = rng.normal(size=(40, 1)).astype("<f2").view(np.uint8)
    got = decoded_blocks(kind, blocks)
    want = scalar_decode(kind, blocks.tobytes())
    assert got.dtype == np.float32
    assert len(np.unique(want)) > 100
    np.testing.assert_array_equal(got.reshape(-1).view(np.uint32), want.view(np.uint32))


HALF = np.frombuffer(np.array([0.5, -2.0], "<f2").tobytes(), np.uint8)


def test_blocks_made_by_hand() -> None:
    """Values worked out on paper from the block structs."""
    q4 = np.concatenate([HALF[:2], np.full(16, 0x9F, np.uint8)])[None]
    np.testing.assert_array_equal(decoded_blocks("Q4_0", q4)[0], [3.5] * 16 + [0.5] * 16)
    q41 = np.concatenate([HALF, np.full(16, 0x30, np.uint8)])[None]
    np.testing.assert_array_equal(decoded_blocks("Q4_1", q41)[0], [-2.0] * 16 + [-0.5] * 16)
    q5 = np.concatenate([HALF[:2], np.array([1, 0, 0, 128], np.uint8), np.full(16, 0x10, np.uint8)])[None]
    np.testing.assert_array_equal(decoded_blocks("Q5_0", q5)[0], [0.0] + [-8.0] * 15 + [-7.5] * 15 + [0.5])
    q8 = np.concatenate([HALF[:2], np.arange(-16, 16, dtype=np.int8).view(np.uint8)])[None]
    np.testing.assert_array_equal(decoded_blocks("Q8_0", q8)[0], np.arange(-16, 16) / 2)
    # Q4_K: d 0.5, dmin -2; run 0 has scale 3, minimum 1; run 7 has scale 63 and minimum 33; nibbles 2 and 5.
    q4k = np.zeros(144, np.uint8)
    q4k[:4], q4k[4], q4k[8], q4k[7], q4k[11], q4k[15], q4k[16:] = HALF, 3, 1, 0b11000000, 0b10000000, 0x1F, 0x52
    got = decoded_blocks("Q4_K", q4k[None])[0]
    assert set(got[:32]) == {0.5 * 3 * 2 + 2}
    assert set(got[224:]) == {0.5 * 63 * 5 + 2 * 33}
    assert not got[32:224].any()


# Steps are those of the type's own code: half of one is the most that rounding to the nearest can be off.
@pytest.mark.parametrize("kind", CODED)
def test_quantising_and_decoding_is_within_half_a_step(kind: str) -> None:
    rng = np.random.default_rng(5)
    elements, _ = BLOCKS[kind]
    x = (rng.normal(size=(12, elements)) * np.exp(rng.normal(size=(12, 1)))).astype(np.float32)
    blocks = quantised(kind, x)
    got = decoded_blocks(kind, blocks)
    for row, block, decoded in zip(x, blocks, got, strict=True):
        steps = steps_of(kind, block.tobytes())
        worst = np.abs(row - decoded) / steps
        assert worst.max() <= 0.5 + 0.06, (
            f"{worst.max()} steps"
        )  # float16 scales round too, by up to 2^-11 of 127 steps
        assert worst.mean() > 0.1, "the quantiser did something"


def steps_of(kind: str, block: bytes) -> np.ndarray:
    """Difference that one more in the code makes, per element: the oracle's own, by changing codes."""
    if not kind.endswith("_K"):
        return np.full(32, abs(half_at(block, 0)))
    at = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}[kind]
    return np.array([abs(half_at(block, at) * scale_and_minimum(kind, block, i)[0]) for i in range(256)])
