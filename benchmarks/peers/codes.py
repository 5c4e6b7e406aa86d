"""GPTQ and AWQ: a checkpoint of `make_models` rounded to 4 bits in groups of 128, as their libraries store it.

Weights are rounded to the nearest code; what a library would do with data does not change what a token costs. W[n, k] =
scale[g, n] * (code[k, n] - zero[g, n]), g the group of input k. Sources: `qlinear_cuda.py` of
github.com/AutoGPTQ/AutoGPTQ, `gemm.py` of github.com/casper-hansen/AutoAWQ.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.peers.make_models import write_safetensors
from benchmarks.peers.reference import F32, Reference

from penstock.base.bf16 import narrow

GROUP = 128
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight neighbouring outputs, which one the i-th nibble of a word is."""
Arrays = dict[str, npt.NDArray[Any]]
_TYPES = {"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32"}


def words(codes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """[..., 8] codes -> [...] int32, the first in the lowest bits."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    packed: npt.NDArray[np.uint32] = np.bitwise_or.reduce(codes.astype(np.uint32) << shifts, axis=-1)
    return packed.view(np.int32)


def nibbles(packed: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """[...] int32 -> [..., 8] codes."""
    return packed.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)


def gptq(w: F32, *, order: npt.NDArray[np.int32] | None = None) -> Arrays:
    """Tensors of a matrix [N, K], symmetric. `order`: the group of each input, else the one after another."""
    n, k = w.shape
    of_input = np.arange(k, dtype=np.int32) // GROUP if order is None else order
    sorted_by = np.argsort(of_input, kind="stable")
    most = np.abs(w[:, sorted_by]).reshape(n, k // GROUP, GROUP).max(2)
    scales = (most / np.float32(7)).T.astype(np.float16)
    codes = np.clip(np.rint(w.T / scales.astype(np.float32)[of_input]) + 8, 0, 15)
    return {
        "qweight": words(codes.reshape(k // 8, 8, n).swapaxes(1, 2)),
        "qzeros": np.full((k // GROUP, n // 8), 0x77777777, np.int32),  # version 1: one less than the zero point
        "scales": scales, "g_idx": of_input,
    }  # fmt: skip


def awq(w: F32) -> Arrays:
    """Tensors of a matrix [N, K], with zero points."""
    n, k = w.shape
    grouped = w.reshape(n, k // GROUP, GROUP)
    low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
    scales = ((high - low) / np.float32(15)).T.astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low.T / wide), 0, 15)
    codes = np.clip(np.rint(w.T.reshape(k // GROUP, GROUP, n) / wide[:, None]) + zeros[:, None], 0, 15).reshape(k, n)
    places = list(AWQ_PLACES)
    return {
        "qweight": words(codes.reshape(k, n // 8, 8)[..., places]),
        "qzeros": words(zeros.reshape(-1, n // 8, 8)[..., places]), "scales": scales,
    }  # fmt: skip


def to_codes(folder: Path, out: Path, form: str) -> None:
    """Layers in codes, everything else in bfloat16. `form`: gptq4, gptq4-order or awq4."""
    source = Reference(folder)
    out.mkdir(parents=True, exist_ok=True)
    write_safetensors(out / "model.safetensors", _tensors(source, form))
    told: dict[str, Any] = {"bits": 4, "group_size": GROUP}
    if form == "awq4":
        told |= {"quant_method": "awq", "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    else:
        told |= {"quant_method": "gptq", "sym": True, "desc_act": form == "gptq4-order", "checkpoint_format": "gptq",
                 "lm_head": False, "damp_percent": 0.01, "true_sequential": True}  # fmt: skip
    (out / "config.json").write_text(json.dumps(source.config | {"quantization_config": told}, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(folder / name, out / name)


def _tensors(source: Reference, form: str) -> Iterator[tuple[str, tuple[int, ...], str, Callable[[], Any]]]:
    @lru_cache(1)
    def coded(name: str) -> Arrays:
        w = source.weight(name)
        if form == "awq4":
            return awq(w)
        order = np.arange(w.shape[1], dtype=np.int32) // GROUP
        if form == "gptq4-order":
            order = np.random.default_rng(zlib.crc32(name.encode())).permutation(order)
        return gptq(w, order=order)

    for name, entry in source.header.items():
        if name == "__metadata__":
            continue
        if not name.endswith("_proj.weight"):
            yield name, tuple(entry["shape"]), "BF16", lambda n=name: narrow(source.weight(n))  # type: ignore[misc]
            continue
        n, k = entry["shape"]
        shapes = {"qweight": (k // 8, n), "qzeros": (k // GROUP, n // 8), "scales": (k // GROUP, n), "g_idx": (k,)}
        if form == "awq4":
            shapes = shapes | {"qweight": (k, n // 8)}
            del shapes["g_idx"]
        for part, shape in shapes.items():
            stem = name.removesuffix("weight")
            yield stem + part, shape, _TYPES[part], lambda n=name, p=part: coded(n)[p]  # type: ignore[misc]
