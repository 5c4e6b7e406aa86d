"""Models made smaller by architecture search: `DeciLMForCausalLM`, Llama with layers that differ.

DeciLM-6B and 7B (model_type deci) have a number of kv heads for each layer. In Nemotron's successors (nemotron-nas) a
block may lack its attention or its feed-forward, and each has its own number of kv heads and width.
Source: Deci, DeciLM-6B (2023) and its published configuration code; Bercovich et al., Puzzle, arXiv 2411.19146;
Llama-Nemotron, arXiv 2505.00949, section 2; rounding of widths as in the configuration code published with the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Activation, Attention, FeedForward, Layer, ModelSpec, Norm, Rope
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.llama import ignored
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, named
from penstock.families.positions import read_rope
from penstock.families.reading import MAX_SIZE, WHERE, finish, read_activation, read_sizes, require

_WIDTH_STEP = 256
# Which of its forms of attention the published code takes.
_ATTENTION_CODE = (
    "naive_attention_prefill", "naive_attention_decode_batched", "naive_attention_decode_single", "num_key_value_heads",
)  # fmt: skip


class Deci:
    """The `ModelFamily` of DeciLMForCausalLM (model_type deci or nemotron-nas)."""

    name = "nemotron-nas"
    architectures = ("DeciLMForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=2048)
        e = sizes.hidden_size
        heads = fields.integer("num_attention_heads", high=MAX_SIZE)
        if e % (2 * heads):
            raise ModelError(f"{WHERE}: num_attention_heads {heads} leaves no whole pairs of hidden_size {e}")
        rope = read_rope(fields, e // heads, sizes.max_position)
        activation, norm = read_activation(fields), Norm(eps=fields.number("rms_norm_eps", default=1e-6))
        for name in ("attention_bias", "mlp_bias"):
            require(fields, name, False)
        if "num_key_value_heads_per_layer" in fields:
            layers = _layers(fields, sizes.num_layers, heads, e // heads, rope, activation, norm)
            return finish(
                fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm, harmless=_ATTENTION_CODE
            )  # fmt: skip
        for name in ("intermediate_size", "num_key_value_heads"):
            require(fields, name, None)  # every block has its own
        blocks = fields.raw("block_configs")
        if not isinstance(blocks, list) or len(blocks) != sizes.num_layers:
            raise ModelError(
                f"{WHERE} must give block_configs as a list of num_hidden_layers {sizes.num_layers} objects"
            )
        layers = []
        for i, block in enumerate(blocks):
            where = f"block_configs[{i}] of {WHERE}"
            halves = Fields(block if isinstance(block, dict) else {}, where)
            mixer, ffn = _mixer(halves, heads, e // heads, rope), _feed_forward(halves, e, activation)
            halves.refuse_unread()
            layers.append(Layer(mixer=mixer, ffn=ffn, norm=norm))
        return finish(fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm)

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return named(spec, LLAMA_TOP, LLAMA_LAYER)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return ignored(name, spec)


def _layers(
    fields: Fields, num_layers: int, heads: int, head_dim: int, rope: Rope, activation: Activation, norm: Norm
) -> list[Layer]:  # fmt: skip
    """Of DeciLM: they differ in their kv heads alone."""
    groups = fields.integers("num_key_value_heads_per_layer", low=1, high=heads) or []
    if len(groups) != num_layers:
        raise ModelError(
            f"{WHERE} gives num_key_value_heads_per_layer for {len(groups)} layers, but the model has {num_layers}"
        )
    odd = next((g for g in groups if heads % g), None)
    if odd is not None:
        raise ModelError(f"{WHERE}: {odd} of num_key_value_heads_per_layer does not divide {heads} query heads")
    ffn = FeedForward(width=fields.integer("intermediate_size", high=MAX_SIZE), activation=activation)
    return [
        Layer(mixer=Attention(num_heads=heads, num_kv_heads=g, head_dim=head_dim, rope=rope), ffn=ffn, norm=norm)
        for g in groups
    ]


def _half(block: Fields, name: str) -> Fields | None:
    """One half's settings; None if the block goes without it."""
    half = block.section(name)
    if half is None:
        raise ModelError(f"{WHERE}: a block of block_configs lacks {name}")
    if half.flag("replace_with_linear"):
        raise UnsupportedError(f"{WHERE} replaces the {name} of a block by one product, which is not computed")
    return None if half.flag("no_op") else half


def _mixer(block: Fields, heads: int, head_dim: int, rope: Rope) -> Attention | None:
    half = _half(block, "attention")
    if half is None:
        return None
    per_group = half.integer("n_heads_in_group", high=heads)
    if heads % per_group:
        raise ModelError(f"{WHERE}: n_heads_in_group {per_group} does not divide num_attention_heads {heads}")
    half.refuse_unread()
    return Attention(num_heads=heads, num_kv_heads=heads // per_group, head_dim=head_dim, rope=rope)


def _feed_forward(block: Fields, e: int, activation: Activation) -> FeedForward | None:
    half = _half(block, "ffn")
    if half is None:
        return None
    width = int(2 * half.number("ffn_mult") * e / 3)
    half.refuse_unread()
    return FeedForward(width=-(-width // _WIDTH_STEP) * _WIDTH_STEP, activation=activation)
