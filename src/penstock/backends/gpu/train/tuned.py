"""What is trained: low-rank pairs beside frozen products (LoRA), or the scales of frozen codes (PEQA).

Sources: Hu et al., LoRA, arXiv 2106.09685; over codes of four bits: Dettmers et al., QLoRA, arXiv 2305.14314; scales
alone: Kim et al., PEQA, arXiv 2305.14152.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.backends.gpu.placed import StoredTensor
from penstock.base.bf16 import narrow
from penstock.base.errors import UnsupportedError
from penstock.ops.stored import StoredMatrix
from penstock.weights.adapters import Site, Sites


class LowRankPart:
    """The rows of a module's pair that one product has."""

    def __init__(self, a: Tensor, b: Tensor, rows: Tensor | None, factor: float) -> None:
        self._a, self._b, self._rows, self._factor = a, b, rows, factor

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `pieces.Tuned`."""
        b = self._b if self._rows is None else self._b[self._rows]
        low = torch.nn.functional.linear(torch.nn.functional.linear(x, self._a) * self._factor, b)
        return torch.nn.functional.linear(x, weight, bias) + low


class LowRankPairs:
    """LoRA: A as PEFT begins it (uniform, from the seed), B zero, by module. Parameters: MODULE.lora_A and .lora_B."""

    kind = "LORA"

    def __init__(self, sites: Sites, targets: Sequence[str], rank: int, alpha: float, seed: int) -> None:
        """`targets`: last parts of modules' names. Raises: UnsupportedError if the model has none of one."""
        self.targets, self.rank, self.alpha = tuple(targets), rank, alpha
        self.parameters: dict[str, Tensor] = {}
        self.tuned: dict[str, LowRankPart] = {}
        generator = torch.Generator().manual_seed(seed)
        for module, own in _chosen(sites, targets).items():
            bound = 1 / math.sqrt(own[0].inputs)  # kaiming_uniform_ with a = sqrt(5)
            a = (torch.rand(rank, own[0].inputs, generator=generator) * 2 - 1) * bound
            b = torch.zeros(own[0].outputs, rank)
            self.parameters |= {f"{module}.lora_A": a.requires_grad_(), f"{module}.lora_B": b.requires_grad_()}
            for site in own:
                rows = None if site.rows is None else torch.from_numpy(site.rows)
                self.tuned[site.weight] = LowRankPart(a, b, rows, alpha / rank)

    def config(self) -> dict[str, Any]:
        """Of adapter_config.json."""
        return {"peft_type": "LORA", "r": self.rank, "lora_alpha": self.alpha, "target_modules": sorted(self.targets),
                "bias": "none", "task_type": "CAUSAL_LM", "lora_dropout": 0.0, "fan_in_fan_out": False}  # fmt: skip

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Of adapter_model.safetensors."""
        return {f"base_model.model.{name}.weight": p.detach().numpy() for name, p in self.parameters.items()}


class ScalesPart:
    """A product with codes whose scales are trained: (code - zero) * scale, zeros as they are."""

    def __init__(self, matrix: StoredMatrix, scales: Tensor) -> None:
        stored = StoredTensor(matrix, torch.device("cpu"))
        codes = stored.codes
        if stored.paired:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(len(codes), -1)
        values = codes.float() if stored.table is None else stored.table[codes.long()]
        zeros = None if stored.zeros is None else stored.zeros[:, stored.at]
        as_values = matrix.format.zeros_are == "values"
        self._rest = zeros if as_values else None
        self._units = values if as_values else values - (float(matrix.format.offset) if zeros is None else zeros)
        self._at, self.scales = stored.at, scales

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `pieces.Tuned`."""
        own = self._units * self.scales[:, self._at]
        return torch.nn.functional.linear(x, own if self._rest is None else own - self._rest, bias)


class Scales:
    """PEQA: the scales of stored codes, by module. Parameters: MODULE.scales [N, G]."""

    kind = "PEQA"

    def __init__(self, sites: Sites, targets: Sequence[str], weights: Mapping[str, Any]) -> None:
        """Raises: UnsupportedError for modules that are not stored as codes with one scale a group."""
        self.targets = tuple(targets)
        self._types: dict[str, str] = {}
        self.parameters: dict[str, Tensor] = {}
        self.tuned: dict[str, ScalesPart] = {}
        for module, own in _chosen(sites, targets).items():
            matrix = weights[own[0].weight]
            why = _why_no_scales(own, matrix)
            if why is not None:
                raise UnsupportedError(f"scales of {module}: {why}")
            found = StoredTensor(matrix, torch.device("cpu")).scales.to(torch.float32, copy=True)
            self.parameters[f"{module}.scales"] = found.requires_grad_()
            self._types[f"{module}.scales"] = matrix.format.scales[0].dtype
            self.tuned[own[0].weight] = ScalesPart(matrix, found)

    def config(self) -> dict[str, Any]:
        """Of adapter_config.json."""
        return {"peft_type": "PEQA", "target_modules": sorted(self.targets)}

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """Of adapter_model.safetensors, in the types of the base's own scales."""
        return {name: _as_type(p.detach().numpy(), self._types[name]) for name, p in self.parameters.items()}


def _as_type(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bfloat16":
        return narrow(x)
    return x.astype(np.float16) if dtype == "float16" else x


def _why_no_scales(own: Sequence[Site], matrix: Any) -> str | None:
    if len(own) != 1 or own[0].rows is not None:
        return "its rows are shared by several products"
    if not isinstance(matrix, StoredMatrix):
        return "its weights are plain numbers, which have no scales; take a model that is stored in few bits"
    if len(matrix.format.scales) != 1:
        return "its scales are codes themselves"
    return StoredTensor.why_not(matrix)


def _chosen(sites: Sites, targets: Iterable[str]) -> dict[str, list[Site]]:
    names = list(sites)
    for target in targets:
        if not any(name.rpartition(".")[2] == target for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            raise UnsupportedError(
                f"training: no product of this model is called {target!r}; it has {', '.join(known)}"
            )
    return {name: list(sites[name]) for name in sorted(sites) if name.rpartition(".")[2] in set(targets)}
