"""Small trained heads on a model's hidden states: reading them, and running them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.bf16 import widen
from penstock.base.errors import ConfigError, ModelError
from penstock.formats.files import quoted, read_exactly
from penstock.formats.json_file import read_json_object
from penstock.formats.safetensors import read_safetensors
from penstock.formats.tensor_ref import TensorRef

F32 = npt.NDArray[np.float32]


class DraftHeads(NamedTuple):
    """Shapes: weight [K, N, E, E], bias [K, N, E]: K heads of N residual blocks."""

    weight: F32
    bias: F32

    def __call__(self, hidden: F32) -> F32:
        """[J, E] -> [J, K, E]."""
        x = np.repeat(hidden[None], len(self.weight), axis=0)
        for n in range(self.weight.shape[1]):
            y = x @ self.weight[:, n].transpose(0, 2, 1) + self.bias[:, n, None]
            # The bound keeps exp finite; beyond it the result is 0 in float32 anyhow.
            x = x + y / (1 + np.exp(-np.maximum(y, np.float32(-80))))
        return np.ascontiguousarray(x.transpose(1, 0, 2), np.float32)


def read_heads(folder: Path, kind: str, hidden_size: int, fingerprint: str) -> tuple[DraftHeads, Mapping[str, Any]]:
    """What `tools/train/heads.py` wrote, and its config.json. `kind`: medusa or adapter. Raises: ConfigError."""
    tensors, config = open_heads(folder, kind, hidden_size, fingerprint)
    weight, bias = (numbers(tensors, folder, name) for name in ("weight", "bias"))
    fits = weight.ndim == 4 and weight.shape[2:] == (hidden_size, hidden_size) and bias.shape == weight.shape[:3]
    if not fits or 0 in weight.shape or not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise heads_problem(f"heads {quoted(folder)} are unsound: weight {list(weight.shape)}, bias {list(bias.shape)}")
    return DraftHeads(weight, bias), config


def open_heads(
    folder: Path, kind: str, hidden_size: int, fingerprint: str
) -> tuple[dict[str, TensorRef], Mapping[str, Any]]:
    """The tensors of heads of one kind and their config.json. Raises ConfigError unless they fit the model."""
    try:
        config = read_json_object(folder / "config.json")
        tensors = read_safetensors(folder / "model.safetensors")
    except ModelError as error:
        raise heads_problem(f"heads {quoted(folder)} cannot be read: {error}") from None
    if config.get("kind") != kind:
        trainer = "eagle" if kind == "eagle" else "heads"
        raise heads_problem(
            f"heads {quoted(folder)} are of kind {config.get('kind')!r}, not {kind!r}; tools/train/{trainer}.py trains "
            "them"
        )
    found = config.get("hidden_size")
    if found != hidden_size or config.get("base") != fingerprint:
        raise heads_problem(
            f"heads {quoted(folder)} were trained on another model (hidden size {found}, fingerprint "
            f"{config.get('base')}) than this (hidden size {hidden_size}, fingerprint {fingerprint})"
        )
    return tensors, config


def numbers(tensors: dict[str, TensorRef], folder: Path, name: str) -> F32:
    """Raises: ConfigError."""
    ref = tensors.get(name)
    kinds: dict[str, npt.DTypeLike] = {"BF16": "<u2", "F32": "<f4"}
    if ref is None or ref.dtype not in kinds:
        raise heads_problem(f"heads {quoted(folder)} lack a tensor {name} of bfloat16 or float32")
    raw = np.frombuffer(read_exactly(ref.path, ref.offset, ref.nbytes), kinds[ref.dtype]).reshape(ref.shape)
    return widen(raw) if ref.dtype == "BF16" else raw.astype(np.float32)


def heads_problem(text: str) -> ConfigError:
    """An error about the settings of speculation."""
    return ConfigError(f"speculative_config: {text}", field="speculative_config")
