"""Golden values of ggml's block types, decoded by ggml's own C code.

    python tools/oracles/ggml_decode.py LIBRARY [OUT]

LIBRARY: libggml-base.so of a llama.cpp build. Writes blocks of random bytes (every float16 scale finite) and a SHA-256
of the float32 values that `dequantize_row_TYPE` makes of them; where gguf's Python package has no decoder, the values.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from penstock.formats.ggml import GGML_FORMATS
from penstock.formats.tensor_ref import BLOCKS

OUT = Path(__file__).parents[2] / "tests" / "data" / "ggml_blocks.json"
WITHOUT_PYTHON = ("Q8_K", "Q1_0", "Q2_0")


def decode(library: ctypes.CDLL, kind: str, blocks: np.ndarray) -> np.ndarray:
    out = np.empty((len(blocks), BLOCKS[kind][0]), np.float32)
    function = getattr(library, "dequantize_row_" + kind.lower().replace("_k", "_K"))
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (blocks, out))
    function(*pointers, ctypes.c_int64(out.size))
    return out


def main(path: str, out: str = str(OUT)) -> None:
    library, rng = ctypes.CDLL(path), np.random.default_rng(29)
    found: dict[str, dict[str, str]] = {}
    for kind in GGML_FORMATS:
        per, size = BLOCKS[kind]
        blocks = np.empty((0, size), np.uint8)
        while len(blocks) < max(2, 256 // per):
            one = rng.integers(0, 256, (1, size), np.uint8)
            if kind == "NVFP4":
                one[:, :4] &= 0x3F
            if np.isfinite(decode(library, kind, one)).all():
                blocks = np.concatenate([blocks, one])
        data = decode(library, kind, blocks).tobytes()
        found[kind] = {"blocks": base64.b64encode(blocks.tobytes()).decode()}
        found[kind]["sha256"] = hashlib.sha256(data).hexdigest()
        if kind in WITHOUT_PYTHON:
            found[kind]["values"] = base64.b64encode(data).decode()
    Path(out).write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
