"""The operations of `ops.table.CONTRACTS` that look at no cache, on tensors.

In `EXACT` each row is computed by itself, by calls whose shapes depend on nothing but the model, so that a row's bits
do not depend on its company: torch chooses kernels, and the order of their sums, by the shape of the whole call; and on
the CPU it computes what does not fill a vector by other functions (another `exp`) than the rest.
Shape letters are those of `ops.table`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from penstock.backends.gpu.placed import Matrix, StoredTensor, rows_of
from penstock.core.model_spec import Router
from penstock.ops.ref.experts import Routes
from penstock.ops.ref.pointwise import SWIGLU_ALPHA
from penstock.ops.ref.rotation import hadamard_matrix

_CHUNK_ELEMENTS = 1 << 22

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def by_row(op: Callable[..., Tensor], num_rowed: int = 1) -> Callable[..., Tensor]:
    """`op` for one row at a time: the first `num_rowed` of its arguments are cut, each row into memory of its own."""

    @wraps(op)
    def each(*args: Any, **named: Any) -> Tensor:
        rowed, rest = args[:num_rowed], args[num_rowed:]
        if not len(rowed[0]):
            return op(*args, **named)
        rows = zip(*(x.split(1) for x in rowed), strict=True)
        return torch.cat([op(*(x.clone(memory_format=torch.contiguous_format) for x in row), *rest, **named)
                          for row in rows])  # fmt: skip

    return each


def embed(token_ids: Tensor, weight: Matrix, part: str = "", vocab_size: int = 0) -> Tensor:
    if part:
        token_ids = token_ids % vocab_size if part == "word" else token_ids // vocab_size
    return rows_of(weight, torch.where(token_ids < weight.shape[0], token_ids, 0))


def select(x: Tensor, rows: Tensor | None) -> Tensor:
    """None: all of them, as captured steps want."""
    return x if rows is None else x[rows]


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """As one product. 16-bit weights meet rows of their own type on a GPU, where products add in float32; on the CPU
    they are widened. Codes are decoded in parts that depend on the weight's shape alone."""
    if isinstance(weight, StoredTensor) or x.device.type == "cpu":
        rows, columns = weight.shape
        step = max(1, _CHUNK_ELEMENTS // max(1, columns))
        parts = [_product(x, rows_of(weight, slice(lo, lo + step))) for lo in range(0, rows, step)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    else:
        out = _product(x.to(weight.dtype), weight).float()
    return out if bias is None else out + bias


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mv(weight, x[0])[None] if len(x) == 1 else torch.mm(x, weight.t())


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    out = x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) / x.shape[-1] + eps)
    return out if weight is None else out * weight


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    n = x.shape[-1]
    centred = x - x.sum(dim=-1, keepdim=True) / n
    out = centred / torch.sqrt((centred * centred).sum(dim=-1, keepdim=True) / n + eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def heads(x: Tensor, num_heads: int) -> Tensor:
    return x.reshape(x.shape[0], num_heads, x.shape[1] // num_heads)


def flat(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2])


def columns(x: Tensor, start: int, stop: int) -> Tensor:
    return x[:, start:stop].contiguous()


def concat(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], dim=1)


def rope_angles(positions: Tensor, table: Tensor) -> Tensor:
    return table[:, positions]


def rope(x: Tensor, angles: Tensor, interleaved: bool, first: int = 0) -> Tensor:
    cos, sin = angles[:, :, None, :] if angles.ndim == 3 else angles.repeat_interleave(
        x.shape[1] // angles.shape[2], dim=2
    )  # fmt: skip
    half = angles.shape[-1]
    if interleaved:
        a, b = slice(first, first + 2 * half, 2), slice(first + 1, first + 2 * half, 2)
    else:
        a, b = slice(first, first + half), slice(first + half, first + 2 * half)
    xa, xb = x[..., a], x[..., b]
    out = x.clone()
    out[..., a] = xa * cos - xb * sin
    out[..., b] = xb * cos + xa * sin
    return out


def activate(x: Tensor, activation: str) -> Tensor:
    return _ACTIVATIONS[activation](x)


