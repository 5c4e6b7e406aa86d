"""HunYuan dense and with experts (V1): Llama with q and k normed after their rotation; Hy3: before it, and with
experts by sigmoid scores.

Source: Tencent, Hunyuan-7B-Instruct (2025) and Hy3 (2026); defaults of absent fields as in transformers'
HunYuanDenseV1Config, HunYuanMoEV1Config and HYV3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, Experts, FeedForward, Layer, ModelSpec, QkNorm, Rope, Router
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, stack, start
from penstock.families.mixtral import beyond
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE, WHERE, finish, read_activation, require
from penstock.families.sparse import SPARSE_MLP, read_experts, read_sparse, read_width

_HY3: dict[str, Any] = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192,
    "intermediate_size": 13312,
}  # fmt: skip
_NORMS = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}

_ONLY = {"use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms", "mlp_bias": False}
"""Fields of released files that transformers does not read: what they say is what there is."""
_ONLY_SPARSE = {
    "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "use_mla": False, "use_vision": False,
    "group_limited_greedy": False, "norm_topk_prob": True, "position_embedding_xdrope": False,
}  # fmt: skip
# Token ids of other kinds, and a classifier's head.
_HARMLESS = (
    "eod_token_id", "pad_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id",
    "mask_init_id", "org_vocab_size", "class_num", "dense_list", "pool_type",
)  # fmt: skip


class HunYuanDense(LlamaNames):
    """The `ModelFamily` of HunYuanDenseV1ForCausalLM."""

    name = "hunyuan_v1_dense"
    architectures = ("HunYuanDenseV1ForCausalLM",)
    names = _NORMS

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("attention_bias")
        rope = _alpha_rope(fields, heads.head_dim) or read_rope(fields, heads.head_dim, sizes.max_position)
        for name, value in (_ONLY | {"attention_head_dim": heads.head_dim}).items():
            require(fields, name, value)
        qk_norm = QkNorm(eps=norm.eps, after_rope=True)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
        layers = stack(_shared(fields, mixer, sizes.num_layers), read_ffn(fields), norm)
        return finish(fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm, harmless=_HARMLESS)


class HunYuanMoe(LlamaNames):
    """The `ModelFamily` of HunYuanMoEV1ForCausalLM: experts beside a feed-forward that all tokens share."""

    name = "hunyuan_v1_moe"
    architectures = ("HunYuanMoEV1ForCausalLM",)
    names = _NORMS | SPARSE_MLP | {
        "router": "mlp.gate.wg", "shared.gate": "mlp.shared_mlp.gate_proj", "shared.up": "mlp.shared_mlp.up_proj",
        "shared.down": "mlp.shared_mlp.down_proj",
    }  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("attention_bias")
        rope = _alpha_rope(fields, heads.head_dim) or read_rope(fields, heads.head_dim, sizes.max_position)
        for name, value in (_ONLY | _ONLY_SPARSE | {"attention_head_dim": heads.head_dim}).items():
            require(fields, name, value)
        qk_norm = QkNorm(eps=norm.eps, after_rope=True)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
        mixers, ffns = _shared(fields, mixer, sizes.num_layers), self._experts(fields, sizes.num_layers)
        layers = [Layer(mixer=m, ffn=ffn, norm=norm) for m, ffn in zip(mixers, ffns, strict=True)]
        return finish(fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm, harmless=_HARMLESS)

    def _experts(self, fields: Fields, num_layers: int) -> list[Experts]:
        width, activation = fields.integer("intermediate_size", high=MAX_SIZE), read_activation(fields)
        numbers, chosen, shared, widths = (
            _per_layer(fields, name, num_layers, high, default)
            for name, high, default in (
                ("num_experts", MAX_EXPERTS, 1), ("moe_topk", MAX_EXPERTS, 1), ("num_shared_expert", MAX_EXPERTS, 1),
                ("moe_intermediate_size", MAX_SIZE, width),
            )
        )  # fmt: skip
        if any(k > n for k, n in zip(chosen, numbers, strict=True)):
            raise ModelError(f"{WHERE} chooses more experts (moe_topk) than a layer has (num_experts)")
        return [
            Experts(
                num_experts=n, top_k=k, expert=FeedForward(width=w, activation=activation),
                router=Router(renormalize=True), shared=FeedForward(width=s * width, activation=activation),
            )
            for n, k, s, w in zip(numbers, chosen, shared, widths, strict=True)
        ]  # fmt: skip


def _shared(fields: Fields, mixer: Attention, num_layers: int) -> list[Attention]:
    """With `use_cla`, the first of every `cla_share_factor` layers keeps keys and values for all of them
    (Hunyuan-Large, arXiv 2411.02265, section 2.2.2: of every two). transformers does not compute it."""
    used, factor = fields.flag("use_cla"), fields.integer("cla_share_factor", high=MAX_LAYERS, default=1)
    if not used:
        return [mixer] * num_layers
    # Every layer has a norm of keys, those of others too.
    norm = QkNorm(eps=mixer.qk_norm.eps, after_rope=True, in_query=True) if mixer.qk_norm is not None else None
    mixer = msgspec.structs.replace(mixer, qk_norm=norm)
    return [msgspec.structs.replace(mixer, kv_from=n - n % factor if n % factor else None) for n in range(num_layers)]


class Hy3(LlamaNames):
    """The `ModelFamily` of HYV3ForCausalLM."""

    name = "hy_v3"
    architectures = ("HYV3ForCausalLM",)
    names = SPARSE_MLP | {
        "router": "mlp.router.gate", "router_correction": "mlp.expert_bias!",
        **{f"shared.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    }  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, **_HY3)
        norm, activation = read_norm(fields, default=1e-5), read_activation(fields)
        bias, inner = fields.flag("attention_bias"), fields.flag("mlp_bias")
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=11158840.0)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm(eps=norm.eps))
        width = read_width(fields, "moe_intermediate_size", 1536)
        shared = width * fields.integer("num_shared_experts", high=MAX_EXPERTS, default=1)
        router = Router(
            score="sigmoid", renormalize=True, correction=True,
            scale=fields.number("router_scaling_factor", default=2.826),
        )  # fmt: skip
        ffn = read_experts(
            fields, FeedForward(width=width, activation=activation), router,
            number=("num_experts", "num_local_experts"), default_top_k=8,
            shared=FeedForward(width=shared, activation=activation, bias=inner),
        )  # fmt: skip
        dense = read_ffn(fields, bias=inner)
        layers = [
            Layer(mixer=mixer, ffn=ffn if sparse else dense, norm=norm)
            for sparse in read_sparse(fields, sizes.num_layers, 1)
        ]
        # In which type sums are made, and layers that predict further tokens, which are not run.
        harmless = ("enable_moe_fp32_combine", "num_nextn_predict_layers")
        return finish(fields, self.name, sizes, layers, final_norm=norm, harmless=harmless)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or beyond(name, spec)


def _per_layer(fields: Fields, name: str, num_layers: int, high: int, default: int) -> list[int]:
    """One number for all layers, or a list with one for each."""
    if not isinstance(fields.raw(name), list):
        return [fields.integer(name, high=high, default=default)] * num_layers
    values = fields.integers(name, low=1, high=high) or []
    if len(values) != num_layers:
        raise ModelError(f"{WHERE} gives {name} for {len(values)} layers, but the model has {num_layers}")
    return values


def _alpha_rope(fields: Fields, dim: int) -> Rope | None:
    """A rope of the kind "dynamic" with an `alpha`: theta is enlarged by it once and for all.

    Released files give YaRN's numbers beside it, which transformers does not look at.
    """
    scaling = fields.section("rope_parameters") or fields.section("rope_scaling")
    if (
        scaling is None
        or "alpha" not in scaling
        or scaling.raw("rope_type" if "rope_type" in scaling else "type") != "dynamic"
    ):
        return None
    if dim < 4:
        raise ModelError(f"{WHERE}: an alpha in rope scaling needs at least two pairs")
    theta = scaling.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    alpha = scaling.number("alpha")
    if alpha > 1e9:
        raise ModelError(f"{WHERE} gives {alpha:g} as alpha of rope scaling; it must be 1e9 at most")
    scaling.refuse_unread(("type", "rope_type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"))
    return Rope(dim=dim, theta=theta * alpha ** (dim / (dim - 2)))
