"""What families with experts share: the router's fields, and the names of experts in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.base.errors import ModelError
from penstock.core.model_spec import Experts, FeedForward, Router
from penstock.core.weight_map import Cut, Take, WeightMap
from penstock.families.fields import Fields
from penstock.families.reading import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, WHERE
from penstock.formats.tensor_ref import TensorRef

_EXPERT = re.compile(r"layers\.\d+\.experts\.(?P<number>\d+)\.(?P<part>gate|up|down)(?P<bias>\.bias)?")
_ENDS = (".weight", ".weight_packed", ".qweight")
SPARSE_MLP = {
    "router": "mlp.gate", "router_correction": "mlp.gate.e_score_correction_bias!",
    "experts.*.gate": "mlp.experts.*.gate_proj", "experts.*.up": "mlp.experts.*.up_proj",
    "experts.*.down": "mlp.experts.*.down_proj",
    "shared.gate": "mlp.shared_experts.gate_proj", "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
}  # fmt: skip
"""As Qwen, OLMoE, GLM and DeepSeek name them."""
SHARED_ONE = {
    "shared.gate": "mlp.shared_expert.gate_proj", "shared.up": "mlp.shared_expert.up_proj",
    "shared.down": "mlp.shared_expert.down_proj", "shared_gate": "mlp.shared_expert_gate",
}  # fmt: skip
"""One shared expert with a gate, as Qwen names it."""
SPARSE_BLOCK = {
    "router": "block_sparse_moe.gate", "router_correction": "block_sparse_moe.e_score_correction_bias!",
    "experts.*.gate": "block_sparse_moe.experts.*.w1", "experts.*.up": "block_sparse_moe.experts.*.w3",
    "experts.*.down": "block_sparse_moe.experts.*.w2",
}  # fmt: skip
"""As Mixtral and MiniMax name them."""


def read_experts(
    fields: Fields, expert: FeedForward, router: Router, *, number: tuple[str, ...] = ("num_experts",),
    default_top_k: int | None = None, shared: FeedForward | None = None, shared_gate: bool = False,
    per_token: str = "num_experts_per_tok",
) -> Experts:  # fmt: skip
    """`number`: names that the count of experts may have; exactly one may be given.

    `per_token`: the field of `top_k`.
    """
    given = [name for name in number if name in fields]
    if len({fields.integer(name, high=MAX_EXPERTS) for name in given}) > 1:
        raise ModelError(f"{WHERE} gives the number of experts twice, as {' and '.join(given)}, and differently")
    num_experts = fields.integer(given[0] if given else number[0], high=MAX_EXPERTS)
    top_k = fields.integer(per_token, high=num_experts, default=default_top_k)
    if num_experts % router.groups:
        raise ModelError(f"{WHERE}: {router.groups} groups do not divide {num_experts} experts")
    if top_k > num_experts // router.groups * router.top_groups:
        raise ModelError(f"{WHERE}: the best {router.top_groups} groups hold fewer than {top_k} experts")
    return Experts(
        num_experts=num_experts, top_k=top_k, expert=expert, router=router, shared=shared, shared_gate=shared_gate
    )


def read_sparse(fields: Fields, num_layers: int, default_dense: int) -> list[bool]:
    """Which layers have experts: those called so in `mlp_layer_types`, or else all after the first
    `first_k_dense_replace`."""
    kinds = fields.strings("mlp_layer_types")
    num_dense = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=default_dense)
    if kinds is None:
        return [i >= num_dense for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise ModelError(f"{WHERE} gives mlp_layer_types that are not {num_layers} of dense and sparse")
    return [kind == "sparse" for kind in kinds]


def read_width(fields: Fields, name: str, default: int | None = None) -> int:
    return fields.integer(name, high=MAX_SIZE, default=default)


def grouped_router(fields: Fields, *, default_groups: int = 1) -> Router:
    """DeepSeek-V3's router, which GLM and others took over: sigmoid scores, corrected for the choice, in groups."""
    groups = fields.integer("n_group", high=MAX_EXPERTS, default=default_groups)
    return Router(
        score="sigmoid",
        renormalize=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
        correction=True,
        groups=groups,
        top_groups=fields.integer("topk_group", high=groups, default=groups),
        group_score="top2",
    )


