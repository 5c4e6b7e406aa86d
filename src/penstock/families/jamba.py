"""Jamba: Mamba with normed parameters in most layers, attention without positions in some, experts in every other one;
and Falcon Mamba, whose layers are such Mambas alone.

Source: Lieber et al., Jamba, arXiv 2403.19887; Zuo et al., Falcon Mamba, arXiv 2410.05355; absent fields as in
transformers' JambaConfig and FalconMambaConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.model_spec import FeedForward, Layer, Mamba, ModelSpec, Router
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, start
from penstock.families.mamba import MAX_TAPS, MambaFamily
from penstock.families.mixed import MIXED_HARMLESS, read_expanded, with_mixers
from penstock.families.naming import LLAMA_TOP
from penstock.families.reading import MAX_LAYERS, MAX_SIZE, finish, read_activation, require
from penstock.families.sparse import read_experts

_MAMBA = {
    "in": "mamba.in_proj", "conv": "mamba.conv1d", "x": "mamba.x_proj", "dt": "mamba.dt_proj",
    "a_log": "mamba.A_log!", "d": "mamba.D!", "o": "mamba.out_proj", "dt_norm": "mamba.dt_layernorm",
    "b_norm": "mamba.b_layernorm", "c_norm": "mamba.c_layernorm",
}  # fmt: skip
_FEED_FORWARD = {
    f"{prefix}{part}": f"feed_forward.{stored}{part}_proj"
    for prefix, stored in (("", ""), ("experts.*.", "experts.*.")) for part in ("gate", "up", "down")
}  # fmt: skip


class Jamba(LlamaNames):
    """The `ModelFamily` of JambaForCausalLM."""

    name = "jamba"
    architectures = ("JambaForCausalLM",)
    top = LLAMA_TOP | {"final_norm": "model.final_layernorm"}
    names = _FEED_FORWARD | {"ffn_norm": "pre_ff_layernorm", "router": "feed_forward.router"}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=262144, num_key_value_heads=8)
        norm = read_norm(fields)
        mamba, full = self._mamba(fields, sizes.hidden_size, norm.eps), attention(heads)
        dense = read_ffn(fields)
        ffn = None
        if fields.integer("num_experts", high=MAX_LAYERS, default=16) > 1:
            expert = FeedForward(width=dense.width, activation=read_activation(fields))
            config_of = Fields({"num_experts": 16, **config}, "config.json")
            ffn = read_experts(
                config_of, expert, Router(), number=("num_experts", "num_local_experts"), default_top_k=2
            )
        attends, sparse = _every(fields, "attn_layer", 8, 4), _every(fields, "expert_layer", 2, 1)
        layers = [
            Layer(
                mixer=full if i % attends[0] == attends[1] else mamba,
                ffn=ffn if ffn is not None and i % sparse[0] == sparse[1] else dense, norm=norm,
            )
            for i in range(sizes.num_layers)
        ]  # fmt: skip
        require(fields, "sliding_window", None)
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm,
            harmless=MIXED_HARMLESS | {"num_experts_per_tok", "num_local_experts", "mamba_inner_layernorms",
                                       "use_positional_embeddings", "layer_types", "layers_block_type"},
        )  # fmt: skip

    def _mamba(self, fields: Fields, hidden_size: int, eps: float) -> Mamba:
        rank = -(-hidden_size // 16)
        if fields.raw("mamba_dt_rank") != "auto":
            rank = fields.integer("mamba_dt_rank", high=MAX_SIZE, default=rank)
        return Mamba(
            inner=read_expanded(fields, hidden_size),
            state=fields.integer("mamba_d_state", high=MAX_SIZE, default=16),
            conv=fields.integer("mamba_d_conv", low=2, high=MAX_TAPS, default=4), dt_rank=rank,
            conv_bias=fields.flag("mamba_conv_bias", default=True), proj_bias=fields.flag("mamba_proj_bias"),
            norm_eps=eps,
        )  # fmt: skip

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return with_mixers(spec, super().weight_map(spec), _MAMBA)


def _every(fields: Fields, name: str, period: int, offset: int) -> tuple[int, int]:
    """Period and offset of the layers that have something."""
    n = fields.integer(f"{name}_period", high=MAX_LAYERS, default=period)
    return n, fields.integer(f"{name}_offset", low=0, high=n - 1, default=min(offset, n - 1))


class FalconMamba(MambaFamily):
    """The `ModelFamily` of FalconMambaForCausalLM: the norms have no weights."""

    name = "falcon_mamba"
    architectures = ("FalconMambaForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        eps = Fields(config, "config.json").number("mixer_rms_eps", default=1e-6)
        own = {key: value for key, value in config.items() if key != "mixer_rms_eps"}
        spec = super().spec({"tie_word_embeddings": True, **own})
        layers = []
        for layer in spec.layers:
            assert isinstance(layer.mixer, Mamba)
            mixer = msgspec.structs.replace(layer.mixer, norm_eps=eps, norm_weights=False)
            layers.append(msgspec.structs.replace(layer, mixer=mixer))
        return msgspec.structs.replace(spec, layers=tuple(layers))
