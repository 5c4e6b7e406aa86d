"""MiniMax-M3 (text): grouped-query attention over blocks that an indexer chooses, and sparse experts by sigmoid scores,
in all layers but the first ones.

Source: MiniMax, MiniMax-M3 (2026): the released config.json; transformers' MiniMaxM3VLTextConfig, its classes and its
names of released tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import BlockAttention, FeedForward, Layer, ModelSpec, Norm, QkNorm, Router
from penstock.families.fields import Fields
from penstock.families.llama_like import FULL, LlamaNames, attention, start
from penstock.families.mixtral import beyond
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_POSITION, MAX_SIZE, WHERE, Heads, finish, require
from penstock.families.sparse import SPARSE_BLOCK, read_experts, read_width

SPARSE = "minimax_m3_sparse"
_NAMES = SPARSE_BLOCK | {
    **{f"index_{part}": f"self_attn.index_{part}_proj" for part in "qk"},
    **{f"index_{part}_norm": f"self_attn.index_{part}_norm" for part in "qk"},
    **{f"shared.{part}": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_ONLY = {
    "attention_output_gate": False, "n_shared_experts": 1, "qk_norm_type": "per_head", "scoring_func": "sigmoid",
    "swiglu_alpha": 1.702, "use_gemma_norm": True, "use_qk_norm": True, "use_routing_bias": True,
}  # fmt: skip
_ONLY_OF_BLOCKS = {"sparse_init_block": 0, "sparse_score_type": "max", "use_sparse_attention": True}
_BLOCKS = {  # as transformers has it, as the released file has it, by default
    "index_n_heads": ("sparse_num_index_heads", 4), "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128), "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 524288, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3072,
    "num_local_experts": 128, "rotary_dim": 64,
}  # fmt: skip


class MiniMaxM3(LlamaNames):
    """The `ModelFamily` of MiniMaxM3ForCausalLM and MiniMaxM3VLForCausalLM."""

    name = "minimax_m3"
    architectures = ("MiniMaxM3ForCausalLM", "MiniMaxM3VLForCausalLM")
    names = _NAMES

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, **_DEFAULTS)
        for name, value in _ONLY.items():
            require(fields, name, value)
        if fields.string("hidden_act", default="swigluoai") not in (
            "swigluoai",
            "silu",
        ):  # transformers says the second
            raise UnsupportedError(f"{WHERE} sets hidden_act to another than 'swigluoai', which is what is computed")
        norm = Norm(eps=fields.number("rms_norm_eps", default=1e-6), offset=1.0)
        blocks = fields.section("sparse_attention_config")
        kinds = _kinds(fields, blocks, sizes.num_layers)
        plain, chosen = _mixers(fields, blocks, heads, sizes.max_position, QkNorm(eps=norm.eps, offset=1.0))
        if blocks is not None:
            blocks.refuse_unread(frozenset())
        limit = fields.number("swiglu_limit", default=7.0)

        def gated(width: int) -> FeedForward:
            return FeedForward(width=width, activation="swiglu_clamped", limit=limit)

        wide = gated(read_width(fields, "dense_intermediate_size", 12288))
        width = read_width(fields, "moe_intermediate_size", read_width(fields, "intermediate_size"))
        router = Router(
            score="sigmoid", renormalize=True, correction=True,
            scale=fields.number("routed_scaling_factor", default=2.0),
        )  # fmt: skip
        ffn = read_experts(
            fields, gated(width), router, number=("num_local_experts",), default_top_k=4,
            shared=gated(read_width(fields, "shared_intermediate_size", 3072)),
        )  # fmt: skip
        layers = [
            Layer(mixer=plain if kind == FULL else chosen, ffn=ffn if sparse else wide, norm=norm)
            for kind, sparse in zip(kinds, _sparse(fields, sizes.num_layers), strict=True)
        ]
        extra = ("num_mtp_modules", "num_nextn_predict_layers", "first_k_dense_replace", "intermediate_size")
        return finish(
            fields, self.name, sizes, layers, bos=(200034,), eos=(200020,), final_norm=norm, harmless=extra
        )  # fmt: skip

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """Heads for multi-token prediction, whose layout no published code says."""
        return super().ignores(name, spec) or beyond(name, spec) or name.startswith(("model.mtp.", "mtp."))


def _mixers(fields: Fields, blocks: Fields | None, heads: Heads, longest: int, norm: QkNorm) -> tuple[Any, Any]:
    """Of a layer that sees all, and of one that chooses blocks."""
    rotated = fields.integer("rotary_dim", high=heads.head_dim)
    part = fields.number("partial_rotary_factor", default=rotated / heads.head_dim)
    if int(heads.head_dim * part) != rotated:
        raise ModelError(f"{WHERE} gives rotary_dim {rotated} and a partial_rotary_factor that does not go with it")
    rope = read_rope(fields, heads.head_dim, longest, theta=5e6, partial=part)
    sizes = {}
    for name, (released, default) in _BLOCKS.items():
        given = default if blocks is None else blocks.integer(released, high=MAX_SIZE, default=default)
        sizes[name] = fields.integer(name, high=MAX_POSITION, default=given)
    if sizes["index_n_heads"] != heads.num_kv_heads:
        raise UnsupportedError(f"{WHERE} does not choose blocks once for each kv head (index_n_heads)")
    if sizes["index_head_dim"] < rope.dim:
        raise UnsupportedError(f"{WHERE} rotates more than an indexer's head has (index_head_dim)")
    if sizes["index_local_blocks"] > sizes["index_topk_blocks"]:
        raise ModelError(f"{WHERE} reads more newest blocks than blocks (index_local_blocks)")
    return attention(heads, rope=rope, qk_norm=norm), BlockAttention(
        num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, rope=rope, norm=norm,
        index_dim=sizes["index_head_dim"], block=sizes["index_block_size"], top_k=sizes["index_topk_blocks"],
        local=sizes["index_local_blocks"],
    )  # fmt: skip


def _kinds(fields: Fields, blocks: Fields | None, num_layers: int) -> list[str]:
    """The kind of every layer; by default all see everything."""
    kinds = fields.strings("layer_types")
    if blocks is not None:
        for name, value in _ONLY_OF_BLOCKS.items():
            require(blocks, name, value)
        flags = blocks.integers("sparse_attention_freq", low=0, high=1)
        if flags is not None and kinds is None:
            kinds = [SPARSE if flag else FULL for flag in flags]
    kinds = [FULL] * num_layers if kinds is None else kinds
    if len(kinds) != num_layers or set(kinds) - {FULL, SPARSE}:
        raise ModelError(f"{WHERE} says of other than its {num_layers} layers whether they are {FULL} or {SPARSE}")
    # What else an indexer may give a layer: a value of its own.
    if blocks is not None:
        require(blocks, "sparse_disable_index_value", [int(kind == SPARSE) for kind in kinds])
    return kinds


def _sparse(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have experts; by default all."""
    kinds, flags = fields.strings("mlp_layer_types"), fields.integers("moe_layer_freq", low=0, high=1)
    if kinds is None:
        kinds = ["sparse" if flag else "dense" for flag in flags] if flags is not None else ["sparse"] * num_layers
    if len(kinds) != num_layers or set(kinds) - {"sparse", "dense"}:
        raise ModelError(f"{WHERE} says of other than its {num_layers} layers whether they are sparse or dense")
    return [kind == "sparse" for kind in kinds]
