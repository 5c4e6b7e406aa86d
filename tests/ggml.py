"""GGUF files made in tests: a writer, quantisers, and a decoder that looks up one element at a time.

The decoder is the oracle of `weights.stored.ggml`: it was written from the layout (which byte, which bits hold element
i), with Python integers, and rounds like a program in float32 would.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import narrow
from penstock.formats.tensor_ref import BLOCKS

F32 = npt.NDArray[np.float32]
TYPE_IDS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "I32": 26, "BF16": 30,
}  # fmt: skip
CODED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


# --- writing


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def typed(value: Any) -> tuple[int, bytes]:
    """(value type, its bytes) of a Python value, as converters write them: u32, f32, bool, string, array."""
    if isinstance(value, bool):
        return 7, struct.pack("<B", value)
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, text(value)
    items = [typed(item) for item in value]
    return 9, struct.pack("<IQ", items[0][0] if items else 4, len(items)) + b"".join(data for _, data in items)


def entry(key: str, value: Any) -> bytes:
    kind, data = typed(value)
    return text(key) + struct.pack("<I", kind) + data


def tensor_entry(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = b"".join(struct.pack("<Q", n) for n in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, tuple[str, F32]], *, version: int = 3, alignment: int = 32
) -> bytes:
    """A whole file; `tensors`: name -> (type, values [row-major])."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(entry(key, value) for key, value in metadata.items())
    data = b""
    for name, (kind, values) in tensors.items():
        data += bytes(-len(data) % alignment)
        head += tensor_entry(name, values.shape, TYPE_IDS[kind], len(data))
        data += encoded(kind, values)
    return head + bytes(-len(head) % alignment) + data


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[str, F32]], **options: int) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def encoded(kind: str, values: F32) -> bytes:
    if kind in CODED:
        return quantised(kind, values).tobytes()
    if kind == "BF16":
        return narrow(values).tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2", "I32": "<i4"}[kind]).tobytes()


def stored_values(kind: str, values: F32) -> F32:
    """What a reader must make of `values` written as `kind`, float32."""
    data = encoded(kind, values)
    if kind in CODED:
        return scalar_decode(kind, data).reshape(values.shape)
    if kind == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    return np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[kind]).astype(np.float32).reshape(values.shape)


# --- quantisers: plain rounding to the nearest code, without ggml's search for better scales


