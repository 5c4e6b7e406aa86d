"""Blocks of ggml's types made in tests, and GGUF models of them, written and decoded by gguf's own Python package."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, quants

from penstock.formats.tensor_ref import BLOCKS

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
HALVES: dict[str, tuple[int, ...]] = {
    "Q1_0": (0,), "Q2_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_K": (), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_S": (0,), "IQ1_M": (),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip
"""Type -> the bytes at which its blocks have a float16."""
WITHOUT_ORACLE = ("Q8_K", "Q1_0", "Q2_0")
"""Types that the package cannot decode: ggml's C code did, for `golden`."""


def floats_set(kind: str, blocks: U8, value: float) -> None:
    """Every floating-point scale of the blocks becomes `value`, or the power of two below it."""
    half = np.array([value], "<f2").view(np.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = half
    if kind == "Q8_K":
        blocks[:, :4] = np.array([value], "<f4").view(np.uint8)
    elif kind == "MXFP4":
        blocks[:, 0] = 127 + int(np.floor(np.log2(value))) if np.isfinite(value) else 255
    elif kind == "NVFP4":
        blocks[:, :4] = (7 + int(np.floor(np.log2(value)))) << 3 if np.isfinite(value) else 127
    elif kind == "IQ1_M":
        word = int(half.view("<u2")[0])
        for i in range(4):
            blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (word >> 4 * i & 15) << 4


def _centre(kind: str, blocks: U8, step: float) -> None:
    """Minima become such that values have both signs; else all rows of a matrix would point one way."""
    for at in HALVES[kind][1:]:
        middle = step * (2 ** int(kind[1]) - 1) / 2
        blocks[:, at : at + 2] = np.array([middle if kind.endswith("_K") else -middle], "<f2").view(np.uint8)


def random_blocks(kind: str, count: int, rng: np.random.Generator, scale: float | None = None) -> U8:
    """All bytes are drawn; floating-point scales are `scale`, or drawn, too, until values are finite."""
    size = BLOCKS[kind][1]
    blocks = rng.integers(0, 256, (count, size), np.uint8)
    if scale is not None:
        floats_set(kind, blocks, scale)
        return blocks
    if kind == "NVFP4":
        blocks[:, :4] &= 0x7F
    while True:
        with np.errstate(all="ignore"):
            bad = ~np.isfinite(oracle(kind, blocks)).all(axis=1) | ((kind == "NVFP4") & (blocks[:, :4] == 127).any(1))
        if not bad.any():
            return blocks
        blocks[bad] = np.roll(blocks[bad], 1, axis=1) if kind != "NVFP4" else blocks[bad] & 0x3F


def oracle(kind: str, blocks: U8) -> F32:
    """What gguf's package, or for three types a line of the definition, makes of blocks: [N, K]."""
    if kind == "Q8_K":
        scales = np.ascontiguousarray(blocks[:, :4]).view("<f4")
        return blocks[:, 4:260].view(np.int8).astype(np.float32) * scales
    if kind in ("Q1_0", "Q2_0"):
        bits = int(kind[1])
        codes = [
            [byte >> at & (1 << bits) - 1 for byte in row[2:] for at in range(0, 8, bits)] for row in blocks.tolist()
        ]
        units = 2.0 * np.array(codes) - 1 if bits == 1 else np.array(codes) - 1.0
        return (units.astype(np.float32) * np.ascontiguousarray(blocks[:, :2]).view("<f2")).astype(np.float32)
    return quants.dequantize(blocks, GGMLQuantizationType[kind])


def with_factors(blocks: U8, factors: F32) -> F32:
    """Blocks of NVFP4 of as many matrices: code times (scale times factor), each product rounded once."""
    units = blocks.copy()
    units[:, :4] = 7 << 3
    codes = oracle("NVFP4", units).reshape(-1, 4, 16)
    scales = (2 * quants.NVFP4.ue4m3_to_fp32(blocks[:, :4])).astype(np.float32)
    out: F32 = codes * (scales * factors.repeat(len(blocks) // len(factors))[:, None])[:, :, None]
    return out


@cache
def golden() -> dict[str, dict[str, str]]:
    path = Path(__file__).parent / "data" / "ggml_blocks.json"
    found: dict[str, dict[str, str]] = json.loads(path.read_text())
    return found


def golden_blocks(kind: str) -> U8:
    return np.frombuffer(base64.b64decode(golden()[kind]["blocks"]), np.uint8).reshape(-1, BLOCKS[kind][1])


# --- models

E, F, V = 256, 512, 40
METADATA: dict[str, Any] = {
    "context_length": 128, "embedding_length": E, "block_count": 1, "feed_forward_length": F,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
}  # fmt: skip


def shapes(tied: bool = False, experts: int = 0) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "token_embd": (V, E), "output_norm": (E,), "blk.0.attn_norm": (E,), "blk.0.ffn_norm": (E,),
        "blk.0.attn_q": (E, E), "blk.0.attn_k": (E // 2, E), "blk.0.attn_v": (E // 2, E), "blk.0.attn_output": (E, E),
    }  # fmt: skip
    if not tied:
        found["output"] = (V, E)
    if experts:
        found |= {"blk.0.ffn_gate_inp": (experts, E), "blk.0.ffn_gate_exps": (experts, F, E)}
        return found | {"blk.0.ffn_up_exps": (experts, F, E), "blk.0.ffn_down_exps": (experts, E, F)}
    return found | {"blk.0.ffn_gate": (F, E), "blk.0.ffn_up": (F, E), "blk.0.ffn_down": (E, F)}


def write_blocks(
    path: Path, kinds: dict[str, str], *, tied: bool = False, experts: int = 0, plain: Path | None = None,
    factor: float = 0.0, further: dict[str, F32] | None = None,
) -> dict[str, F32]:  # fmt: skip
    """A llama model at `path`, and one of its values in F32 at `plain`; returns tensor name -> values.

    `kinds`: a part of a tensor's name -> the type of its blocks, "" for all others; vectors and routers are F32.
    `factor`: matrices of NVFP4 have a scale beside them of about that; `further`: tensors that are in the file besides.
    """
    rng = np.random.default_rng(7)
    files = [GGUFWriter(p, "llama") for p in (path, plain) if p is not None]
    for key, value in (METADATA | ({"expert_count": experts, "expert_used_count": 2} if experts else {})).items():
        for file in files:
            (file.add_float32 if isinstance(value, float) else file.add_uint32)(f"llama.{key}", value)
    found: dict[str, F32] = {}
    for name, shape in shapes(tied, experts).items():
        kind = next((k for part, k in kinds.items() if part and part in name), kinds[""])
        size = 1.5 / shape[-1] ** 0.5 if "blk" in name else 0.6
        if len(shape) == 1 or name.endswith("_inp"):
            noise = rng.standard_normal(shape, dtype=np.float32)
            found[name] = (1 + noise / 10 if len(shape) == 1 else noise * size).astype(np.float32)
            files[0].add_tensor(name + ".weight", found[name])
        else:
            numbers, nbytes = BLOCKS[kind]
            blocks = random_blocks(kind, int(np.prod(shape)) // numbers, rng, 1.0)
            _centre(kind, blocks, 1.0)
            step = size / oracle(kind, blocks).std()
            floats_set(kind, blocks, step)
            _centre(kind, blocks, step)
            found[name] = oracle(kind, blocks).reshape(shape)
            if factor and kind == "NVFP4":
                stack = shape[0] if len(shape) == 3 else 1
                factors = (factor * (1 + np.arange(stack) / 8)).astype(np.float32)
                found[name] = with_factors(blocks, factors).reshape(shape)
                files[0].add_tensor(name + ".scale", factors)
                files[0].add_tensor(name + ".input_scale", factors)
            rows = blocks.reshape(*shape[:-1], shape[-1] // numbers * nbytes)
            files[0].add_tensor(name + ".weight", rows, raw_dtype=GGMLQuantizationType[kind])
        for file in files[1:]:
            file.add_tensor(name + ".weight", found[name])
    for name, array in (further or {}).items():
        files[0].add_tensor(name, array)
    for file in files:
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()
    return found
