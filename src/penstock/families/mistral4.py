"""Mistral 4 (text): DeepSeek's latent attention with queries that grow with their position, and softmax scores of
experts in groups.

Source: Mistral AI, Mistral Small 4 (2026); absent fields as in transformers' Mistral4Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError
from penstock.core.model_spec import Experts, Latent, ModelSpec, QueryScale, Router
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.deepseek import LATENT, latent_spec
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames
from penstock.families.mixtral import beyond
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.reading import MAX_EXPERTS, MAX_POSITION, WHERE, read_sizes, require
from penstock.families.sparse import SPARSE_MLP, stacked_rows

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 1048576, "num_attention_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 256,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "intermediate_size": 12288,
}  # fmt: skip
_ROPE: dict[str, Any] = {
    "type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class Mistral4(LlamaNames):
    """The `ModelFamily` of Mistral4ForCausalLM."""

    name = "mistral4"
    architectures = ("Mistral4ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        rope, grows = _rope(config)
        given = {**_DEFAULTS, **config, "rope_parameters": rope}
        head_dim = given.pop("head_dim", None)
        fields = Fields(given, WHERE)
        sizes = read_sizes(fields)
        groups = fields.integer("n_group", high=MAX_EXPERTS, default=1)
        router = Router(
            renormalize=fields.flag("norm_topk_prob", default=True), groups=groups, group_score="top2",
            top_groups=fields.integer("topk_group", high=groups, default=1),
            scale=fields.number("routed_scaling_factor", default=1.0),
        )  # fmt: skip

        def growing(_: Fields, mixer: Latent, num_layers: int) -> list[Latent]:
            require(Fields({"head_dim": head_dim}, WHERE), "head_dim", mixer.nope_dim + mixer.rope_dim)
            return [msgspec.structs.replace(mixer, query_scale=grows)] * num_layers

        return latent_spec(fields, self.name, sizes, router, default_dense=0, bos=1, eos=2, indexers=growing)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out: dict[str, str | Cut] = named(spec, LLAMA_TOP, LLAMA_LAYER | SPARSE_MLP | LATENT)
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.ffn, Experts):
                out |= stacked_rows(f"layers.{i}.experts", f"model.layers.{i}.mlp.experts", layer.ffn, spec.hidden_size)
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or beyond(name, spec)


def _rope(config: Mapping[str, Any]) -> tuple[dict[str, Any], QueryScale | None]:
    """The rotary positions without what stands among them but is none of theirs: how queries grow, the rotated part of
    a head (which its sizes say), the longest context."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or _ROPE
    if not isinstance(given, Mapping):
        raise ModelError(f"{WHERE} gives rope_parameters that are no object")
    fields = Fields(given, WHERE)
    rope = {
        name: value for name, value in given.items()
        if name not in ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
    }  # fmt: skip
    if "llama_4_scaling_beta" not in fields:
        return rope, None
    floor = fields.integer("original_max_position_embeddings", high=MAX_POSITION)
    return rope, QueryScale(beta=fields.number("llama_4_scaling_beta"), floor=floor)
