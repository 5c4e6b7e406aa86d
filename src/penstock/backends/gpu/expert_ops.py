"""Mixtures of experts on tensors: each token through its experts, weighed and added in id order.

Which experts a token has is known on the device. Nothing here asks for it, and no shape follows from it: weights
are looked up by number in an `ExpertStack`. See `ops.ref.experts`. Shape letters: T tokens, K experts of a token, X
experts, E hidden, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.backends.gpu.ops import activate, activate_gated
from penstock.backends.gpu.placed import ExpertStack, Matrix, StoredTensor, part_of
from penstock.ops.ref.experts import ExpertWeights, Routes

Placed = ExpertStack | Sequence[ExpertWeights]


def why_not_captured(weights: Placed) -> str | None:
    """What makes the host wait for the choice of experts, as an end of a sentence; None: nothing does."""
    if isinstance(weights, ExpertStack):
        return None
    return "experts of one layer differ in shape or format, so the host has to know which are chosen"


def experts(
    x: Tensor, routes: Any, weights: Placed, activation: str, limit: float | None, scale_input: bool,
    linear: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """See `ops.ref.experts.experts`. Few tokens look their experts up; many go through all, which reads no weight
    twice and is more work by X / K."""
    if not isinstance(weights, ExpertStack):
        return _apart(x, routes, weights, activation, limit, scale_input, linear)
    if routes.ids.numel() <= weights.num:
        return experts_by_row(x, routes, weights, activation, limit, scale_input, linear)
    out = torch.zeros_like(x)
    for i in range(weights.num):
        chosen = routes.ids == i
        share = torch.where(chosen, routes.weights, 0.0).sum(dim=-1, keepdim=True)
        y = _expert(x * share if scale_input else x, _one_of(weights, i), activation, limit, linear)
        out = out + torch.where(chosen.any(dim=-1, keepdim=True), y if scale_input else y * share, 0.0)
    return out


def experts_by_row(
    x: Tensor, routes: Any, weights: Placed, activation: str, limit: float | None, scale_input: bool,
    linear: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """`experts` for one row at a time, by calls whose shapes depend on nothing but the model."""
    if not len(x):
        return torch.zeros_like(x)
    found: list[Tensor] = []
    for row, ids, shares in zip(x, routes.ids, routes.weights, strict=True):
        if not isinstance(weights, ExpertStack):
            own: Any = (ids[None].clone(), shares[None].clone())
            found.append(_apart(row[None].clone(), Routes(*own), weights, activation, limit, scale_input, linear)[0])
            continue
        h = row.repeat(len(ids), 1)  # memory of its own: a row's place in a batch would show in its last bits
        h = h * shares[:, None] if scale_input else h
        up = _chosen(h, weights.up, weights.up_bias, ids, weights.num)
        if weights.gate is None:
            inner = activate(up, activation)
        else:
            gate = _chosen(h, weights.gate, weights.gate_bias, ids, weights.num)
            inner = activate_gated(gate, up, activation, limit)
        y = _chosen(inner, weights.down, weights.down_bias, ids, weights.num)
        parts = (y if scale_input else y * shares[:, None]).unbind()
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        found.append(total)
    return torch.stack(found)


def experts_by_kernels(
    x: Tensor, routes: Any, weights: Placed, activation: str, limit: float | None, scale_input: bool,
    linear: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """`experts` by `kernels.experts`, where these take the formats."""
    from penstock.backends.gpu.kernels.experts import run_experts

    if isinstance(weights, ExpertStack) and why_no_kernel(weights, activation) is None:
        w = weights
        gate = None if w.gate is None else _as_kernel(w.gate, w.gate_bias)
        stacks = gate, _as_kernel(w.up, w.up_bias), _as_kernel(w.down, w.down_bias)
        return run_experts(x, routes.ids, routes.weights, *stacks, w.num, activation, limit, scale_input=scale_input)
    return experts(x, routes, weights, activation, limit, scale_input, linear)


def why_no_kernel(weights: ExpertStack, activation: str) -> str | None:
    """What keeps `kernels.experts` from these experts, as an end of a sentence."""
    from penstock.backends.gpu.kernels.activation import ACTIVATIONS

    if activation not in ACTIVATIONS:
        return f"no kernel knows the activation {activation}"
    for name in ("gate", "up", "down"):
        stack = getattr(weights, name)
        if isinstance(stack, StoredTensor) and stack.format.ordered:
            return f"{name} has inputs in an order of their own"
        if stack is not None and (problem := _as_kernel(stack, None).why_not()) is not None:
            return f"{name}: {problem}"
    if weights.gate is not None and _kind(weights.gate) != _kind(weights.up):
        return "gate and up are held in two formats"
    return None


def _kind(stack: Matrix) -> Any:
    return stack.format if isinstance(stack, StoredTensor) else stack.dtype


def _as_kernel(stack: Matrix, bias: Tensor | None) -> Any:
    """As `kernels.experts.Stack`."""
    from penstock.backends.gpu.kernels.experts import Stack

    if not isinstance(stack, StoredTensor):
        return Stack(stack, bias=bias)
    form = stack.format
    return Stack(
        stack.codes, 4 if stack.paired else 8, stack.scales, stack.zeros, stack.table, form.offset, form.zeros_are,
        form.group, bias,
    )  # fmt: skip


def _chosen(h: Tensor, stack: Matrix, bias: Tensor | None, ids: Tensor, num: int) -> Tensor:
    """h [K, N] times the matrices [num * M, N] that `ids` [K] name: [K, M]."""
    m = stack.shape[0] // num
    if isinstance(stack, StoredTensor):
        rows = ids[:, None] * m + torch.arange(m, device=ids.device)
        own = stack.values(rows.reshape(-1)).view(len(ids), m, -1)
    else:
        own = stack.view(num, m, -1)[ids]
    kind = torch.float32 if h.device.type == "cpu" else own.dtype
    out = torch.bmm(own.to(kind), h.to(kind)[:, :, None])[:, :, 0].float()
    return out if bias is None else out + bias[ids]


def _one_of(weights: ExpertStack, i: int) -> ExpertWeights:
    def part(stack: Matrix | None) -> Any:
        if stack is None:
            return None
        m = stack.shape[0] // weights.num
        return part_of(stack, i * m, (i + 1) * m)

    biases: Any = (None if b is None else b[i] for b in (weights.gate_bias, weights.up_bias, weights.down_bias))
    return ExpertWeights(part(weights.gate), part(weights.up), part(weights.down), *biases)


def _expert(x: Tensor, w: Any, activation: str, limit: float | None, linear: Callable[..., Tensor]) -> Tensor:
    up = linear(x, w.up, w.up_bias)
    if w.gate is None:
        return linear(activate(up, activation), w.down, w.down_bias)
    return linear(activate_gated(linear(x, w.gate, w.gate_bias), up, activation, limit), w.down, w.down_bias)


def _apart(
    x: Tensor, routes: Any, weights: Sequence[ExpertWeights], activation: str, limit: float | None, scale_input: bool,
    linear: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Experts that are no stack: the host waits for what is chosen, and goes through that."""
    out = torch.zeros_like(x)
    for i in torch.unique(routes.ids).tolist():
        rows, column = torch.nonzero(routes.ids == i, as_tuple=True)
        share = routes.weights[rows, column][:, None]
        y = _expert(x[rows] * share if scale_input else x[rows], weights[i], activation, limit, linear)
        out[rows] += y if scale_input else y * share
    return out


for _form in (experts, experts_by_row, experts_by_kernels):
    _form.capture_safe = True  # type: ignore[attr-defined]  # of an `ExpertStack`: see `why_not_captured`
