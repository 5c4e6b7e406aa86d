"""GPT-NeoX and Pythia: `GPTNeoXForCausalLM`; ABEJA's Japanese one, almost without biases: `GPTNeoXJapaneseForCausalLM`.

Source: Black et al., GPT-NeoX-20B, arXiv 2204.06745; Biderman et al., Pythia, arXiv 2304.01373; defaults of absent
fields as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.gpt_like import grouped_rows, layer_norm, read_equal_heads, renamed, unneeded
from penstock.families.naming import named
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_SIZE, WHERE, finish, read_activation, read_sizes

_TOP = {"embed": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "o": "attention.dense",
    "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip
_BUFFERS = r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"


class GptNeoX:
    """The `ModelFamily` of GPTNeoXForCausalLM."""

    name = "gpt_neox"
    architectures = ("GPTNeoXForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
        fields = Fields(renamed(config, names), WHERE)
        sizes = read_sizes(fields, default_positions=2048)
        heads = read_equal_heads(fields, sizes.hidden_size, rotary=True)
        rope = read_rope(fields, heads.head_dim, sizes.max_position, partial=0.25)
        bias = fields.flag("attention_bias", default=True)
        norm = layer_norm(fields, "layer_norm_eps")
        layer = Layer(
            mixer=Attention(**heads._asdict(), rope=rope, qkv_bias=bias, o_bias=bias),
            ffn=FeedForward(
                width=fields.integer("intermediate_size", high=MAX_SIZE),
                activation=read_activation(fields, default="gelu"), gated=False, bias=True,
            ),
            norm=norm, parallel=fields.flag("use_parallel_residual", default=True),
        )  # fmt: skip
        return finish(fields, self.name, sizes, [layer] * sizes.num_layers, bos=(0,), eos=(2,), final_norm=norm)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        places = named(spec, _TOP, _LAYER, "gpt_neox.layers")
        for i in range(len(spec.layers)):
            places |= grouped_rows(spec, i, f"gpt_neox.layers.{i}.attention.query_key_value")
        return places

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return unneeded(name, spec, _BUFFERS, "embed_out")


class GptNeoXJapanese:
    """The `ModelFamily` of GPTNeoXJapaneseForCausalLM: halves one after the other, a bias on the last output alone."""

    name = "gpt_neox_japanese"
    architectures = ("GPTNeoXJapaneseForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
        fields = Fields(renamed(config, names), WHERE)
        sizes = read_sizes(fields, default_positions=2048)
        heads = read_equal_heads(fields, sizes.hidden_size, rotary=True)
        rope = read_rope(fields, heads.head_dim, sizes.max_position, partial=1.0)
        norm = layer_norm(fields, "layer_norm_eps")
        layer = Layer(
            mixer=Attention(**heads._asdict(), rope=rope),
            ffn=FeedForward(
                width=sizes.hidden_size * fields.integer("intermediate_multiple_size", high=64, default=4),
                activation=read_activation(fields, default="gelu"), gated=False,
            ),
            norm=norm,
        )  # fmt: skip
        assert isinstance(layer.mixer, Attention)
        last = msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, o_bias=True))
        layers = [*[layer] * (sizes.num_layers - 1), last]
        return finish(
            fields, self.name, sizes, layers, bos=(31996,), eos=(31999,), tie=True, final_norm=norm,
            harmless=("is_decoder",),
        )  # fmt: skip

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        top = {name: stored.replace("gpt_neox.", "gpt_neox_japanese.") for name, stored in _TOP.items()}
        places = named(spec, top, _LAYER, "gpt_neox_japanese.layers")
        for i in range(len(spec.layers)):
            stored = f"gpt_neox_japanese.layers.{i}.attention."
            places |= grouped_rows(spec, i, stored + "query_key_value")
            if f"layers.{i}.o.bias" in places:
                places[f"layers.{i}.o.bias"] = stored + "dense_bias"
        return places

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return unneeded(name, spec, head="embed_out")
