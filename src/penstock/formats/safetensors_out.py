"""Writing safetensors, whole or not at all. Source: github.com/huggingface/safetensors, "Format"."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

_TYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int64": "I64", "uint8": "U8"}


def write_safetensors(
    path: Path, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """`tensors`: float32, float16, int64, uint8, or bits of bfloat16 (uint16). A file of that name is replaced at once,
    when the new one is on the disk. Raises: OSError."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, x in tensors.items():
        header[name] = {"dtype": _TYPES[str(x.dtype)], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    head = msgspec.json.encode(header)
    head += b" " * (-len(head) % 8)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
