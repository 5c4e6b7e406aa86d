"""Other weights of the bundled nano, on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from tests.adapting import nano


def other_nano(path: Path, seed: int) -> Path:
    """The bundled nano with its numbers scaled at random: another model of the same shapes."""
    shutil.copytree(nano(), path)
    file = path / "model.safetensors"
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    rng = np.random.default_rng(seed)
    for entry in json.loads(raw[8:start]).values():
        if entry.get("dtype") != "BF16":
            continue
        first, last = (start + at for at in entry["data_offsets"])
        bits = np.frombuffer(bytes(raw[first:last]), np.uint16).astype(np.uint32) << 16
        scaled = (bits.view(np.float32) * rng.uniform(0.7, 1.3, bits.shape)).astype(np.float32)
        raw[first:last] = (scaled.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    file.write_bytes(raw)
    return path