def halves(x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """[N] -> [N, 2]: as float16."""
    return np.ascontiguousarray(x, "<f2").reshape(-1, 1).view(np.uint8)


def half_nibbles(codes: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """[..., 2M] codes below 16 -> [..., M]: the second half in the upper nibbles."""
    m = codes.shape[-1] // 2
    return (codes[..., :m] | codes[..., m:] << 4).astype(np.uint8)


def quantised(kind: str, values: F32) -> npt.NDArray[np.uint8]:
    """Blocks [N, bytes] of a code that is nearest to each value, given scales that cover the block."""
    elements, nbytes = BLOCKS[kind]
    x = values.reshape(-1, elements).astype(np.float64)
    out = _quantised_k(kind, x) if kind.endswith("_K") else _quantised_32(kind, x)
    assert out.shape == (len(x), nbytes)
    return out


def _quantised_32(kind: str, x: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    if kind == "Q8_0":
        d = (np.abs(x).max(1) / 127).astype(np.float16).astype(np.float64)
        codes = np.rint(x / np.where(d == 0, 1, d)[:, None]).clip(-128, 127).astype(np.int8)
        return np.concatenate([halves(d), codes.view(np.uint8)], 1)
    bits = int(kind[1])
    if kind.endswith("_1"):
        low = x.min(1).astype(np.float16).astype(np.float64)
        d = ((x.max(1) - low) / (2**bits - 1)).astype(np.float16).astype(np.float64)
        front = [halves(d), halves(low)]
    else:
        d = (np.abs(x).max(1) / (2 ** (bits - 1) - 1)).astype(np.float16).astype(np.float64)
        low = -d * 2 ** (bits - 1)
        front = [halves(d)]
    codes = np.rint((x - low[:, None]) / np.where(d == 0, 1, d)[:, None]).clip(0, 2**bits - 1).astype(np.uint8)
    if bits == 5:
        front.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
    return np.concatenate([*front, half_nibbles(codes & 15)], 1)


def _quantised_k(kind: str, x: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    bits = int(kind[1])
    signed, run = kind in ("Q3_K", "Q6_K"), 32 if kind in ("Q4_K", "Q5_K") else 16
    scale_bits = {"Q2_K": 4, "Q3_K": 5, "Q4_K": 6, "Q5_K": 6, "Q6_K": 7}[kind]
    top = 2**scale_bits - 1
    runs = x.reshape(len(x), -1, run)
    if signed:
        need, low = np.abs(runs).max(2) / (2 ** (bits - 1) - 1), None
    else:
        low = np.maximum(-runs.min(2), 0)
        need = (runs.max(2) + low) / (2**bits - 1)
    d, scales = _shared(need, top)
    step = (d[:, None] * scales)[:, :, None]
    if low is None:
        codes, dmin, minima = np.rint(runs / np.where(step == 0, 1, step)) + 2 ** (bits - 1), d, scales
    else:
        dmin, minima = _shared(low, top)
        codes = np.rint((runs + (dmin[:, None] * minima)[:, :, None]) / np.where(step == 0, 1, step))
    q = codes.clip(0, 2**bits - 1).astype(np.uint8).reshape(len(x), 256)
    return _packed_k(kind, q, d, dmin, scales.astype(np.int64), minima.astype(np.int64))


def _shared(need: npt.NDArray[np.float64], top: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A float16 per block and whole numbers up to `top`, whose products are at least what is needed."""
    d = (need.max(1) / top).astype(np.float16).astype(np.float64)
    return d, np.ceil(need / np.where(d == 0, 1, d)[:, None]).clip(0, top)


def _fields(n: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.zeros((n, nbytes), np.uint8)


def _packed_k(kind: str, q: Any, d: Any, dmin: Any, scales: Any, minima: Any) -> npt.NDArray[np.uint8]:
    """One element after the other, to where `place` says that it lies."""
    out = _fields(len(q), BLOCKS[kind][1])
    for i in range(256):
        for at, shift, width, first in places(kind, i):
            out[:, at] |= ((q[:, i] >> first & ((1 << width) - 1)) << shift).astype(np.uint8)
    if kind == "Q2_K":
        out[:, :16] = scales | minima << 4
    elif kind == "Q3_K":
        biased = scales + 32  # 6 bits: four in the nibbles of bytes 96 ... 103, two in bytes 104 ... 107
        for s in range(16):
            out[:, 96 + s % 8] |= ((biased[:, s] & 15) << 4 * (s // 8)).astype(np.uint8)
            out[:, 104 + s % 4] |= ((biased[:, s] >> 4) << 2 * (s // 4)).astype(np.uint8)
    elif kind == "Q6_K":
        out[:, 192:208] = scales.astype(np.int8).view(np.uint8)
    else:
        for s in range(8):
            low = s % 4
            if s < 4:
                out[:, 4 + s] |= scales[:, s].astype(np.uint8)
                out[:, 8 + s] |= minima[:, s].astype(np.uint8)
            else:
                out[:, 12 + low] |= ((scales[:, s] & 15) | (minima[:, s] & 15) << 4).astype(np.uint8)
                out[:, 4 + low] |= (scales[:, s] >> 4 << 6).astype(np.uint8)
                out[:, 8 + low] |= (minima[:, s] >> 4 << 6).astype(np.uint8)
    if kind in ("Q4_K", "Q5_K"):
        out[:, 0:2], out[:, 2:4] = halves(d), halves(dmin)
    elif kind == "Q2_K":
        out[:, 80:82], out[:, 82:84] = halves(d), halves(dmin)
    else:
        out[:, -2:] = halves(d)
    return out


# --- the oracle


def places(kind: str, i: int) -> list[tuple[int, int, int, int]]:
    """Where the code of element i lies: (byte, shift, number of bits, first bit of the code)."""
    if kind in ("Q4_0", "Q4_1"):
        return [({"Q4_0": 2, "Q4_1": 4}[kind] + i % 16, 4 * (i // 16), 4, 0)]
    if kind in ("Q5_0", "Q5_1"):
        front = {"Q5_0": 2, "Q5_1": 4}[kind]
        return [(front + 4 + i % 16, 4 * (i // 16), 4, 0), (front + i // 8, i % 8, 1, 4)]
    if kind == "Q8_0":
        return [(2 + i, 0, 8, 0)]
    half, run, at = i // 128, i // 32, i % 32
    quarter = run % 4
    if kind == "Q2_K":
        return [(16 + 32 * half + at, 2 * quarter, 2, 0)]
    if kind == "Q3_K":
        return [(32 + 32 * half + at, 2 * quarter, 2, 0), (at, run, 1, 2)]
    if kind == "Q4_K":
        return [(16 + 32 * (run // 2) + at, 4 * (run % 2), 4, 0)]
    if kind == "Q5_K":
        return [(48 + 32 * (run // 2) + at, 4 * (run % 2), 4, 0), (16 + at, run, 1, 4)]
    assert kind == "Q6_K"
    low = 64 * half + 32 * (quarter % 2) + at
    return [(low, 4 * (quarter // 2), 4, 0), (128 + 32 * half + at, 2 * quarter, 2, 4)]


def signed_byte(value: int) -> int:
    return value - 256 if value > 127 else value


def scale_and_minimum(kind: str, b: bytes, i: int) -> tuple[int, int]:
    """The whole numbers of the run that element i is in; Q3_K, Q6_K have no minimum."""
    if kind == "Q2_K":
        return b[i // 16] & 15, b[i // 16] >> 4
    if kind == "Q6_K":
        return signed_byte(b[192 + i // 16]), 0
    if kind == "Q3_K":
        s = i // 16
        low, high = b[96 + s % 8] >> 4 * (s // 8) & 15, b[104 + s % 4] >> 2 * (s // 4) & 3
        return low + 16 * high - 32, 0
    s = i // 32
    if s < 4:
        return b[4 + s] & 63, b[8 + s] & 63
    return (b[8 + s] & 15) + 16 * (b[s] >> 6), (b[8 + s] >> 4) + 16 * (b[4 + s] >> 6)


def half_at(b: bytes, at: int) -> np.float32:
    return np.float32(np.frombuffer(b, "<f2", 1, at)[0])


def scalar_block(kind: str, b: bytes) -> list[np.float32]:
    out = []
    for i in range(BLOCKS[kind][0]):
        q = sum((b[at] >> shift & ((1 << width) - 1)) << first for at, shift, width, first in places(kind, i))
        if kind in ("Q4_0", "Q5_0"):
            out.append(np.float32(q - {"Q4_0": 8, "Q5_0": 16}[kind]) * half_at(b, 0))
        elif kind in ("Q4_1", "Q5_1"):
            out.append(np.float32(q) * half_at(b, 0) + half_at(b, 2))
        elif kind == "Q8_0":
            out.append(np.float32(signed_byte(q)) * half_at(b, 0))
        else:
            scale, minimum = scale_and_minimum(kind, b, i)
            at = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}[kind]
            step = half_at(b, at) * np.float32(scale)
            if kind in ("Q3_K", "Q6_K"):
                out.append(step * np.float32(q - {"Q3_K": 4, "Q6_K": 32}[kind]))
            else:
                out.append(step * np.float32(q) - half_at(b, at + 2) * np.float32(minimum))
    return out


def scalar_decode(kind: str, data: bytes) -> F32:
    nbytes = BLOCKS[kind][1]
    blocks = [data[at : at + nbytes] for at in range(0, len(data), nbytes)]
    return np.array([value for block in blocks for value in scalar_block(kind, block)], np.float32)
