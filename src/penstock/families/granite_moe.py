"""Granite 3 with experts: Granite's multipliers, and all experts of a layer in one tensor.

Source: IBM, Granite 3.0 language models (2024); absent fields as in transformers' GraniteMoeConfig and
GraniteMoeSharedConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import Experts, FeedForward, Layer, ModelSpec, Router
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames, attention, read_norm, start
from penstock.families.naming import fused_rows
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_SIZE, finish, read_activation
from penstock.families.sparse import read_experts, read_width


class GraniteMoe(LlamaNames):
    """The `ModelFamily` of GraniteMoeForCausalLM."""

    name = "granitemoe"
    architectures = ("GraniteMoeForCausalLM",)
    names: Mapping[str, str] = {"router": "block_sparse_moe.router.layer"}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048)
        norm, bias = read_norm(fields), fields.flag("attention_bias")
        mixer = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            scale=fields.number("attention_multiplier", default=1.0),
        )  # fmt: skip
        ffn = granite_experts(fields, self._shared(fields))
        scale = fields.number("residual_multiplier", default=1.0)
        layers = (Layer(mixer=mixer, ffn=ffn, norm=norm, residual_scale=scale),) * sizes.num_layers
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm, **granite_scales(fields)
        )  # fmt: skip

    def _shared(self, fields: Fields) -> int:
        return 0

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return {**super().weight_map(spec), **granite_stacks(spec)}


class GraniteMoeShared(GraniteMoe):
    """The `ModelFamily` of GraniteMoeSharedForCausalLM: one more expert that every token passes through."""

    name = "granitemoeshared"
    architectures = ("GraniteMoeSharedForCausalLM",)
    names: Mapping[str, str] = {**GraniteMoe.names, "shared.down": "shared_mlp.output_linear"}

    def _shared(self, fields: Fields) -> int:
        return fields.integer("shared_intermediate_size", low=0, high=MAX_SIZE, default=0)


def granite_scales(fields: Fields) -> dict[str, Any]:
    """What the embedding is multiplied by, and what logits are, as fields of ModelSpec."""
    return {
        "embed_scale": fields.number("embedding_multiplier", default=1.0),
        "logit_scale": 1.0 / fields.number("logits_scaling", default=1.0),
    }


def granite_experts(fields: Fields, shared: int) -> Experts:
    """`shared`: width of what all tokens pass through, 0 for none."""
    activation = read_activation(fields)
    return read_experts(
        fields, FeedForward(width=read_width(fields, "intermediate_size"), activation=activation),
        Router(chosen_only=True), number=("num_local_experts",), default_top_k=2,
        shared=FeedForward(width=shared, activation=activation) if shared else None,
    )  # fmt: skip


def granite_stacks(spec: ModelSpec) -> dict[str, Cut]:
    """Experts of a layer in two tensors, gate above up; so are gate and up of what all tokens pass through."""
    out: dict[str, Cut] = {}
    e = spec.hidden_size
    for i, layer in enumerate(spec.layers):
        if not isinstance(layer.ffn, Experts):
            continue
        stored, x, f = f"model.layers.{i}.block_sparse_moe", layer.ffn.num_experts, layer.ffn.expert.width
        for n in range(x):
            own = f"layers.{i}.experts.{n}"
            for part, rows in (("gate", (0, f)), ("up", (f, 2 * f))):
                out[f"{own}.{part}"] = Cut(f"{stored}.input_linear.weight", (x, 2 * f, e), (n, rows))
            out[f"{own}.down"] = Cut(f"{stored}.output_linear.weight", (x, e, f), (n,))
        if layer.ffn.shared is not None:
            width = layer.ffn.shared.width
            parts = {"shared.gate": width, "shared.up": width}
            out |= fused_rows(spec, i, f"model.layers.{i}.shared_mlp.input_linear", parts, e)
    return out
