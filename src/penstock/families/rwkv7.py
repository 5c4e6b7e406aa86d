"""RWKV-7 in the layout of flash-linear-attention: `RWKV7ForCausalLM`, whose fields GGUF files are put into, too.

Source: Peng et al., arXiv 2503.14456, section 4; the fields and tensors of the published rwkv7-*-world checkpoints, as
github.com/ggml-org/llama.cpp reads them (conversion/rwkv.py). transformers has no class for it, so that its parity is
that of its rwkv.cpp files (`families.rwkv_cpp`) and, in GGUF, llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError
from penstock.core.model_spec import ChannelMix, Layer, ModelSpec, Norm, Rwkv7
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.naming import named
from penstock.families.reading import MAX_LAYERS, MAX_SIZE, UNLIMITED_POSITION, WHERE, Sizes, finish, require

# Kernels and their precision, how training cut texts, and the widths that follow from others.
_HARMLESS = frozenset({
    "attn_mode", "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp", "residual_in_fp32",
    "max_position_embeddings", "hidden_ratio", "key_dim", "value_dim", "num_heads",
})  # fmt: skip
_TOP = {
    "embed": "model.embeddings", "embed_norm": "model.layers.0.pre_norm", "final_norm": "model.norm",
    "lm_head": "lm_head",
}  # fmt: skip
_LOW_RANK = {"w": "w_lora", "a": "a_lora", "v": "v_lora", "g": "g_lora"}
_LAYER = {
    "attn_norm": "attn_norm", "ffn_norm": "ffn_norm", "r": "attn.r_proj", "k": "attn.k_proj", "v": "attn.v_proj",
    "o": "attn.o_proj", "head_norm": "attn.g_norm", "k_k": "attn.k_k!", "k_a": "attn.k_a!",
    "ffn_mix_k": "ffn.x_k!", "up": "ffn.key", "down": "ffn.value",
    **{f"{part}0": f"attn.{low}.lora.2.bias!" for part, low in _LOW_RANK.items() if part != "g"},
    **{f"{part}1": f"attn.{low}.lora.0" for part, low in _LOW_RANK.items()},
    **{f"{part}2": f"attn.{low}.lora.2" for part, low in _LOW_RANK.items()},
}  # fmt: skip
_HEAD_EPS = 64e-5
"""Of the norm over each head, whatever the config says of the others."""


class Rwkv7Family:
    """The `ModelFamily` of RWKV7ForCausalLM."""

    name = "rwkv7"
    architectures = ("RWKV7ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = Sizes(
            vocab_size=fields.integer("vocab_size", high=MAX_SIZE),
            hidden_size=fields.integer("hidden_size", high=MAX_SIZE),
            num_layers=fields.integer("num_hidden_layers", high=MAX_LAYERS),
            max_position=UNLIMITED_POSITION,
        )
        e = sizes.hidden_size
        for name, only in (("hidden_act", "sqrelu"), ("norm_first", True), ("norm_bias", True), ("attn", None)):
            require(fields, name, only)
        head_dim = fields.integer("head_dim", high=e, default=64)
        if e % head_dim:
            raise ModelError(f"{WHERE}: head_dim {head_dim} does not divide the hidden size {e}")
        decay, rate, value, gate = (
            fields.integer(f"{name}_low_rank_dim", high=MAX_SIZE, default=_rank(e, *by))
            for name, by in (("decay", (0.5, 1.8)), ("a", (0.5, 1.8)), ("v", (0.5, 1.3)), ("gate", (0.8, 0.6)))
        )
        norm = Norm(kind="layer", eps=fields.number("norm_eps", default=1e-5))
        ffn = ChannelMix(version=7, width=fields.integer("intermediate_size", high=MAX_SIZE, default=4 * e))
        layers = [
            Layer(
                mixer=Rwkv7(
                    num_heads=e // head_dim, head_dim=head_dim, decay_rank=decay, rate_rank=rate, gate_rank=gate,
                    value_rank=value if i else 0, eps=_HEAD_EPS, first=i == 0,
                ),
                ffn=ffn, norm=norm,
            )
            for i in range(sizes.num_layers)
        ]  # fmt: skip
        return finish(
            fields, self.name, sizes, layers, harmless=_HARMLESS, bos=(1,), eos=(2,), embed_norm=norm, final_norm=norm
        )

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out: dict[str, str | Cut] = named(spec, _TOP, _LAYER)
        for i, layer in enumerate(spec.layers):
            assert isinstance(layer.mixer, Rwkv7)
            at, stored = f"layers.{i}.", f"model.layers.{i}.attn."
            for part in "rwkvag":
                out[f"{at}mix_{part}"] = Cut(f"{stored}x_{part}", (1, 1, spec.hidden_size))
            out[f"{at}r_k"] = Cut(f"{stored}r_k", (layer.mixer.num_heads, layer.mixer.head_dim))
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """The first layer has no value residual; some files have one that is not used."""
        tied = spec.tie_embeddings and name == "lm_head.weight"
        return tied or name.startswith("model.layers.0.attn.v_lora.")


def _rank(e: int, exponent: float, factor: float) -> int:
    """Of a low-rank part that the config leaves open."""
    return max(1, round(float(e**exponent * factor / 32))) * 32
