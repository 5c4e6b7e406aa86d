"""A.X K1: DeepSeek-V3 with a norm behind the experts of a layer.

Released files have no correction of the router's choice, and norms for dense layers that nothing reads. A layer with
experts is two here, since its halves have their norms in different places. Source: SK Telecom, A.X K1 (2026); absent
fields as in transformers' AXK1Config.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from penstock.core.model_spec import Experts, Layer, ModelSpec
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.deepseek import LATENT, latent_spec
from penstock.families.fields import Fields
from penstock.families.llama import ignored
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.reading import WHERE, read_sizes, require
from penstock.families.sparse import SPARSE_MLP, grouped_router

_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "num_attention_heads": 64, "n_routed_experts": 192, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "intermediate_size": 18432, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
_CORRECTED = "corrected by its file"
"""A field of `told`: whether the file has corrections."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


class AxK1:
    """The `ModelFamily` of AXK1ForCausalLM."""

    name = "axk1"
    architectures = ("AXK1ForCausalLM",)

    def told(self, config: Mapping[str, Any], tensors: Collection[str]) -> Mapping[str, Any]:
        """See `SeveralParts.told`."""
        return {**config, _CORRECTED: any(name.endswith("e_score_correction_bias") for name in tensors)}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        given = {**_DEFAULTS, **config}
        corrected = given.pop(_CORRECTED, False)
        fields = Fields(given, WHERE)
        sizes = read_sizes(fields, default_positions=32768)
        for name, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            require(fields, name, value)
        router = msgspec.structs.replace(grouped_router(fields, default_groups=8), correction=bool(corrected))
        whole = latent_spec(fields, self.name, sizes, router, default_dense=1, bos=163691, eos=163691)
        layers: list[Layer] = []
        for layer in whole.layers:
            if isinstance(layer.ffn, Experts):
                halves = {"ffn": None}, {"mixer": None, "placement": "both"}
                layers += [msgspec.structs.replace(layer, **half) for half in halves]
            else:
                layers.append(layer)
        return msgspec.structs.replace(whole, layers=tuple(layers))

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out: dict[str, str | Cut] = {}
        numbers = _numbers(spec)
        names = LLAMA_LAYER | SPARSE_MLP | LATENT | {"ffn_post_norm": "post_mlp_layernorm"}
        for name, place in named(spec, LLAMA_TOP, names).items():
            assert isinstance(place, str)
            found = _LAYER.fullmatch(place)
            out[name] = place if found is None else f"model.layers.{numbers[int(found[1])]}.{found[2]}"
        return out

    def layout(self, spec: ModelSpec, tensors: Collection[str]) -> WeightMap:
        """See `SeveralParts.layout`."""
        return self.weight_map(spec)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        found = _LAYER.fullmatch(name)
        beyond = found is not None and int(found[1]) > _numbers(spec)[-1]
        return beyond or ignored(name, spec) or name.endswith(".post_mlp_layernorm.weight")


def _numbers(spec: ModelSpec) -> list[int]:
    """Of each of our layers the number of the file's."""
    out, number = [], -1
    for layer in spec.layers:
        number += layer.mixer is not None
        out.append(number)
    return out
