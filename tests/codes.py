"""GPTQ and AWQ checkpoints made in tests: a writer, and the values they stand for.

Both were written from the published definitions, the writer one word at a time with Python integers, and share nothing
with what they test. W[n, k] = scale[g, n] * (code[k, n] - zero[g, n]), g the group of input k.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from penstock.backends import BACKENDS
from penstock.core.matrix_format import NONE
from penstock.families.registry import open_model
from penstock.plan.weights import hold_weights
from penstock.weights.load import load_weights
from tests.unit.families.test_families import TINY, tiny_tensors

Arrays = dict[str, np.ndarray[Any, Any]]
AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]
"""Of eight neighbouring outputs, which one the i-th nibble of a word is."""
MODEL: dict[str, Any] = TINY | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48,
    "torch_dtype": "float16",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """How a checkpoint is written. `group` -1: all inputs; `ordered`: inputs are shuffled among the groups."""

    method: str = "gptq"
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    ordered: bool = False
    version: int = 1
    lm_head: bool = False

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        return {
            "quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.ordered,
            "sym": self.symmetric, "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2",
            "lm_head": self.lm_head, "damp_percent": 0.01, "true_sequential": True,
        }  # fmt: skip


def word(codes: list[int], bits: int) -> int:
    """An int32 with these codes, the first in its lowest bits."""
    value = sum(code << bits * i for i, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def coded(rng: np.random.Generator, n: int, k: int, kind: Kind) -> tuple[Arrays, np.ndarray[Any, Any]]:
    """The tensors of a random matrix, and the matrix [n, k], float32, exact."""
    group = k if kind.group == -1 else kind.group
    groups, most, bits = k // group, 2**kind.bits, kind.bits
    codes = rng.integers(0, most, (k, n))
    zeros = rng.integers(1, most, (groups, n))
    if kind.method == "gptq" and kind.symmetric:
        zeros[:] = most // 2
    elif kind.method == "gptq" and kind.version == 1:
        zeros[0, 0] = most  # stored as all ones: the sum needs a bit more than a code
    scales = (rng.random((groups, n)) * 0.02 + 0.005).astype(np.float16)
    of_input = np.arange(k) // group
    if kind.ordered:
        of_input = rng.permutation(of_input)
    values = (scales.astype(float)[of_input] * (codes - zeros[of_input])).T.astype(np.float32, order="C")
    per = 32 // bits
    if kind.method == "awq":

        def along(table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            rows = [[word([int(row[8 * c + p]) for p in AWQ_PLACES], 4) for c in range(n // 8)] for row in table]
            return np.array(rows, np.int64).astype(np.int32)

        return {"qweight": along(codes), "qzeros": along(zeros), "scales": scales}, values
    less = 1 if kind.version == 1 else 0
    qweight = [[word(codes[i : i + per, c].tolist(), bits) for c in range(n)] for i in range(0, k, per)]
    qzeros = [[word((row[i : i + per] - less).tolist(), bits) for i in range(0, n, per)] for row in zeros]
    return {
        "qweight": np.array(qweight, np.int64).astype(np.int32), "qzeros": np.array(qzeros, np.int64).astype(np.int32),
        "scales": scales, "g_idx": of_input.astype(np.int32),
    }, values  # fmt: skip


def write(folder: Path, kind: Kind, config: dict[str, Any] = MODEL, **changes: Any) -> Path:
    """A Llama folder with every linear layer in codes, and beside it, `folder`-dense, one with their values."""
    rng = np.random.default_rng(11)
    stored: Arrays = {}
    dense: Arrays = {}
    for name, array in tiny_tensors(config).items():
        is_linear = name.endswith("proj.weight") or (kind.lm_head and name == "lm_head.weight")
        if is_linear:
            parts, dense[name] = coded(rng, *array.shape, kind)
            stored |= {f"{name.removesuffix('weight')}{part}": values for part, values in parts.items()}
        else:
            stored[name] = array.astype(np.float16)
            dense[name] = stored[name].astype(np.float32)
    for at, tensors, told in (
        (folder, stored | changes, config | {"quantization_config": kind.config}),
        (folder.with_name(folder.name + "-dense"), dense, config | {"torch_dtype": "float32"}),
    ):
        at.mkdir(exist_ok=True)
        (at / "config.json").write_text(json.dumps(told))
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items() if v is not None}, at / "model.safetensors")
    return folder


def kept(folder: Path, dtype: str = "float32") -> dict[str, Any]:
    """All weights, codes as they are."""
    checkpoint = open_model(folder)
    held = hold_weights(checkpoint.spec, dtype, NONE, checkpoint.stored, traits=BACKENDS.traits("ref"), exact=True)
    return load_weights(checkpoint, checkpoint.spec, held)
