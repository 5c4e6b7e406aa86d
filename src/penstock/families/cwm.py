"""Code World Model: Llama 3 whose layers slide but every fourth, from the first on.

Source: FAIR CodeGen team, CWM, arXiv 2510.02387; absent fields as in transformers' CwmConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import ModelSpec
from penstock.families.llama_like import (
    LlamaNames,
    attention,
    by_kind,
    read_ffn,
    read_kinds,
    read_norm,
    read_window,
    stack,
    start,
)
from penstock.families.positions import read_rope
from penstock.families.reading import finish

_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192,
}  # fmt: skip


class Cwm(LlamaNames):
    """The `ModelFamily` of CwmForCausalLM."""

    name = "cwm"
    architectures = ("CwmForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        said = any(config.get(name) is not None for name in ("rope_parameters", "rope_scaling", "rope_theta"))
        fields, sizes, heads = start(config, **_DEFAULTS | ({} if said else {"rope_parameters": _ROPE}))
        norm, window = read_norm(fields, default=1e-5), read_window(fields)
        kinds = read_kinds(fields, sizes.num_layers, lambda i: i % 4 != 0)
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=1e6)
        mixers = by_kind(attention(heads, rope=rope), kinds, window)
        layers = stack(mixers, read_ffn(fields, bias=fields.flag("mlp_bias")), norm)
        return finish(
            fields, self.name, sizes, layers, bos=(128000,), eos=(128001, 128008, 128009), final_norm=norm
        )  # fmt: skip