def xielu(x: Tensor, positive: float, negative: float) -> Tensor:
    above = positive * x * x + 0.5 * x
    return torch.where(x > 0, above, negative * (torch.expm1(x.clamp(max=-1e-6)) - x) + 0.5 * x)


def activate_gated(gate: Tensor, up: Tensor, activation: str, limit: float | None = None) -> Tensor:
    if activation not in ("swiglu_clamped", "silu_clamped"):
        act = _ACTIVATIONS[activation](gate)
        return act * up if limit is None else act.clamp(max=limit) * up.clamp(-limit, limit)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu_clamped":
        return torch.nn.functional.silu(gate) * up
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1.0)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


def clip(x: Tensor, limit: float) -> Tensor:
    return x.clamp(-limit, limit)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap


def gate_rows(x: Tensor, gate: Tensor, by: str = "sigmoid") -> Tensor:
    return x * (softplus(gate) if by == "softplus" else torch.sigmoid(gate))


def biased_heads(x: Tensor, dt: Tensor, a: Tensor | None, factor: float) -> Tensor:
    more = x.new_zeros((*x.shape[:2], 4))
    more[:, :, 0] = factor if a is None else torch.exp(softplus(dt) * a) * factor
    return torch.cat([x, more], dim=-1)


def scale_queries(x: Tensor, positions: Tensor, beta: float, floor: int, shift: int) -> Tensor:
    turns = (positions.long() + shift) // floor
    return x * (1.0 + beta * torch.log1p(turns.double())).float()[:, None, None]


@cache
def _hadamard(dim: int, device: torch.device) -> Tensor:
    return torch.from_numpy(hadamard_matrix(dim)).to(device)


def hadamard(x: Tensor) -> Tensor:
    return torch.matmul(x, _hadamard(x.shape[-1], x.device))


def latent_query(q: Tensor, key: Tensor) -> Tensor:
    nope = key.shape[1]
    absorbed = torch.matmul(q[:, :, None, :nope], key.float())[:, :, 0]
    return torch.cat([absorbed, q[:, :, nope:]], dim=-1)


