"""What the makers of golden files share: matrices quantised and decoded by their own libraries, for the tests.

Each maker runs in an environment of its own, since the libraries want other versions of torch than the tests do; its
head says what to install. `python tools/oracles/golden_NAME.py` writes `tests/data/oracles/NAME.safetensors`: of each
case the tensors as the library stores them (`case/.part`), what it decodes them to (`case/values`), and in
`__metadata__` the library with its version and the quantization_config of each case.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

N, K = 32, 64
"""Outputs and inputs of a matrix."""
ROOT = Path(__file__).resolve().parents[2] / "tests" / "data" / "oracles"
Case = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]
"""Its quantization_config, its tensors by what follows the module's name, and the matrix [N, K] that they stand for."""


def weight(n: int = N, k: int = K, seed: int = 0) -> torch.Tensor:
    """A matrix as trained ones are: most numbers small, some outputs and inputs larger."""
    torch.manual_seed(seed)
    return torch.randn(n, k) * 0.03 * (1 + torch.rand(n, 1) * 3) * (1 + (torch.rand(1, k) > 0.9) * 4)


def save(name: str, package: str, cases: dict[str, Case], library_version: str = "") -> None:
    tensors: dict[str, torch.Tensor] = {}
    for case, (_, parts, values) in cases.items():
        tensors |= {f"{case}/{part}": tensor.detach().contiguous().clone() for part, tensor in parts.items()}
        tensors[f"{case}/values"] = values.detach().contiguous().clone()
    told = {
        "library": f"{package} {library_version or version(package)}",
        "torch": torch.__version__,
        "configs": json.dumps({case: config for case, (config, _, _) in cases.items()}),
    }
    ROOT.mkdir(parents=True, exist_ok=True)
    path = ROOT / f"{name}.safetensors"
    save_file(tensors, path, metadata=told)
    print(f"{path}: {len(cases)} cases, {path.stat().st_size} bytes, {told['library']}")
