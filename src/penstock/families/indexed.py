"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's shape, where an indexer chooses which tokens a query reads.

In GLM-5.2 most layers read the choice of an earlier one (`indexer_types`). Source: DeepSeek-V3.2, arXiv 2512.02556,
section 2.1; GLM-5, arXiv 2602.15763, section 2; absent fields as in transformers' DeepseekV32Config and
GlmMoeDsaConfig.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Indexer, Latent, Layer, ModelSpec
from penstock.core.weight_map import WeightMap
from penstock.families.deepseek import LATENT, DeepseekV3, latent_spec
from penstock.families.fields import Fields
from penstock.families.mtp import MtpNames
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.reading import MAX_LAYERS, MAX_POSITION, MAX_SIZE, WHERE, read_sizes, require
from penstock.families.sparse import SPARSE_MLP, grouped_router

_INDEXER = {
    "index_q": "self_attn.indexer.wq_b", "index_k": "self_attn.indexer.wk", "index_k_norm": "self_attn.indexer.k_norm",
    "index_weights": "self_attn.indexer.weights_proj",
}  # fmt: skip
FULL, SHARED = "full", "shared"
_KIND = "indexed_attention"


def _own_choice(spec: ModelSpec) -> Layer | None:
    """The last layer that chooses for itself: a head has no earlier one whose choice it could read."""
    choosing = [layer for layer in spec.layers if isinstance(layer.mixer, Latent) and layer.mixer.indexer is not None]
    return choosing[-1] if choosing else None


class DeepseekV32(DeepseekV3):
    """The `ModelFamily` of DeepseekV32ForCausalLM."""

    name = "deepseek_v32"
    architectures = ("DeepseekV32ForCausalLM",)
    mtp = MtpNames(layer=_own_choice)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields({"n_shared_experts": 1, "n_group": 8, "topk_group": 4, **config}, WHERE)
        return _spec(fields, self.name, _every(64, interleaved=False))

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return named(spec, LLAMA_TOP, LLAMA_LAYER | SPARSE_MLP | LATENT | _INDEXER)


class GlmMoeDsa(DeepseekV32):
    """The `ModelFamily` of GlmMoeDsaForCausalLM: GLM-5, 5.1 and 5.2."""

    name = "glm_moe_dsa"
    architectures = ("GlmMoeDsaForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        defaults = {
            "n_shared_experts": 1, "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
        }  # fmt: skip
        # GLM-5.2 gives the size of a head without positions as `head_dim`, which nothing reads.
        read = {name: value for name, value in config.items() if name != "head_dim"}
        fields = Fields({**defaults, **read}, WHERE)
        require(fields, "moe_router_dtype", "float32")
        fields.flag("index_share_for_mtp_iteration")  # a head that drafts again may choose again
        return _spec(fields, self.name, _some)


def _spec(fields: Fields, family: str, indexers: Callable[[Fields, Latent, int], list[Latent]]) -> ModelSpec:
    sizes = read_sizes(fields, default_positions=163840)
    require(fields, "scoring_func", "sigmoid")
    require(fields, "topk_method", "noaux_tc")
    if (kinds := fields.strings("layer_types")) is not None and set(kinds) != {_KIND}:
        raise UnsupportedError(f"{WHERE} has layers of other kinds than {_KIND}, which are not computed")
    _check_dense(fields, sizes.num_layers)
    router = grouped_router(fields, default_groups=1)
    return latent_spec(fields, family, sizes, router, default_dense=3, bos=0, eos=1, indexers=indexers)


def _check_dense(fields: Fields, num_layers: int) -> None:
    """`mlp_layer_types` may only say what `first_k_dense_replace` says."""
    kinds = fields.strings("mlp_layer_types")
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=3)
    if kinds is not None and kinds != ["dense" if i < first else "sparse" for i in range(num_layers)]:
        raise UnsupportedError(f"{WHERE} gives mlp_layer_types other than {first} dense layers and sparse ones then")


def _indexer(fields: Fields, latent: Latent, heads: int, *, interleaved: bool) -> Indexer:
    if latent.q_rank is None or latent.rope is None:
        raise ModelError(f"{WHERE} has an indexer, which reads the query's latent, but no q_lora_rank")
    turned = fields.flag("indexer_rope_interleave", default=interleaved)
    head_dim = fields.integer("index_head_dim", high=MAX_SIZE, default=128)
    if head_dim < latent.rope_dim:
        raise ModelError(f"{WHERE}: index_head_dim {head_dim} is smaller than qk_rope_head_dim {latent.rope_dim}")
    return Indexer(
        num_heads=fields.integer("index_n_heads", high=MAX_SIZE, default=heads), head_dim=head_dim,
        top_k=fields.integer("index_topk", high=MAX_POSITION, default=2048),
        rope=msgspec.structs.replace(latent.rope, interleaved=turned),
    )  # fmt: skip


def _every(heads: int, *, interleaved: bool) -> Callable[[Fields, Latent, int], list[Latent]]:
    def indexers(fields: Fields, latent: Latent, num_layers: int) -> list[Latent]:
        own = _indexer(fields, latent, heads, interleaved=interleaved)
        return [msgspec.structs.replace(latent, indexer=own)] * num_layers

    return indexers


def _some(fields: Fields, latent: Latent, num_layers: int) -> list[Latent]:
    own = msgspec.structs.replace(latent, indexer=_indexer(fields, latent, 32, interleaved=True))
    other = msgspec.structs.replace(latent, reads_choice=True)
    kinds = _types(fields, num_layers)
    if len(kinds) != num_layers or not set(kinds) <= {FULL, SHARED} or kinds[0] != FULL:
        raise ModelError(f"{WHERE} must give {num_layers} indexer_types, {FULL} or {SHARED}, the first of them {FULL}")
    return [own if kind == FULL else other for kind in kinds]


def _types(fields: Fields, num_layers: int) -> list[str]:
    """Which layers have an indexer: a list, a letter each, or every n-th behind the first ones."""
    kinds, pattern = fields.strings("indexer_types"), fields.raw("index_topk_pattern")
    every = fields.integer("index_topk_freq", low=0, high=MAX_LAYERS, default=1) or 1
    first = fields.integer("index_skip_topk_offset", low=0, high=MAX_LAYERS, default=2)
    if kinds is not None:
        return kinds
    if pattern is not None:
        return [{"F": FULL, "S": SHARED}.get(letter, letter) for letter in pattern]
    return [FULL if max(i - first + 1, 0) % every == 0 else SHARED for i in range(num_layers)]