def latent_output(x: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(x[:, :, None, :], value.float().transpose(1, 2))[:, :, 0]


def interpolate(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return x + (y - x) * weight


def removal_key(k: Tensor, weight: Tensor, num_heads: int) -> Tensor:
    scaled = (k * weight).reshape(len(k), num_heads, -1)
    return scaled / torch.sqrt((scaled * scaled).sum(dim=-1, keepdim=True)).clamp(min=1e-12)


def replacement_key(k: Tensor, rate: Tensor, weight: Tensor) -> Tensor:
    return k * ((rate - 1.0) * weight + 1.0)


def value_bonus(r: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    return (r * k * weight).sum(dim=-1, keepdim=True) * v


def route(
    logits: Tensor, top_k: int, router: Router, correction: Tensor | None = None, expert_scale: Tensor | None = None
) -> Routes:
    """See `ops.ref.experts.route`. Ties go to the lower id: sorts are stable."""
    if router.score == "sparse_mixer":
        return _sparse_mixer(logits, top_k, router)
    scores = _scores(logits, router)
    choice = scores if correction is None else scores + correction
    if router.groups > 1:
        choice = _best_groups(choice, router)
    best = torch.sort(-choice, dim=-1, stable=True).indices[:, :top_k]
    ids = torch.sort(best, dim=-1).values
    chosen = logits if router.chosen_only else scores
    weights = chosen.gather(-1, ids)
    if router.chosen_only:
        weights = torch.softmax(weights, dim=-1)
    if router.renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total if router.score == "softmax" else total + 1e-20)
    weights = weights * router.scale
    found: Any = (ids, weights if expert_scale is None else weights * expert_scale[ids])
    return Routes(*found)


def _scores(logits: Tensor, router: Router) -> Tensor:
    if router.score == "sqrtsoftplus":
        return torch.sqrt(torch.nn.functional.softplus(logits))
    return torch.sigmoid(logits) if router.score == "sigmoid" else torch.softmax(logits, dim=-1)


def route_listed(
    logits: Tensor, token_ids: Tensor, top_k: int, router: Router, table: Tensor, expert_scale: Tensor | None = None
) -> Routes:
    """See `ops.ref.experts.route_listed`."""
    ids = table[token_ids.long() if len(table) > 1 else torch.zeros_like(token_ids).long()].long()
    if router.score == "even":
        weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    else:
        weights = _scores(logits, router).gather(-1, ids)
    if router.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * router.scale
    found: Any = (ids, weights if expert_scale is None else weights * expert_scale[ids])
    return Routes(*found)


def _sparse_mixer(logits: Tensor, top_k: int, router: Router) -> Routes:
    left = logits
    ids, weights = [], []
    for _ in range(top_k):
        best = torch.sort(-left, dim=-1, stable=True).indices[:, :1]
        z = left.gather(-1, best)
        far = (z - logits) / torch.maximum(logits.abs(), z) > 2 * router.jitter
        share = torch.softmax(torch.where(far, -math.inf, left), dim=-1)
        ids.append(best)
        weights.append(share.gather(-1, best))
        left = left.scatter(-1, best, -math.inf)
    order = torch.sort(torch.cat(ids, dim=-1), dim=-1)
    found: Any = (order.values, torch.cat(weights, dim=-1).gather(-1, order.indices) * router.scale)
    return Routes(*found)


def _best_groups(choice: Tensor, router: Router) -> Tensor:
    t, num_experts = choice.shape
    grouped = choice.reshape(t, router.groups, num_experts // router.groups)
    if router.group_score == "max":
        worth = grouped.amax(dim=-1)
    else:
        worth = torch.sort(grouped, dim=-1).values[:, :, -2:].sum(dim=-1)
    best = torch.sort(-worth, dim=-1, stable=True).indices[:, : router.top_groups]
    keep = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)
    return torch.where(keep[:, :, None], grouped, -math.inf).reshape(t, num_experts)


def route_by_row(
    logits: Tensor, top_k: int, router: Router, correction: Tensor | None = None, expert_scale: Tensor | None = None
) -> Routes:
    """`route` for one row at a time."""
    if not len(logits):
        return route(logits, top_k, router, correction, expert_scale)
    rows: Any = zip(*(route(row[None].clone(), top_k, router, correction, expert_scale) for row in logits), strict=True)
    ids, weights = (torch.cat(parts) for parts in rows)
    found: Any = (ids, weights)
    return Routes(*found)


def listed_by_row(
    logits: Tensor, token_ids: Tensor, top_k: int, router: Router, table: Tensor, expert_scale: Tensor | None = None
) -> Routes:
    """`route_listed` for one row at a time."""
    fixed = (top_k, router, table, expert_scale)
    if not len(logits):
        return route_listed(logits, token_ids, *fixed)
    rows: Any = zip(
        *(route_listed(logits[i : i + 1].clone(), token_ids[i : i + 1], *fixed) for i in range(len(logits))),
        strict=True,
    )
    ids, weights = (torch.cat(parts) for parts in rows)
    found: Any = (ids, weights)
    return Routes(*found)


PLAIN: dict[str, Callable[..., Any]] = {
    op.__name__: op
    for op in (
        embed, select, linear, rms_norm, layer_norm, heads, flat, columns, rope_angles, rope, activate, activate_gated,
        xielu, add, multiply, scale, clip, soft_cap, gate_rows, biased_heads, scale_queries, hadamard, latent_query,
        latent_output, interpolate, removal_key, replacement_key, value_bonus, route, route_listed, concat,
    )
}  # fmt: skip
_ROWED: dict[Callable[..., Tensor], int] = {
    linear: 1, rms_norm: 1, layer_norm: 1, hadamard: 1, latent_query: 1, latent_output: 1, removal_key: 1, activate: 1,
    xielu: 1, activate_gated: 2, soft_cap: 1, gate_rows: 2, biased_heads: 2, scale_queries: 2, value_bonus: 3,
}  # fmt: skip
EXACT: dict[str, Callable[..., Any]] = PLAIN | {op.__name__: by_row(op, n) for op, n in _ROWED.items()}
EXACT |= {"route": route_by_row, "route_listed": listed_by_row}
