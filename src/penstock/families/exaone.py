"""EXAONE 3 and 3.5: Llama by other names. EXAONE 4: norms behind the halves, q and k normed, and no positions where
attention is full among sliding layers. K-EXAONE: norms in front, experts as in DeepSeek-V3.

Source: LG AI Research, EXAONE 3.5, arXiv 2412.04862, and EXAONE 4.0, arXiv 2507.11407; defaults of absent fields as in
transformers' Exaone4Config and ExaoneMoeConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, QkNorm
from penstock.families.fields import Fields
from penstock.families.llama_like import (
    FULL,
    POST_NORMS,
    SLIDING,
    LlamaNames,
    attention,
    by_kind,
    every,
    read_ffn,
    read_kinds,
    read_norm,
    read_window,
    stack,
    start,
)
from penstock.families.positions import read_rope
from penstock.families.reading import (
    MAX_EXPERTS,
    WHERE,
    Heads,
    Sizes,
    finish,
    read_activation,
    read_heads,
    read_sizes,
    require,
)
from penstock.families.sparse import SPARSE_MLP, grouped_router, read_experts, read_sparse, read_width

_TOP = {"embed": "transformer.wte", "final_norm": "transformer.ln_f", "lm_head": "lm_head"}
_NAMES = {
    "attn_norm": "ln_1", "ffn_norm": "ln_2", "q": "attn.attention.q_proj", "k": "attn.attention.k_proj",
    "v": "attn.attention.v_proj", "o": "attn.attention.out_proj", "gate": "mlp.c_fc_0", "up": "mlp.c_fc_1",
    "down": "mlp.c_proj",
}  # fmt: skip


class Exaone(LlamaNames):
    """The `ModelFamily` of ExaoneForCausalLM."""

    name = "exaone"
    architectures = ("ExaoneForCausalLM",)
    top = _TOP
    names = _NAMES
    prefix = "transformer.h"

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, layers="num_layers", default_positions=2048)
        heads = read_heads(fields, sizes.hidden_size)
        norm = read_norm(fields, "layer_norm_epsilon", 1e-5)
        mixer = attention(heads, rope=read_rope(fields, heads.head_dim, sizes.max_position))
        layers = stack((mixer,) * sizes.num_layers, read_ffn(fields, act="activation_function"), norm)
        return finish(fields, self.name, sizes, layers, bos=(0,), eos=(2,), tie=True, final_norm=norm)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return name == "transformer.rotary.inv_freq" or super().ignores(name, spec)


class Exaone4(LlamaNames):
    """The `ModelFamily` of Exaone4ForCausalLM."""

    name = "exaone4"
    architectures = ("Exaone4ForCausalLM",)
    names = POST_NORMS

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048, num_key_value_heads=32, sliding_window=4096)
        norm = read_norm(fields, default=1e-5)
        mixers = _mixers(fields, heads, sizes, norm.eps)
        layers = stack(mixers, read_ffn(fields), norm, placement="post")
        return finish(fields, self.name, sizes, layers, bos=(0,), eos=(2,), final_norm=norm)


class ExaoneMoe(LlamaNames):
    """The `ModelFamily` of ExaoneMoeForCausalLM."""

    name = "exaone_moe"
    architectures = ("ExaoneMoeForCausalLM",)
    names = SPARSE_MLP | {"router_correction": "mlp.e_score_correction_bias!"}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(
            config, max_position_embeddings=2048, num_key_value_heads=32, sliding_window=4096,
            routed_scaling_factor=2.5,
        )  # fmt: skip
        norm, activation = read_norm(fields, default=1e-5), read_activation(fields)
        for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            require(fields, name, value)
        mixers = _mixers(fields, heads, sizes, norm.eps)
        dense, width = read_ffn(fields), read_width(fields, "moe_intermediate_size", 1024)
        num_shared = fields.integer("num_shared_experts", high=MAX_EXPERTS, default=1)
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), grouped_router(fields),
            number=("num_experts", "n_routed_experts"), default_top_k=8,
            shared=FeedForward(width=num_shared * width, activation=activation),
        )  # fmt: skip
        sparse = read_sparse(fields, sizes.num_layers, 1)
        if "is_moe_layer" in fields and fields.raw("is_moe_layer") != sparse:
            raise ModelError(f"{WHERE} says twice which layers have experts, and is_moe_layer differs")
        layers = [
            Layer(mixer=mixer, ffn=ffn if wide else dense, norm=norm)
            for mixer, wide in zip(mixers, sparse, strict=True)
        ]
        extra = ("num_nextn_predict_layers", "mtp_share_layers", "mtp_loss_scaling_factor")
        return finish(fields, self.name, sizes, layers, bos=(1,), eos=(53,), final_norm=norm, harmless=extra)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or name.startswith("mtp.")


def _mixers(fields: Fields, heads: Heads, sizes: Sizes, eps: float) -> tuple[Attention, ...]:
    """Layers slide but every fourth, which has no positions then."""
    window = read_window(fields)
    slides = every(fields, "sliding_window_pattern", 4) if "layer_types" not in fields else bool
    fields.raw("sliding_window_pattern")  # released files give a string such as LLLG beside `layer_types`
    kinds = read_kinds(fields, sizes.num_layers, slides)
    rope = read_rope(fields, heads.head_dim, sizes.max_position)
    ropes = {SLIDING: rope, FULL: rope if window is None else None}
    return by_kind(attention(heads, qk_norm=QkNorm(eps=eps)), kinds, window, ropes)
