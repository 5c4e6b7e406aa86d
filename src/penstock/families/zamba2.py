"""Zamba 2: Mamba-2 layers, and blocks of attention that several of them share.

A stored hybrid layer becomes two: the shared block, and the Mamba-2 that alone reads what the block added.
Source: Glorioso et al., arXiv 2411.15242, section 2; absent fields as in transformers' Zamba2Config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.mixers.shared_block import SharedBlock
from penstock.core.model_spec import Layer, Mamba2, ModelSpec
from penstock.core.weight_map import Cut, WeightMap
from penstock.families.fields import Fields
from penstock.families.llama import ignored
from penstock.families.llama_like import read_norm
from penstock.families.mamba import MAX_TAPS
from penstock.families.mixed import MAMBA2_LAYER, MIXED_HARMLESS
from penstock.families.naming import LLAMA_TOP, named
from penstock.families.positions import read_rope
from penstock.families.reading import (
    MAX_LAYERS,
    MAX_SIZE,
    WHERE,
    Sizes,
    finish,
    read_activation,
    read_heads,
    read_sizes,
    require,
)
from penstock.formats.files import quoted

_HYBRID = {"hybrid": True, "mamba": False, "mamba2": False, "linear_attention": False}
"""Names of kinds of layers, old and new -> whether a shared block stands in front."""
_STATE_EPS = 1e-5
"""Of the norm behind the state, whatever `rms_norm_eps` says."""
# What follows from other fields, or says how kernels compute.
_HARMLESS = MIXED_HARMLESS | {
    "attention_hidden_size", "attention_head_dim", "head_dim", "mamba_headdim", "kv_channels", "num_query_groups",
    "hybrid_layer_ids", "chunk_size", "use_mem_eff_path", "time_step_max", "time_step_floor", "ffn_hidden_size",
    "use_shared_mlp_adapter", "layer_types", "attention_dropout",
}  # fmt: skip


class Zamba2:
    """The `ModelFamily` of Zamba2ForCausalLM."""

    name = "zamba2"
    architectures = ("Zamba2ForCausalLM",)

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        fields = Fields(config, WHERE)
        sizes = read_sizes(fields, default_positions=4096)
        norm = read_norm(fields, default=1e-5)
        for name in ("add_bias_linear", "use_long_context"):
            require(fields, name, False)
        hybrids = _hybrids(fields, sizes.num_layers)
        mamba, blocks = _mamba(fields, sizes), fields.integer("num_mem_blocks", high=MAX_LAYERS, default=1)
        shared = [_shared(fields, sizes, block, norm.eps) for block in range(blocks)]
        layers: list[Layer] = []
        for is_hybrid in hybrids:
            if is_hybrid:
                used = sum(isinstance(layer.mixer, SharedBlock) for layer in layers)
                layers.append(Layer(mixer=shared[used % blocks], ffn=None, norm=norm, placement="bare"))
            layers.append(Layer(mixer=mamba, ffn=None, norm=norm, forgets=is_hybrid))
        return finish(
            fields, self.name, sizes, layers, bos=(1,), eos=(2,), tie=True, final_norm=norm, harmless=_HARMLESS
        )

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        out = named(spec, LLAMA_TOP | {"final_norm": "model.final_layernorm"}, {})
        first: dict[int, int] = {}  # of each block, the stored layer that uses it first
        stored = used = 0
        for i, layer in enumerate(spec.layers):
            if isinstance(m := layer.mixer, SharedBlock):
                block = f"model.layers.{first.setdefault(m.block, stored)}.shared_transformer."
                out |= _block(m, block, spec.hidden_size)
                out |= {f"layers.{i}.{name}": place for name, place in _own(m, block, used, spec.hidden_size).items()}
                out[f"layers.{i}.out"] = f"model.layers.{stored}.linear.weight"
                used += 1
                continue
            assert isinstance(layer.mixer, Mamba2)
            within = f"model.layers.{stored}." + ("mamba_decoder." if layer.forgets else "")
            out |= {f"layers.{i}.{name}": place for name, place in _recurrent(layer.mixer, within, spec).items()}
            stored += 1
        return out

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return ignored(name, spec)


def _hybrids(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Whether a shared block stands in front of each layer."""
    names = fields.strings("layers_block_type") or fields.strings("layer_types")
    if names is None:
        raise ModelError(f"{WHERE} lacks layers_block_type, the kinds of all layers")
    if len(names) != num_layers:
        raise ModelError(f"{WHERE} gives the kinds of {len(names)} layers, but the model has {num_layers}")
    if unknown := [name for name in names if name not in _HYBRID]:
        raise UnsupportedError(f"{WHERE} has layers of the kind {quoted(unknown[0])}; known: hybrid, mamba")
    return [_HYBRID[name] for name in names]


