"""DeepSeek-V2, V3, R1 and what is published in V3's shape (Kimi K2): latent attention and fine-grained experts.

Source: DeepSeek-V2, arXiv 2405.04434, section 2; DeepSeek-V3, arXiv 2412.19437, section 2.1; absent fields as in
transformers' DeepseekV2Config and DeepseekV3Config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import FeedForward, Latent, Layer, ModelSpec, Norm, Router
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.llama import ignored
from penstock.families.mixtral import beyond
from penstock.families.mtp import NEXTN, MtpNames
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.positions import mscale, read_rope
from penstock.families.reading import (
    MAX_EXPERTS,
    MAX_SIZE,
    WHERE,
    Sizes,
    finish,
    read_activation,
    read_sizes,
    require,
)
from penstock.families.sparse import SPARSE_MLP, grouped_router, read_experts, read_sparse, read_width
from penstock.formats.files import quoted

LATENT = {
    "q_a": "self_attn.q_a_proj", "q_a_norm": "self_attn.q_a_layernorm", "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa", "kv_a_norm": "self_attn.kv_a_layernorm", "kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
# `ep_size` tells how training spread its experts; extra layers of multi-token prediction may draft (`families.mtp`).
_TRAINING = ("ep_size", "num_nextn_predict_layers", "num_mtp_layers")


_LITE: dict[str, Any] = {
    "max_position_embeddings": 202752, "num_attention_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "rms_norm_eps": 1e-5, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "n_shared_experts": 1, "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
}  # fmt: skip
"""What the fields of a GLM are where its file leaves them out."""


class DeepseekV2:
    """The `ModelFamily` of DeepseekV2ForCausalLM."""

    name = "deepseek_v2"
    architectures = ("DeepseekV2ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=2048)
        return latent_spec(fields, self.name, sizes, self._router(fields), default_dense=0, bos=1, eos=2)

    def _router(self, fields: Fields) -> Router:
        require(fields, "norm_topk_prob", False)  # transformers reads it nowhere, the published code does
        require(fields, "scoring_func", "softmax")
        scale = fields.number("routed_scaling_factor", default=1.0)
        method = fields.string("topk_method", default="greedy")
        groups = fields.integer("n_group", high=MAX_EXPERTS, default=1)
        top_groups = fields.integer("topk_group", high=groups, default=groups)
        if method == "greedy":
            return Router(scale=scale)
        if method == "group_limited_greedy":
            return Router(scale=scale, groups=groups, top_groups=top_groups)
        raise UnsupportedError(
            f"{WHERE} asks for topk_method {quoted(method)}; this family computes greedy and group_limited_greedy"
        )

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return named(spec, LLAMA_TOP, LLAMA_LAYER | SPARSE_MLP | LATENT)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return ignored(name, spec) or beyond(name, spec)


class DeepseekV3(DeepseekV2):
    """The `ModelFamily` of DeepseekV3ForCausalLM; Kimi K2 names the same architecture and calls itself kimi_k2."""

    name = "deepseek_v3"
    architectures = ("DeepseekV3ForCausalLM",)
    mtp: MtpNames | None = NEXTN

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=4096)
        require(fields, "scoring_func", "sigmoid")
        require(fields, "topk_method", "noaux_tc")
        router = grouped_router(fields, default_groups=1)
        return latent_spec(fields, self.name, sizes, router, default_dense=3, bos=0, eos=1)


class Glm4MoeLite(DeepseekV3):
    """The `ModelFamily` of Glm4MoeLiteForCausalLM: GLM-4.7-Flash, DeepSeek-V3 in another size."""

    name = "glm4_moe_lite"
    architectures = ("Glm4MoeLiteForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields({**_LITE, **config}, WHERE)
        sizes = read_sizes(fields)
        for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            require(fields, name, value)
        return latent_spec(fields, self.name, sizes, grouped_router(fields), default_dense=1, bos=0, eos=1)


def latent_spec(
    fields: Fields, family: str, sizes: Sizes, router: Router, *, default_dense: int, bos: int, eos: int,
    indexers: Callable[[Fields, Latent, int], list[Latent]] | None = None,
) -> ModelSpec:  # fmt: skip
    norm = Norm(eps=fields.number("rms_norm_eps", default=1e-6))
    mixer = read_latent(fields, sizes)
    mixers = [mixer] * sizes.num_layers if indexers is None else indexers(fields, mixer, sizes.num_layers)
    activation = read_activation(fields)
    bias = fields.flag("mlp_bias")
    dense = FeedForward(width=read_width(fields, "intermediate_size"), activation=activation, bias=bias)
    sparse = read_sparse(fields, sizes.num_layers, default_dense)
    require(fields, "moe_layer_freq", 1)
    ffn = None
    if any(sparse):
        width = read_width(fields, "moe_intermediate_size")
        num_shared = fields.integer("n_shared_experts", high=MAX_EXPERTS)
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), router,
            number=("n_routed_experts", "num_local_experts", "num_experts"),
            shared=FeedForward(width=num_shared * width, activation=activation, bias=bias),
        )  # fmt: skip
    layers = [
        Layer(mixer=mixer, ffn=ffn if ffn is not None and wide else dense, norm=norm)
        for mixer, wide in zip(mixers, sparse, strict=True)
    ]
    return finish(fields, family, sizes, layers, bos=(bos,), eos=(eos,), final_norm=norm, harmless=_TRAINING)


def read_latent(fields: Fields, sizes: Sizes) -> Latent:
    heads = fields.integer("num_attention_heads", high=MAX_SIZE)
    if fields.integer("num_key_value_heads", high=MAX_SIZE, default=heads) != heads:
        raise ModelError(f"{WHERE}: latent attention has as many key-value heads as query heads, {heads}")
    rope_dim = fields.integer("qk_rope_head_dim", high=MAX_SIZE, default=64)
    nope_dim = fields.integer("qk_nope_head_dim", high=MAX_SIZE, default=128)
    for name, value in (("head_dim", rope_dim), ("qk_head_dim", nope_dim + rope_dim)):
        require(fields, name, value)  # derived; some writers store them
    rope = read_rope(
        fields, rope_dim, sizes.max_position, interleaved=fields.flag("rope_interleave", default=True)
    )  # fmt: skip
    scale = (nope_dim + rope_dim) ** -0.5
    section = fields.section("rope_scaling") or fields.section("rope_parameters")
    if rope.kind != "default" and section is not None:
        # DeepSeek's YaRN enlarges the scores too. Source: DeepSeek-V2, section 3.1.4 and the published code.
        by_all = section.number("mscale_all_dim", default=0.0, above=-1.0)
        scale *= mscale(rope.factor, by_all) ** 2 if by_all else 1.0
    return Latent(
        num_heads=heads, kv_rank=fields.integer("kv_lora_rank", high=MAX_SIZE, default=512), nope_dim=nope_dim,
        rope_dim=rope_dim, v_dim=fields.integer("v_head_dim", high=MAX_SIZE, default=128), rope=rope,
        q_rank=fields.integer("q_lora_rank", high=MAX_SIZE) if "q_lora_rank" in fields else None, scale=scale,
        bias=fields.flag("attention_bias"),
    )  # fmt: skip
