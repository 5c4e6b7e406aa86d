"""nanochat: norms without weights, also of the embedding and of rotated q and k; rotations go backwards; squared relu.

Source: Karpathy, nanochat (github.com/karpathy/nanochat, 2025); absent fields as in transformers' NanoChatConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.model_spec import ModelSpec, QkNorm
from penstock.families.llama_like import LlamaNames, attention, read_ffn, read_norm, read_optional, stack, start
from penstock.families.positions import read_rope
from penstock.families.reading import finish


class NanoChat(LlamaNames):
    """The `ModelFamily` of NanoChatForCausalLM."""

    name = "nanochat"
    architectures = ("NanoChatForCausalLM",)
    names: Mapping[str, str] = {"up": "mlp.fc1", "down": "mlp.fc2"}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=2048, final_logit_softcapping=15.0)
        norm, bias = read_norm(fields, weight=False), fields.flag("attention_bias")
        rope = msgspec.structs.replace(read_rope(fields, heads.head_dim, sizes.max_position), backwards=True)
        qk_norm = QkNorm(kind="unit", eps=norm.eps, after_rope=True)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
        layers = stack((mixer,) * sizes.num_layers, read_ffn(fields, default="relu2", gated=False), norm)
        return finish(
            fields, self.name, sizes, layers, bos=(0,), eos=(1,), final_norm=norm, embed_norm=norm,
            logit_soft_cap=read_optional(fields, "final_logit_softcapping"),
        )  # fmt: skip
