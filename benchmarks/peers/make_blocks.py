"""A GGUF file in a large model's shape, its blocks of Q4_K and Q6_K drawn at random: what an 8B Q4_K_M costs.

    python -m benchmarks.peers.make_blocks llama-3.1-8b --out llama-3.1-8b-Q4_K_M.gguf       # 4.9 GB

Blocks are drawn as such, some MB at a time: no tensor is ever whole in memory, or wider than it is stored. Which
tensors have six bits is llama.cpp's choice for Q4_K_M. Scales are such that weights have mean 0 and deviation 0.02, as
in `make_models`, so activations stay finite. Source of both layouts: ggml-common.h of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.convert import gguf_name, metadata, pad, write_header
from benchmarks.peers.make_models import DEVIATION, SHAPES, shapes, tokenizer

F32, Q4_K, Q6_K = 0, 12, 14
FILE_Q4_K_M = 15
BLOCK = 256
BLOCK_BYTES = {Q4_K: 144, Q6_K: 210}
_AT_ONCE = 1 << 17  # blocks: some 20 MB
_SIX_BITS_LIMIT = 31


def q4_k(count: int, rng: np.random.Generator) -> bytes:
    """Blocks of d, dmin, 12 bytes of six-bit scales and minima, 128 of codes. Every group's minimum is its scale, and
    dmin is 7.5 d, so a weight is d * scale * (code - 7.5)."""
    made = np.zeros(count, np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("codes", "u1", 128)]))
    first = rng.integers(0, 256, (count, 4), np.uint8)  # six bits of groups 0 to 3, the upper two of 4 to 7
    low = rng.integers(0, 16, (count, 4), np.uint8)  # the lower four bits of groups 4 to 7
    made["scales"] = np.concatenate([first, first, low | low << 4], axis=1)
    made["codes"] = rng.integers(0, 256, (count, 128), np.uint8)
    made["d"] = DEVIATION / (_root_mean_square(np.arange(64)) * _root_mean_square(np.arange(16) - 7.5))
    made["dmin"] = 7.5 * made["d"].astype(np.float32)
    return made.tobytes()


def q6_k(count: int, rng: np.random.Generator) -> bytes:
    """Blocks of 128 bytes of lower and 64 of upper bits, 16 scales, d: a weight is d * scale * (code - 32)."""
    made = np.zeros(count, np.dtype([("bits", "u1", 192), ("scales", "i1", 16), ("d", "<f2")]))
    made["bits"] = rng.integers(0, 256, (count, 192), np.uint8)
    made["scales"] = rng.integers(-_SIX_BITS_LIMIT, _SIX_BITS_LIMIT + 1, (count, 16), np.int8)
    scales = _root_mean_square(np.arange(-_SIX_BITS_LIMIT, _SIX_BITS_LIMIT + 1))
    made["d"] = DEVIATION / (scales * _root_mean_square(np.arange(64) - 32))
    return made.tobytes()


def _root_mean_square(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def kind(name: str, shape: tuple[int, ...], num_layers: int) -> int:
    """ggml's number of a tensor's type in Q4_K_M."""
    if len(shape) == 1:
        return F32
    if name == "output.weight":
        return Q6_K
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), num_layers // 8
        if layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2:
            return Q6_K
    return Q4_K


def pieces(kind: int, shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[bytes]:
    if kind == F32:
        yield np.ones(shape, "<f4").tobytes()
        return
    left = int(np.prod(shape)) // BLOCK
    while left:
        count = min(left, _AT_ONCE)
        yield (q4_k if kind == Q4_K else q6_k)(count, rng)
        left -= count


def write(config: dict[str, Any], out: Path, seed: int = 0) -> None:
    """Equal seeds make equal bytes. Raises ValueError, before anything is written, if rows cannot be coded or the disk
    has no room."""
    tensors = [(gguf_name(name), shape) for name, shape in shapes(config)]
    for name, shape in tensors:
        if len(shape) > 1 and shape[-1] % BLOCK:
            raise ValueError(f"{name} has rows of {shape[-1]}: k-quants code {BLOCK} together; take another shape")
    kinds = [kind(name, shape, config["num_hidden_layers"]) for name, shape in tensors]
    sizes = [
        int(np.prod(shape)) * 4 if k == F32 else int(np.prod(shape)) // BLOCK * BLOCK_BYTES[k]
        for (_, shape), k in zip(tensors, kinds, strict=True)
    ]
    free = shutil.disk_usage(out.parent).free
    if free < sum(sizes):
        raise ValueError(f"{out.parent} has {free / 1e9:.1f} GB left, and {sum(sizes) / 1e9:.1f} are needed")
    part = out.with_name(out.name + ".part")
    rng = np.random.default_rng(seed)
    with part.open("wb") as file:
        values = metadata(config, tokenizer(config["vocab_size"])) | {"general.file_type": FILE_Q4_K_M}
        told = [(name, shape, k, size) for (name, shape), k, size in zip(tensors, kinds, sizes, strict=True)]
        write_header(file, values, told)
        for (_, shape), k in zip(tensors, kinds, strict=True):
            for piece in pieces(k, shape, rng):
                file.write(piece)
            pad(file)
    part.replace(out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        write(SHAPES[args.shape], args.out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