def _mamba(fields: Fields, sizes: Sizes) -> Mamba2:
    inner = sizes.hidden_size * fields.integer("mamba_expand", high=64, default=2)
    heads = fields.integer("n_mamba_heads", high=MAX_SIZE, default=8)
    groups = fields.integer("mamba_ngroups", high=heads, default=1)
    if inner % heads or heads % groups:
        raise ModelError(f"{WHERE}: n_mamba_heads {heads} and mamba_ngroups {groups} do not divide {inner} channels")
    fields.flag("use_conv_bias")  # the convolution has its bias whatever it says
    return Mamba2(
        num_heads=heads, head_dim=inner // heads, groups=groups, eps=_STATE_EPS,
        state=fields.integer("mamba_d_state", high=MAX_SIZE, default=64),
        conv=fields.integer("mamba_d_conv", low=2, high=MAX_TAPS, default=4),
        dt_min=fields.number("time_step_min", above=-1e-9, default=0.001),
    )  # fmt: skip


def _shared(fields: Fields, sizes: Sizes, block: int, eps: float) -> SharedBlock:
    heads = read_heads(fields, 2 * sizes.hidden_size, head_dim="attention_head_dim")
    rank = fields.integer("adapter_rank", high=MAX_SIZE, default=128)
    adapted, turned = fields.flag("use_shared_attention_adapter"), fields.flag("use_mem_rope")
    rope = read_rope(fields, heads.head_dim, sizes.max_position)
    if heads.num_heads * heads.head_dim != 2 * sizes.hidden_size:
        raise ModelError(f"{WHERE}: heads of shared blocks are twice as wide together as hidden_size")
    if adapted and heads.num_kv_heads != heads.num_heads:
        raise UnsupportedError(f"{WHERE}: adapters of shared attention need as many key-value heads as heads")
    activation = read_activation(fields, default="gelu")
    return SharedBlock(
        num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim,
        rope=rope if turned else None, scale=(heads.head_dim / 2) ** -0.5, block=block,
        ffn_width=fields.integer("intermediate_size", high=MAX_SIZE, default=4 * sizes.hidden_size),
        ffn_activation=cast(Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"], activation), ffn_rank=rank,
        qkv_rank=rank if adapted else 0, eps=eps,
    )  # fmt: skip


def _block(m: SharedBlock, stored: str, e: int) -> dict[str, str | Cut]:
    modules = {
        "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
        "o": "self_attn.o_proj", "ffn_norm": "pre_ff_layernorm", "down": "feed_forward.down_proj",
    }  # fmt: skip
    out: dict[str, str | Cut] = {m.shared + name: f"{stored}{module}.weight" for name, module in modules.items()}
    for part, name in enumerate(("gate", "up")):
        rows = (part * m.ffn_width, (part + 1) * m.ffn_width)
        out[m.shared + name] = Cut(f"{stored}feed_forward.gate_up_proj.weight", (2 * m.ffn_width, e), (rows,))
    return out


def _own(m: SharedBlock, stored: str, use: int, e: int) -> dict[str, str | Cut]:
    """What a layer adds to the block; the block keeps it, by the number of the use."""
    out: dict[str, str | Cut] = {}
    for name in ("q", "k", "v") if m.qkv_rank else ():
        module = f"{stored}self_attn.linear_{name}_adapter_list.{use}"
        out |= {f"{name}_low": f"{module}.0.weight", f"{name}_high": f"{module}.1.weight"}
    module = f"{stored}feed_forward.gate_up_proj_adapter_list.{use}"
    out["ffn_low"] = f"{module}.0.weight"
    for part, name in enumerate(("gate", "up")):
        rows = (part * m.ffn_width, (part + 1) * m.ffn_width)
        out[f"{name}_high"] = Cut(f"{module}.1.weight", (2 * m.ffn_width, m.ffn_rank), (rows,))
    return out


def _recurrent(m: Mamba2, within: str, spec: ModelSpec) -> dict[str, str | Cut]:
    out: dict[str, str | Cut] = {"attn_norm": within + "input_layernorm.weight"}
    for name, shape in m.weight_shapes(spec.hidden_size).items():
        base, bias, _ = name.partition(".bias")
        module = within + MAMBA2_LAYER[base]
        stored = module[:-1] if module.endswith("!") else module + (bias or ".weight")
        out[name] = Cut(stored, (shape[0], 1, shape[1])) if name == "conv" else stored
    return out
