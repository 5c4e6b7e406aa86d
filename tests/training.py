"""Texts to train on, and models whose matrices are stored in few bits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import penstock
from penstock.backends.gpu.train.open import open_trainer
from penstock.core.training import Recipe, TrainingExample
from penstock.families.checkpoint import Checkpoint, stored_shapes
from penstock.families.registry import open_model
from penstock.weights.load import read_weight

TARGETS = ("q_proj", "v_proj", "down_proj")
Parts = dict[str, np.ndarray[Any, Any]]


@cache
def pico() -> Path:
    return Path(penstock.__file__).parent / "bundled" / "pico"


def examples(count: int, length: int, seed: int = 0) -> list[TrainingExample]:
    """The same five tokens in turns, from one of them on: no model expects that, and it is soon learnt."""
    starts = np.random.default_rng(seed).integers(0, 5, count).tolist()
    return [
        TrainingExample(
            [(411, 97, 1203, 655, 88)[(start + i) % 5] for i in range(length)], [i > 1 for i in range(length)]
        )
        for start in starts
    ]


def recipe(**more: Any) -> Recipe:
    base: dict[str, Any] = {"targets": TARGETS, "rank": 4, "alpha": 8.0, "learning_rate": 1e-2, "epochs": 1}
    return Recipe(**base | {"slice_tokens": 6, **more})


def trained(checkpoint: Checkpoint, texts: list[TrainingExample], how: Recipe) -> tuple[Any, Any]:
    """A training that has run to its end, and what it changed."""
    trainer, changed = open_trainer(checkpoint, texts, how)
    trainer.run()
    return trainer, changed


def loss(trainer: Any, texts: list[TrainingExample]) -> float:
    found = [trainer.loss_of(text) for text in texts]
    return sum(total for total, _ in found) / sum(count for _, count in found)


def stored_pico(folder: Path, parts_of: Callable[[np.ndarray[Any, Any]], Parts], config: dict[str, Any]) -> Path:
    """pico with the matrices of its layers stored as `parts_of` says."""
    found = open_model(pico())
    shapes, tensors = stored_shapes(found.spec), {}
    for name, ref in found.weights.items():
        own, values = ref.tensor.name, np.array(read_weight(ref, shapes[name]))
        if values.ndim == 2 and name.startswith("layers."):
            stem = own.removesuffix(".weight")
            tensors |= {stem + part: np.ascontiguousarray(x) for part, x in parts_of(values).items()}
        else:
            tensors[own] = values
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pico() / name, folder / name)
    whole = json.loads((pico() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(whole | {"torch_dtype": "float32", "quantization_config": config}))
    return folder
