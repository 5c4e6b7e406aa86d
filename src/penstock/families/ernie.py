"""ERNIE 4.5, dense and with experts: Llama that rotates neighbours. Source: Baidu, ERNIE 4.5 technical report (2025);
transformers' Ernie4_5Config and Ernie4_5_MoeConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import Experts, FeedForward, Layer, ModelSpec, Router
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, stack, start
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_EXPERTS, MAX_LAYERS, finish, read_activation, require
from penstock.families.sparse import SPARSE_MLP, read_experts, read_width


class Ernie45(LlamaNames):
    """The `ModelFamily` of Ernie4_5ForCausalLM."""

    name = "ernie4_5"
    architectures = ("Ernie4_5ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=131072, num_key_value_heads=2, head_dim=128)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("use_bias")
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=5e5, interleaved=True)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias)
        layers = stack((mixer,) * sizes.num_layers, read_ffn(fields, bias=bias), norm)
        return finish(fields, self.name, sizes, layers, bos=(1,), eos=(2,), tie=True, final_norm=norm)


class Ernie45Moe(LlamaNames):
    """The `ModelFamily` of Ernie4_5_MoeForCausalLM: softmax scores, corrected for the choice; shared experts as one."""

    name = "ernie4_5_moe"
    architectures = ("Ernie4_5_MoeForCausalLM",)
    names = SPARSE_MLP

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=131072, num_key_value_heads=4)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("use_bias")
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=5e5, interleaved=True)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias)
        for name, value in (("moe_gate", "topk"), ("moe_use_aux_free", True)):
            require(fields, name, value)
        activation, width = read_activation(fields), read_width(fields, "moe_intermediate_size", 1536)
        num_shared = fields.integer("moe_num_shared_experts", low=0, high=MAX_EXPERTS, default=2)
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), Router(renormalize=True, correction=True),
            number=("moe_num_experts", "num_experts"), per_token="moe_k", default_top_k=6,
            shared=FeedForward(width=num_shared * width, activation=activation, bias=bias) if num_shared else None,
        )  # fmt: skip
        first = fields.integer("moe_layer_start_index", low=0, high=MAX_LAYERS, default=1)
        last = fields.integer("moe_layer_end_index", low=-1, high=MAX_LAYERS, default=-1)
        every = fields.integer("moe_layer_interval", high=MAX_LAYERS, default=1)
        last = sizes.num_layers - 1 if last == -1 else last
        dense = read_ffn(fields, bias=bias)
        layers = [
            Layer(mixer=mixer, ffn=ffn if first <= i <= last and (i + 1) % every == 0 else dense, norm=norm)
            for i in range(sizes.num_layers)
        ]
        # How many tokens an expert took in training, and how small a sum of weights may be: it is never so small.
        harmless = ("moe_capacity", "moe_norm_min", "num_nextn_predict_layers")
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), tie=True, final_norm=norm, lm_head_bias=bias,
            harmless=harmless,
        )  # fmt: skip

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = dict(super().weight_map(spec))
        for i, layer in enumerate(spec.layers):
            if isinstance(layer.ffn, Experts):
                stored = f"{self.prefix}.{i}.mlp.moe_statics.e_score_correction_bias"
                out[f"layers.{i}.router_correction"] = Cut(stored, (1, layer.ffn.num_experts), (0,))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or name.startswith("model.mtp_")
