"""Muon: momentum whose matrices are made orthogonal before they are applied.

Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; the coefficients of the quintic
Newton-Schulz iteration are theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315


def fast_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 are worth it: a CPU that has to imitate them is faster in float32."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """Roughly U V^T of every g = U S V^T in [..., M, N]: singular values between about 0.7 and 1.2."""
    x = g.to(torch.bfloat16 if fast_bfloat16(g.device) else torch.float32)
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True).to(x.dtype) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        a = x @ x.mT
        x = _A * x + (_B * a + _C * a @ a) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """For the matrices of hidden layers; embeddings, heads and vectors belong to AdamW."""

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault(p.shape, []).append(p)
            # Matrices of one shape go through the iteration as one batch: small products alone leave cores idle.
            for shape, params in alike.items():
                updates = orthogonal(torch.stack([self._averaged(p, group["momentum"]) for p in params]))
                for p, update in zip(params, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5)

    def _averaged(self, p: torch.nn.Parameter, momentum: float) -> Tensor:
        """Nesterov's average of the gradients of `p`."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum"]
        buffer.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(buffer, momentum)
