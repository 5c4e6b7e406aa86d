"""What the families share that mix state spaces with attention: fields `mamba_*` of config.json, names of weights.

Source: transformers' BambaConfig, whose fields Granite 4 and Falcon-H1 took over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Mamba, Mamba2, ModelSpec, ShortConv
from penstock.core.weight_map import Cut
from penstock.families.fields import Fields
from penstock.families.mamba import HARMLESS, MAX_TAPS
from penstock.families.mamba2 import read_time_step_limit
from penstock.families.reading import MAX_SIZE, WHERE
from penstock.formats.files import quoted

MIXED_HARMLESS = HARMLESS | {"mamba_chunk_size", "num_logits_to_keep", "use_mambapy", "use_mamba_kernels"}
MAMBA2_LAYER = {
    "in": "mamba.in_proj", "conv": "mamba.conv1d", "a_log": "mamba.A_log!", "d": "mamba.D!", "dt": "mamba.dt_bias!",
    "gate_norm": "mamba.norm", "o": "mamba.out_proj",
}  # fmt: skip
"""Module names of a Mamba-2 mixer. Those of attention are Llama's."""
KINDS = {
    "mamba": "linear_attention", "mamba2": "linear_attention", "linear_attention": "linear_attention",
    "attention": "full_attention", "full_attention": "full_attention",
}  # fmt: skip
"""Names of kinds of layers, old and new."""


def read_mamba2(fields: Fields, inner: int, eps: float, **more: Any) -> Mamba2:
    """`inner`: channels that heads share. `more`: further fields of Mamba2."""
    heads = fields.integer("mamba_n_heads", high=MAX_SIZE, default=128)
    if inner % heads:
        raise ModelError(f"{WHERE}: mamba_n_heads {heads} does not divide the {inner} channels of the state space")
    head_dim = inner // heads
    if fields.raw("mamba_d_head") != "auto":
        head_dim = fields.integer("mamba_d_head", high=MAX_SIZE, default=head_dim)
    if heads * head_dim != inner:
        raise ModelError(f"{WHERE}: mamba_n_heads {heads} x mamba_d_head {head_dim} is not {inner}")
    groups = fields.integer("mamba_n_groups", high=heads, default=1)
    if heads % groups:
        raise ModelError(f"{WHERE}: mamba_n_groups {groups} does not divide {heads} heads")
    low, high = read_time_step_limit(fields)
    return Mamba2(
        num_heads=heads, head_dim=head_dim, state=fields.integer("mamba_d_state", high=MAX_SIZE, default=256),
        groups=groups, conv=fields.integer("mamba_d_conv", low=2, high=MAX_TAPS, default=4), eps=eps, dt_min=low,
        dt_max=high, conv_bias=fields.flag("mamba_conv_bias", default=True), proj_bias=fields.flag("mamba_proj_bias"),
        **more,
    )  # fmt: skip


def read_expanded(fields: Fields, hidden_size: int) -> int:
    return hidden_size * fields.integer("mamba_expand", high=64, default=2)


def known_kinds(names: Sequence[str], num_layers: int) -> list[str]:
    """Kinds of all layers by their new names. Raises ModelError for another number, UnsupportedError for others."""
    if len(names) != num_layers:
        raise ModelError(f"{WHERE} gives the kinds of {len(names)} layers, but the model has {num_layers}")
    if unknown := [name for name in names if name not in KINDS]:
        raise UnsupportedError(
            f"{WHERE} has layers of the kind {quoted(unknown[0])}; known: {', '.join(sorted(KINDS))}"
        )
    return [KINDS[name] for name in names]


def with_mixers(spec: ModelSpec, plain: Mapping[str, str | Cut], modules: Mapping[str, str]) -> dict[str, str | Cut]:
    """`plain`, with the weights of layers that keep a state by the names in `modules`; convolutions are [C, 1, K]."""
    out = dict(plain)
    for i, layer in enumerate(spec.layers):
        if not isinstance(layer.mixer, Mamba | Mamba2 | ShortConv):
            continue
        for name, shape in layer.mixer.weight_shapes(spec.hidden_size).items():
            base, bias, _ = name.partition(".bias")
            module = f"model.layers.{i}.{modules[base]}"
            stored = module[:-1] if module.endswith("!") else module + (bias or ".weight")
            out[f"layers.{i}.{name}"] = Cut(stored, (shape[0], 1, shape[1])) if name == "conv" else stored
    return out
