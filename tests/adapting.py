"""Made adapters, and weights with an adapter merged into them: the oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import penstock
from penstock.core.model_spec import ModelSpec
from penstock.families.registry import open_model
from penstock.model.adapted import adaptable
from penstock.ops.adapters import LowRank
from penstock.weights.adapters import sites_of

Parts = dict[str, LowRank]


def made(spec: ModelSpec, seed: int, *, rank: int = 3, share: float = 1.0, dtype: Any = np.float32) -> Parts:
    """An adapter of `share` of the products of a model; some have gains and shifts, one in four has no product."""
    rng = np.random.default_rng(seed)
    parts: Parts = {}
    for i, (name, (rows, cols)) in enumerate(adaptable(spec).items()):
        if rng.random() >= share:
            continue
        r = 0 if i % 4 == 3 else rank
        a, b = rng.normal(0, 0.12, (r, cols)), rng.normal(0, 0.12, (rows, r))
        gain = rng.uniform(0.8, 1.2, rows).astype(np.float32) if i % 3 == 1 else None
        shift = rng.normal(0, 0.1, rows).astype(np.float32) if i % 3 == 2 or r == 0 else None
        parts[name] = LowRank(a.astype(dtype), b.astype(dtype), 0.5 + 0.25 * seed, gain, shift)
    return parts


def merged(weights: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """Weights with the adapter in them, in float64's sums; a shift without a bias to go into has no place."""
    out = dict(weights)
    for name, part in parts.items():
        gain = np.ones(len(part.b)) if part.gain is None else part.gain.astype(np.float64)
        low = part.factor * part.b.astype(np.float64) @ part.a.astype(np.float64)
        out[name] = (weights[name].astype(np.float64) * gain[:, None] + low).astype(np.float32)
        bias = name + ".bias"
        if bias in weights:
            shift = 0 if part.shift is None else part.shift
            out[bias] = (weights[bias].astype(np.float64) * gain + shift).astype(np.float32)
        else:
            assert part.shift is None, f"{name} has no bias"
    return out


def unshifted(parts: Parts, weights: Mapping[str, Any]) -> Parts:
    """Without shifts of what has no bias, so that weights can hold it."""
    return {n: p if n + ".bias" in weights else p._replace(shift=None) for n, p in parts.items()}


def write_folder(
    path: Path, modules: Mapping[str, Mapping[str, Any]], *, targets: Any = None, **config: Any
) -> Path:  # fmt: skip
    """A folder as PEFT writes it. `modules`: path in the base -> tensors by the end of their names (lora_A.weight)."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{m}.{end}": np.asarray(x) for m, own in modules.items() for end, x in own.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    rank = next((len(own["lora_A.weight"]) for own in modules.values() if "lora_A.weight" in own), 1)
    found = sorted({m.rpartition(".")[2] for m, own in modules.items() if "lora_A.weight" in own})
    whole = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets or found, **config}
    (path / "adapter_config.json").write_text(json.dumps(whole))
    return path


def nano_folder(
    path: Path, seed: int, *, rank: int = 4, targets: Sequence[str] = ("q_proj", "v_proj"), size: float = 0.3,
    **config: Any,
) -> Path:  # fmt: skip
    """A made LoRA of the bundled nano."""
    rng = np.random.default_rng(seed)
    modules = {}
    for module, (rows, cols) in nano_shapes().items():
        if module.rpartition(".")[2] in targets:
            a, b = rng.normal(0, size, (rank, cols)), rng.normal(0, size, (rows, rank))
            modules[module] = {"lora_A.weight": a.astype(np.float32), "lora_B.weight": b.astype(np.float32)}
    return write_folder(path, modules, **config)


@cache
def nano() -> Path:
    return Path(penstock.__file__).parent / "bundled" / "nano"


@cache
def nano_shapes() -> dict[str, tuple[int, int]]:
    """Module -> [outputs, inputs] of the bundled nano."""
    found = open_model(nano())
    sites = sites_of(found.weights, adaptable(found.spec))
    return {module: (own[0].outputs, own[0].inputs) for module, own in sites.items()}
