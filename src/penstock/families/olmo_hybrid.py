"""OLMo Hybrid: three layers of the gated delta rule, normed in front, to one of attention, normed behind.

Source: OLMo Team, Olmo Hybrid (2026); absent fields as in transformers' OlmoHybridConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, GatedDelta, Layer, ModelSpec, QkNorm, Rope
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import FULL, POST_NORMS, LlamaNames, attention, read_ffn, read_norm, start
from penstock.families.mamba import MAX_TAPS
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_SIZE, WHERE, finish, read_layer_types, require

LINEAR = "linear_attention"
_EPS = 1e-6
"""Under the root where queries and keys become unit vectors; no field says it."""
_HEAD_EPS = 1e-5
"""Of the norm behind the state, whatever `rms_norm_eps` says."""
_HARMLESS = (
    "linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor",
)  # fmt: skip
_DELTA = {
    "attn_norm": "attention_layer_norm", "ffn_norm": "feedforward_layer_norm", "q": "linear_attn.q_proj",
    "k": "linear_attn.k_proj", "v": "linear_attn.v_proj", "dt": "linear_attn.a_proj", "beta": "linear_attn.b_proj",
    "z": "linear_attn.g_proj", "o": "linear_attn.o_proj", "a_log": "linear_attn.A_log!",
    "head_norm": "linear_attn.o_norm",
}  # fmt: skip


class OlmoHybrid(LlamaNames):
    """The `ModelFamily` of OlmoHybridForCausalLM."""

    name = "olmo_hybrid"
    architectures = ("OlmoHybridForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=65536)
        norm, bias = read_norm(fields), fields.flag("attention_bias")
        require(fields, "hidden_act", "silu")  # it follows the convolutions, too
        mixer = attention(
            heads, rope=_rope(config, fields, heads.head_dim, sizes.max_position), qkv_bias=bias, o_bias=bias,
            qk_norm=QkNorm(over="all", eps=norm.eps),
        )  # fmt: skip
        delta, ffn = _delta(fields, sizes.hidden_size, heads.num_heads), read_ffn(fields)
        kinds = read_layer_types(fields, sizes.num_layers, (LINEAR, FULL))
        if kinds is None:
            every = [FULL if i % 4 == 3 else LINEAR for i in range(sizes.num_layers)]
            kinds = tuple(every if FULL in every else [*every[:-1], FULL])
        layers = [
            Layer(mixer=mixer, ffn=ffn, norm=norm, placement="post")
            if kind == FULL
            else Layer(mixer=delta, ffn=ffn, norm=norm)
            for kind in kinds
        ]
        return finish(fields, self.name, sizes, layers, eos=(100257,), final_norm=norm, harmless=_HARMLESS)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = named(spec, LLAMA_TOP, LLAMA_LAYER | POST_NORMS)
        recurrent = named(spec, {}, LLAMA_LAYER | _DELTA)
        for i, layer in enumerate(spec.layers):
            at = f"layers.{i}."
            if isinstance(layer.mixer, Attention):
                continue
            m = layer.mixer
            assert isinstance(m, GatedDelta)
            out |= {name: place for name, place in recurrent.items() if name.startswith(at)}
            stored = f"model.layers.{i}.linear_attn."
            out[at + "dt.bias"] = stored + "dt_bias"
            for name, rows in (("q", m.keys), ("k", m.keys), ("v", m.values)):
                out[f"{at}{name}.conv"] = Cut(f"{stored}{name}_conv1d.weight", (rows, 1, m.conv))
        return out


def _rope(config: Mapping[str, Any], fields: Fields, head_dim: int, max_position: int) -> Rope | None:
    """None where the theta is null: attention without positions. Where it is absent, transformers has 10000."""
    given = config.get("rope_parameters") or config
    if isinstance(given, Mapping) and "rope_theta" in given and given["rope_theta"] is None:
        fields.raw("rope_parameters"), fields.raw("rope_theta")
        return None
    return read_rope(fields, head_dim, max_position)


def _delta(fields: Fields, hidden_size: int, num_heads: int) -> GatedDelta:
    keys = fields.integer("linear_num_key_heads", high=MAX_SIZE, default=num_heads)
    values = fields.integer("linear_num_value_heads", high=MAX_SIZE, default=num_heads)
    if values % keys:
        raise ModelError(f"{WHERE}: linear_num_key_heads {keys} does not divide linear_num_value_heads {values}")
    key_dim = fields.integer("linear_key_head_dim", high=MAX_SIZE, default=max(1, int(0.75 * hidden_size / keys)))
    return GatedDelta(
        key_heads=keys, value_heads=values, key_dim=key_dim,
        value_dim=fields.integer("linear_value_head_dim", high=MAX_SIZE, default=2 * key_dim),
        conv=fields.integer("linear_conv_kernel_dim", low=2, high=MAX_TAPS, default=4), eps=_HEAD_EPS, norm_eps=_EPS,
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", default=True) else 1.0,
    )  # fmt: skip
