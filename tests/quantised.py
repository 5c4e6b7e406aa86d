"""Folders of one small Llama whose last matrix is stored as somebody's library stores it; the rest is plain."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.unit.families.test_families import TINY, tiny_tensors

ORACLES = Path(__file__).parent / "data" / "oracles"
MODULE = "model.layers.1.mlp.down_proj"
LOGICAL = "layers.1.down"
Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stored:
    """A matrix as a library has stored it, and what that library decodes it to. `parts`: by what follows the module's
    name; `values` [N, K] in the library's own type."""

    config: dict[str, Any]
    parts: Parts
    values: torch.Tensor


def golden(name: str) -> dict[str, Stored]:
    """The cases of a file of `tools/oracles`."""
    with safe_open(ORACLES / f"{name}.safetensors", "pt") as file:
        configs = json.loads(file.metadata()["configs"])
        found: dict[str, Parts] = {case: {} for case in configs}
        for key in file.keys():  # noqa: SIM118
            case, part = key.split("/")
            found[case][part] = file.get_tensor(key)
    return {case: Stored(configs[case], parts, parts.pop("values")) for case, parts in found.items()}


def write(folder: Path, stored: Stored, **changes: Any) -> Path:
    """`changes`: of tensors by their part with "." spelt "_" in front of it left out; None: without it."""
    n, k = stored.values.shape
    config = TINY | {"hidden_size": n, "intermediate_size": k}
    tensors = {name: torch.from_numpy(x) for name, x in tiny_tensors(config).items()}
    del tensors[f"{MODULE}.weight"]
    parts = stored.parts | {f".{part}": value for part, value in changes.items()}
    tensors |= {MODULE + part: value for part, value in parts.items() if value is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored.config}))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def as_type(values: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """float32 values rounded to the type of a library's own."""
    return torch.from_numpy(np.array(values)).to(dtype)
