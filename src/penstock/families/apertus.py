"""Apertus: Llama with q and k normed and a plain feed-forward whose activation, xIELU, has two numbers of its own per
layer. Source: Swiss AI Initiative, arXiv 2509.14233; absent fields as in transformers' ApertusConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import FeedForward, ModelSpec, QkNorm
from penstock.families.llama_like import LlamaNames, attention, read_norm, stack, start
from penstock.families.positions import read_rope
from penstock.families.reading import finish, require
from penstock.families.sparse import read_width

_ROPE = {
    "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


class Apertus(LlamaNames):
    """The `ModelFamily` of ApertusForCausalLM."""

    name = "apertus"
    architectures = ("ApertusForCausalLM",)
    names: Mapping[str, str] = {
        "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm", "act_p": "mlp.act_fn.alpha_p!",
        "act_n": "mlp.act_fn.alpha_n!",
    }  # fmt: skip

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        # Files that say nothing of positions at all mean those of the published models.
        silent = not any(config.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta"))
        begun = {**config, "rope_parameters": _ROPE} if silent else config
        fields, sizes, heads = start(begun, max_position_embeddings=65536)
        for name, value in (("hidden_act", "xielu"), ("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
            require(fields, name, value)
        norm, bias = read_norm(fields, default=1e-5), fields.flag("attention_bias")
        rope = read_rope(fields, heads.head_dim, sizes.max_position, theta=12000000.0)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm(eps=norm.eps))
        ffn = FeedForward(width=read_width(fields, "intermediate_size"), activation="xielu", gated=False)
        layers = stack((mixer,) * sizes.num_layers, ffn, norm)
        return finish(fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """Constants of the activation are stored, too."""
        return super().ignores(name, spec) or name.endswith((".act_fn.beta", ".act_fn.eps"))
