"""MiniMax-01: lightning attention in most layers, softmax attention in the others, experts in all.

Source: MiniMax-01, arXiv 2501.08313, section 2; the released files (attn_type_list, layernorm_*_alpha and _beta) and
transformers' MiniMaxConfig (layer_types, *_factor). MiniMax-M2, which has softmax attention alone, is in `mixtral`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.mixers.lightning import Lightning
from penstock.core.model_spec import FeedForward, Layer, ModelSpec, Router
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama_like import FULL, LlamaNames, attention, read_norm, start
from penstock.families.positions import read_rope
from penstock.families.reading import WHERE, finish, read_activation, read_layer_types, require
from penstock.families.sparse import SPARSE_BLOCK, read_experts, read_width

LINEAR = "linear_attention"
_TABLES = frozenset({"slope_rate", "query_decay", "key_decay", "diagonal_decay"})
_STATE_EPS = 1e-6
"""Of the norm behind the state, whatever `rms_norm_eps` says."""


class MiniMax(LlamaNames):
    """The `ModelFamily` of MiniMaxForCausalLM and of the released MiniMaxText01ForCausalLM."""

    name = "minimax"
    architectures = ("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM")
    names = SPARSE_BLOCK | {"z": "self_attn.output_gate", "state_norm": "self_attn.norm"}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields, sizes, heads = start(config, max_position_embeddings=4096 * 32, num_key_value_heads=8)
        norm = read_norm(fields, default=1e-5)
        partial = 1.0
        if "rotary_dim" in fields:  # how the released files say what part of a head is rotated
            partial = fields.integer("rotary_dim", high=heads.head_dim) / heads.head_dim
        soft = attention(
            heads, rope=read_rope(fields, heads.head_dim, sizes.max_position, theta=1e6, partial=partial)
        )  # fmt: skip
        activation = read_activation(fields)
        if activation != "silu":
            raise UnsupportedError(f"{WHERE} sets hidden_act to '{activation}', but this family computes 'silu' only")
        expert = FeedForward(width=read_width(fields, "intermediate_size"), activation=activation)
        ffn = read_experts(
            fields, expert, Router(renormalize=True), number=("num_local_experts", "num_experts"), default_top_k=2
        )
        kinds = _kinds(fields, sizes.num_layers)
        keep, share = _factors(fields, set(kinds))
        for name, value in (("postnorm", True), ("shared_intermediate_size", 0), ("sliding_window", None)):
            require(fields, name, value)
        layers = [
            Layer(
                mixer=soft if kind == FULL else _lightning(heads.num_heads, heads.head_dim, i, sizes.num_layers),
                ffn=ffn, norm=norm, placement="normed", keep=keep, residual_scale=share,
            )
            for i, kind in enumerate(kinds)
        ]  # fmt: skip
        harmless = ("block_size", "shared_moe_mode", "router_jitter_noise", "layernorm_epsilon")
        return finish(fields, self.name, sizes, layers, bos=(1,), eos=(2,), final_norm=norm, harmless=harmless)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """Tables that transformers works out from the config, and stores."""
        return super().ignores(name, spec) or name.rsplit(".", 1)[-1] in _TABLES

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = dict(super().weight_map(spec))
        e = spec.hidden_size
        for i, layer in enumerate(spec.layers):
            m = layer.mixer
            if not isinstance(m, Lightning):
                continue
            stored, view = f"model.layers.{i}.self_attn.", (m.num_heads, 3, m.head_dim, e)
            for part, name in enumerate("qkv"):
                out[f"layers.{i}.{name}"] = Cut(
                    stored + "qkv_proj.weight", (3 * m.num_heads * m.head_dim, e), ((0, m.num_heads), part), view=view
                )
            out[f"layers.{i}.o"] = stored + "out_proj.weight"
        return out


def _lightning(num_heads: int, head_dim: int, index: int, num_layers: int) -> Lightning:
    """Slopes as of ALiBi for so many heads, flatter with depth. Source: the released modelling file."""
    factor = 1 - index / (num_layers - 1 + 1e-5) + 1e-5
    base = 2.0 ** (-8 / num_heads)
    decay = tuple(2.718281828459045 ** (-(base ** (head + 1)) * factor) for head in range(num_heads))
    return Lightning(num_heads=num_heads, head_dim=head_dim, decay=decay, eps=_STATE_EPS)


def _kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Of every layer; by default they alternate, as in transformers."""
    released = fields.integers("attn_type_list", low=0, high=1)
    if released is not None:
        if len(released) != num_layers:
            raise ModelError(f"{WHERE} gives attn_type_list for {len(released)} layers, but the model has {num_layers}")
        return tuple(FULL if kind else LINEAR for kind in released)
    kinds = read_layer_types(fields, num_layers, (FULL, LINEAR))
    return kinds or tuple(FULL if i % 2 == 0 else LINEAR for i in range(num_layers))


def _factors(fields: Fields, kinds: set[str]) -> tuple[float, float]:
    """What the residual and what a half adds are multiplied by: the same for all halves here."""
    halves = ["mlp", *(["full_attn"] if FULL in kinds else []), *(["linear_attn"] if LINEAR in kinds else [])]
    released = {"mlp": "layernorm_mlp", "full_attn": "layernorm_full_attention",
                "linear_attn": "layernorm_linear_attention"}  # fmt: skip
    found = []
    for greek in ("alpha", "beta"):
        given = set()
        for half, other in released.items():
            ours, theirs = f"{half}_{greek}_factor", f"{other}_{greek}"
            value = fields.number(theirs if theirs in fields else ours, default=1.0)
            if half in halves:
                given.add(value)
        if len(given) > 1:
            raise UnsupportedError(
                f"{WHERE} multiplies residuals of its halves by different numbers ({greek}: "
                f"{', '.join(map(str, sorted(given)))}), and this family computes one for all"
            )
        found.append(given.pop())
    return found[0], found[1]
