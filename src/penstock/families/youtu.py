"""Youtu-LLM: DeepSeek's latent attention with a dense feed-forward in every layer.

Source: Tencent, Youtu-LLM, arXiv 2512.24618; absent fields as in transformers' YoutuConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.model_spec import ModelSpec
from penstock.families.deepseek import LATENT, read_latent
from penstock.families.fields import Fields
from penstock.families.llama_like import LlamaNames, read_ffn, read_norm, stack
from penstock.families.reading import WHERE, finish, read_sizes

_DEFAULTS: dict[str, Any] = {"q_lora_rank": 1536, "num_attention_heads": 16, "intermediate_size": 6144}


class Youtu(LlamaNames):
    """The `ModelFamily` of YoutuForCausalLM."""

    name = "youtu"
    architectures = ("YoutuForCausalLM",)
    names = LATENT

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields({**_DEFAULTS, **config}, WHERE)
        sizes = read_sizes(fields, default_positions=131072)
        norm = read_norm(fields)
        layers = stack((read_latent(fields, sizes),) * sizes.num_layers, read_ffn(fields), norm)
        return finish(
            fields, self.name, sizes, layers, bos=(128000,), eos=(128001,), tie=True, final_norm=norm,
            harmless=("embedding_initializer_range",),
        )  # fmt: skip
