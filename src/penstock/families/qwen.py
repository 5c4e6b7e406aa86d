"""Dense Qwen: Qwen2, Qwen2.5 and Qwen3; MiMo, which is Qwen2 with layers for multi-token prediction.

Source: Yang et al., arXiv 2407.10671 and 2505.09388; Xiaomi, MiMo, arXiv 2505.07608; defaults of absent fields as in
transformers' Qwen2Config and Qwen3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import ModelSpec, QkNorm
from penstock.families.llama_like import (
    LlamaNames,
    Start,
    attention,
    by_kind,
    qwen_kinds,
    read_ffn,
    read_norm,
    read_window,
    stack,
    start,
)
from penstock.families.mtp import MTP_LAYERS
from penstock.families.positions import read_rope
from penstock.families.reading import finish, require

_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip


class Qwen2(LlamaNames):
    """The `ModelFamily` of Qwen2ForCausalLM: biases on q, k and v."""

    name = "qwen2"
    architectures = ("Qwen2ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        return _biased(self.name, start(config, **_DEFAULTS))


class MiMo(LlamaNames):
    """The `ModelFamily` of MiMoForCausalLM. Its prediction layers may draft (`families.mtp`)."""

    name = "mimo"
    architectures = ("MiMoForCausalLM",)
    mtp = MTP_LAYERS

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        begun = start(config, **_DEFAULTS)
        require(begun.fields, "attention_bias", True)
        return _biased(self.name, begun, harmless=("num_nextn_predict_layers",))

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return super().ignores(name, spec) or name.startswith("model.mtp_layers.")


class Qwen3(LlamaNames):
    """The `ModelFamily` of Qwen3ForCausalLM: q and k are normed, head by head."""

    name = "qwen3"
    architectures = ("Qwen3ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, head_dim=128, **_DEFAULTS)
        norm, bias, window = read_norm(fields), fields.flag("attention_bias"), read_window(fields)
        rope = read_rope(fields, heads.head_dim, sizes.max_position)
        mixer = attention(heads, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm(eps=norm.eps))
        mixers = by_kind(mixer, qwen_kinds(fields, sizes.num_layers, window), window)
        return finish(fields, self.name, sizes, stack(mixers, read_ffn(fields), norm), final_norm=norm)


def _biased(family: str, begun: Start, harmless: tuple[str, ...] = ()) -> ModelSpec:
    fields, sizes, heads = begun
    norm, window = read_norm(fields), read_window(fields)
    mixer = attention(heads, rope=read_rope(fields, heads.head_dim, sizes.max_position), qkv_bias=True)
    mixers = by_kind(mixer, qwen_kinds(fields, sizes.num_layers, window), window)
    layers = stack(mixers, read_ffn(fields), norm)
    return finish(fields, family, sizes, layers, final_norm=norm, harmless=harmless)
