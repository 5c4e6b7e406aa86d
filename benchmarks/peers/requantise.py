"""One model in many of GGUF's formats, made by llama.cpp's own quantiser from one file.

    PYTHONPATH=src:. LLAMA_CPP_LIB_PATH=... PYTHON-OF-LLAMA.CPP -m benchmarks.peers.requantise MODEL.gguf --out FOLDER

In an environment that has `llama-cpp-python` (README.md), for its low-level API is called. MODEL is first widened to
float16, the file that all others are made from and can be compared with. What exists is not made again; a format that
the quantiser refuses is named, and the others go on. Formats below three bits want to know how much each input
matters: they are told that all matter alike, so their texts are worse than those of files made with data.

Rows that are no multiple of 256 cannot be k-quants or most IQ formats: the quantiser takes another type for those
tensors, so what a file holds is printed. With --pure no tensor gets more bits than the format's name says.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from penstock.base.errors import PenstockError
from penstock.formats.gguf import read_gguf

COMMON = "Q8_0,Q4_0,Q4_1,Q5_0,Q5_1,Q2_K,Q3_K_M,Q4_K_M,Q5_K_M,Q6_K,IQ4_NL,IQ4_XS,IQ3_S,IQ3_XXS"
RARE = "IQ2_M,IQ2_S,IQ2_XS,IQ2_XXS,IQ1_S,IQ1_M,TQ1_0,TQ2_0,MXFP4,NVFP4"
TYPES_BY_NAME = "MXFP4", "NVFP4"
"""Formats that the quantiser has only for experts: asked for by the type of every tensor instead."""
BASE = "F16"


def ftype(name: str) -> int | None:
    """llama.cpp's number of a format; None if this build does not know it."""
    if name in TYPES_BY_NAME:
        name = "Q8_0"
    number: int | None = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}", None)
    return number


class FlatImportance:
    """Every input of every product matters alike; the arrays that the quantiser reads must outlive the call."""

    def __init__(self, path: Path) -> None:
        two = [t for t in read_gguf(path).tensors.values() if len(t.shape) > 1]
        ones = {t.name: np.ones(t.shape[-1] * int(np.prod(t.shape[:-2])), np.float32) for t in two}
        self._kept = list(ones.values())
        self.entries = (llama_cpp.llama_model_imatrix_data * (len(ones) + 1))()  # the last one is empty: the end
        for entry, (name, data) in zip(self.entries, ones.items(), strict=False):
            entry.name, entry.size = name.encode(), len(data)
            entry.data = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def make(source: Path, target: Path, name: str, *, threads: int, pure: bool) -> bool:
    """Whether `target` has been written; nothing is left of one that failed."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize, params.pure = ftype(name), threads, True, pure
    importance = FlatImportance(source) if name.startswith("IQ") else None
    if importance is not None:
        params.imatrix = importance.entries
    if name in TYPES_BY_NAME:
        overrides = (llama_cpp.llama_model_tensor_override * 2)()
        overrides[0].pattern, overrides[0].type = b"blk.*_(q|k|v|output|gate|up|down).weight", _ggml_type(name)
        params.tt_overrides = overrides
    part = target.with_suffix(".part")
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params))
    if failed:
        part.unlink(missing_ok=True)
        return False
    part.replace(target)
    return True


def _ggml_type(name: str) -> int:
    number: int = getattr(llama_cpp, f"GGML_TYPE_{name}")
    return number


def held(path: Path) -> str:
    """Types and how many tensors of each, or why Penstock cannot read the header."""
    try:
        found = Counter(t.dtype for t in read_gguf(path).tensors.values())
    except PenstockError as error:
        return str(error)
    return ", ".join(f"{kind} {n}" for kind, n in found.most_common())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--types", default=f"{COMMON},{RARE}")
    parser.add_argument("--name", help="of the files, before the format; default: the model's, without its own format")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pure", action="store_true")
    args = parser.parse_args(argv)
    stem = args.name or args.model.stem
    args.out.mkdir(parents=True, exist_ok=True)
    refused = []
    base = args.out / f"{stem}-{BASE}.gguf"
    for name in [BASE, *args.types.split(",")]:
        target = args.out / f"{stem}-{name}{'-pure' if args.pure and name != BASE else ''}.gguf"
        source = args.model if name == BASE else base
        if ftype(name) is None:
            refused.append(f"{name}: this llama.cpp does not have it")
        elif not target.exists() and not make(source, target, name, threads=args.threads, pure=args.pure):
            refused.append(f"{name}: llama.cpp refused")
        else:
            print(target, target.stat().st_size, held(target), flush=True)
    print("\n".join(refused), file=sys.stderr)
    return bool(refused)


if __name__ == "__main__":
    sys.exit(main())