def laid_out(places: WeightMap, tensors: Mapping[str, TensorRef]) -> WeightMap:
    """`places`, with experts where the file has them: each in tensors of its own instead of the stack that its family
    writes (tools that make codes of matrices take stacks apart first), or in a stack whose matrices lie the other way
    round (transformers 5 writes some so, and reads both)."""
    turned = {
        _layer_of(name) for name, place in places.items()
        if _EXPERT.fullmatch(name) and isinstance(place, Cut) and place.name in tensors
        and tensors[place.name].shape != place.shape and tensors[place.name].shape == _swapped(place).shape
    }  # fmt: skip
    out = dict(places)
    for logical, place in places.items():
        if not isinstance(place, Cut) or (found := _EXPERT.fullmatch(logical)) is None:
            continue
        if place.name in tensors:
            if len(place.shape) == 3 and _layer_of(logical) in turned:
                out[logical] = _swapped(place)
            continue
        stack, inside, _ = place.name.rpartition(".experts.")
        module = f"{stack}{inside}{found['number']}.{found['part']}_proj"
        if inside and any(f"{module}{end}" in tensors for end in _ENDS):
            out[logical] = f"{module}.{'bias' if found['bias'] else 'weight'}"
    return out


def _layer_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _swapped(cut: Cut) -> Cut:
    """The same matrices of a stack [X, a, b] in a stack [X, b, a]."""
    if len(cut.shape) != 3 or cut.view:
        return cut
    experts, a, b = cut.shape
    whole: tuple[Take, ...] = (0, (0, a), (0, b))
    index, rows, columns = cut.take + whole[len(cut.take) :]
    return Cut(cut.name, (experts, b, a), (index, columns, rows), axes=() if cut.axes else (1, 0))


def stacked(logical: str, stored: str, ffn: Experts, e: int, *, turns: bool) -> dict[str, Cut]:
    """All experts of a layer in one tensor, each [in, out]: columns of gate and up take turns (`turns`), or gate has
    the first half of them. `logical`, `stored`: names of the layer's experts here and in the checkpoint."""
    x, f = ffn.num_experts, ffn.expert.width
    columns: dict[str, Take] = {
        "gate": (0, 2 * f, 2) if turns else (0, f), "up": (1, 2 * f, 2) if turns else (f, 2 * f),
    }  # fmt: skip
    out: dict[str, Cut] = {}
    for i in range(x):
        for part, own in columns.items():
            out[f"{logical}.{i}.{part}"] = Cut(f"{stored}.gate_up_proj", (x, e, 2 * f), (i, (0, e), own), (), (1, 0))
            if ffn.expert.bias:
                out[f"{logical}.{i}.{part}.bias"] = Cut(f"{stored}.gate_up_proj_bias", (x, 2 * f), (i, own))
        out[f"{logical}.{i}.down"] = Cut(f"{stored}.down_proj", (x, f, e), (i,), (), (1, 0))
        if ffn.expert.bias:
            out[f"{logical}.{i}.down.bias"] = Cut(f"{stored}.down_proj_bias", (x, e), (i,))
    return out


def stacked_rows(logical: str, stored: str, ffn: Experts, e: int) -> dict[str, Cut]:
    """The same, each expert [out, in]: gate has the first half of the rows, up the others."""
    x, f = ffn.num_experts, ffn.expert.width
    out: dict[str, Cut] = {}
    for i in range(x):
        for part, rows in (("gate", (0, f)), ("up", (f, 2 * f))):
            out[f"{logical}.{i}.{part}"] = Cut(f"{stored}.gate_up_proj", (x, 2 * f, e), (i, rows))
        out[f"{logical}.{i}.down"] = Cut(f"{stored}.down_proj", (x, e, f), (i,))
    return out
