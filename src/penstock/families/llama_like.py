"""What the families around Llama share: small readers with every choice spelt out by the family that calls them.

A family says its defaults, its mixer and its norms; nothing here knows a family's name, and no family inherits another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.base.errors import ModelError
from penstock.core.model_spec import Attention, FeedForward, Layer, Mixer, ModelSpec, Norm, Rope
from penstock.core.weight_map import WeightMap
from penstock.families.fields import Fields
from penstock.families.llama import ignored
from penstock.families.naming import LLAMA_LAYER, LLAMA_TOP, fused_rows, named
from penstock.families.reading import (
    MAX_POSITION,
    MAX_SIZE,
    WHERE,
    Heads,
    Sizes,
    read_activation,
    read_heads,
    read_layer_types,
    read_sizes,
)

SLIDING, FULL = "sliding_attention", "full_attention"
POST_NORMS = {"attn_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
"""Names of the only norms of a layer that norms what its halves give."""
SANDWICH_NORMS = {
    "attn_post_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
"""Names where a layer norms before and after each half."""


class LlamaNames:
    """Weight names as Llama's, but for what a family puts into `top` and `names` (see `naming.named`)."""

    top: Mapping[str, str] = LLAMA_TOP
    names: Mapping[str, str] = {}
    prefix = "model.layers"

    def weight_map(self, spec: ModelSpec) -> WeightMap:
        return named(spec, self.top, LLAMA_LAYER | dict(self.names), self.prefix)

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        return ignored(name, spec)


class Start(NamedTuple):
    """What every config.json begins with."""

    fields: Fields
    sizes: Sizes
    heads: Heads


def start(config: Mapping[str, Any], **defaults: Any) -> Start:
    """Fields, sizes and heads. `defaults`: the family's values of fields that are absent; a null stays a null."""
    fields = Fields({**defaults, **config}, WHERE)
    sizes = read_sizes(fields)
    return Start(fields, sizes, read_heads(fields, sizes.hidden_size))


def attention(heads: Heads, **more: Any) -> Attention:
    return Attention(num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, **more)


def read_norm(fields: Fields, name: str = "rms_norm_eps", default: float = 1e-6, **more: Any) -> Norm:
    return Norm(eps=fields.number(name, default=default), **more)


def read_ffn(
    fields: Fields, *, act: str = "hidden_act", default: str = "silu", gated: bool = True, bias: bool = False
) -> FeedForward:
    return FeedForward(
        width=fields.integer("intermediate_size", high=MAX_SIZE), activation=read_activation(fields, act, default),
        gated=gated, bias=bias,
    )  # fmt: skip


def read_optional(fields: Fields, name: str) -> float | None:
    """A number above 0, or None for null."""
    return fields.number(name) if name in fields else None


def read_window(fields: Fields) -> int | None:
    return fields.integer("sliding_window", high=MAX_POSITION) if "sliding_window" in fields else None


def read_kinds(fields: Fields, num_layers: int, slides: Callable[[int], bool]) -> tuple[str, ...]:
    """`layer_types`, or where they are absent what `slides` says about layer 0, 1, ..."""
    kinds = read_layer_types(fields, num_layers, (SLIDING, FULL))
    return kinds or tuple(SLIDING if slides(i) else FULL for i in range(num_layers))


def every(fields: Fields, name: str, default: int | None = None) -> Callable[[int], bool]:
    """For `read_kinds`: all layers slide but every n-th, n being the field `name`."""
    n = fields.integer(name, high=MAX_POSITION, default=default)
    return lambda i: (i + 1) % n != 0


def qwen_kinds(fields: Fields, num_layers: int, window: int | None) -> tuple[str, ...]:
    """Qwen's layers slide from `max_window_layers` on, if windows are used at all."""
    used = fields.flag("use_sliding_window") and window is not None
    first = fields.integer("max_window_layers", low=0, high=MAX_POSITION)
    kinds = read_kinds(fields, num_layers, lambda i: used and i >= first)
    check_use(fields, kinds)
    return kinds


def check_use(fields: Fields, kinds: Sequence[str]) -> None:
    """Raises ModelError if layers slide though `use_sliding_window` is off."""
    if SLIDING in kinds and not fields.flag("use_sliding_window"):
        raise ModelError(f"{WHERE} has layers of the kind {SLIDING}, but use_sliding_window is off")


def by_kind(
    mixer: Attention, kinds: Sequence[str], window: int | None, ropes: Mapping[str, Rope | None] | None = None
) -> tuple[Attention, ...]:
    """`mixer` for every layer: with the window where it slides, with the rope of its kind where `ropes` has one each.

    Raises ModelError if a layer slides without a window.
    """
    if SLIDING in kinds and window is None:
        raise ModelError(f"{WHERE} has layers of the kind {SLIDING}, but no sliding_window")
    variants = {
        kind: msgspec.structs.replace(
            mixer, window=window if kind == SLIDING else None, rope=mixer.rope if ropes is None else ropes[kind]
        )
        for kind in sorted(set(kinds))
    }
    return tuple(variants[kind] for kind in kinds)


def stack(mixers: Sequence[Mixer], ffn: FeedForward, norm: Norm, **more: Any) -> tuple[Layer, ...]:
    """One layer per mixer; `more`: further fields of Layer."""
    made = {mixer: Layer(mixer=mixer, ffn=ffn, norm=norm, **more) for mixer in dict.fromkeys(mixers)}
    return tuple(made[mixer] for mixer in mixers)


def with_fused(plain: WeightMap, spec: ModelSpec, *, qkv: str | None = None, gate_up: str | None = None) -> WeightMap:
    """`plain`, with the parts of fused projections as rows of them: q, k, v of `qkv`, gate and up of `gate_up`.

    Both are module names inside a layer.
    """
    out = dict(plain)
    for i, layer in enumerate(spec.layers):
        mixer, ffn = layer.mixer, layer.ffn
        assert isinstance(mixer, Attention)
        assert isinstance(ffn, FeedForward)
        if qkv is not None:
            rows = mixer.num_kv_heads * mixer.head_dim
            parts = {"q": mixer.num_heads * mixer.head_dim, "k": rows, "v": rows}
            out |= fused_rows(spec, i, f"model.layers.{i}.{qkv}", parts, spec.hidden_size)
        if gate_up is not None:
            parts = {"gate": ffn.width, "up": ffn.width}
            out |= fused_rows(spec, i, f"model.layers.{i}.{gate_up}", parts, spec.hidden_size)
    return out
