"""The operations of RWKV's time mixing and channel mixing."""

from __future__ import annotations

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.model_spec import ChannelMix, Rwkv4, Rwkv7
from penstock.model.emitter import Emitter, Place


def rwkv4(b: Emitter, p: str, m: Rwkv4, place: Place, x: str, y: str) -> None:
    """Register x -> register y; `p`: prefix of the layer's weights."""
    b.emit("token_shift", (x, "step"), "last", bound=(*place, "shift"))
    for name in ("k", "v", "r"):
        b.emit("interpolate", ("last", x), name, p + "mix_" + name)
        b.linear(name, name, p + name)
    decay = b.vector(p + "time_decay")
    assert decay is not None, "weights were checked"
    if m.decay_is_log:
        with np.errstate(over="ignore"):  # minus infinity: the past is gone at once
            decay = -np.exp(decay)
    b.emit("wkv4", ("k", "v", "step"), "a", bound=(decay, b.vector(p + "time_first"), *place))
    b.emit("gate_rows", ("a", "r"), "a")
    b.linear("a", y, p + "o")


def rwkv7(b: Emitter, p: str, m: Rwkv7, place: Place, x: str, y: str) -> None:
    """As `rwkv4`. The first layer leaves its values in register v_first, where the later ones find them."""
    b.emit("token_shift", (x, "step"), "last", bound=(*place, "shift"))
    for name in "rwkvag":
        b.emit("interpolate", (x, "last"), name, p + "mix_" + name)
    v = "v_first" if m.first else "v"
    if not m.first:
        _low_rank(b, p + "v", "v", "share")
        b.emit("activate", ("share",), "share", bound=("sigmoid",))
    b.linear("v", v, p + "v")
    if not m.first:
        b.emit("interpolate", ("v", "v_first", "share"), "v")
    for name in ("r", "k"):
        b.linear(name, name, p + name)
    _low_rank(b, p + "w", "w", "w", "tanh")
    _low_rank(b, p + "a", "a", "a")
    b.emit("activate", ("a",), "a", bound=("sigmoid",))
    b.linear("g", "g", p + "g1")
    b.emit("activate", ("g",), "g", bound=("sigmoid",))
    b.linear("g", "g", p + "g2")

    b.emit("removal_key", ("k",), "removal", p + "k_k", bound=(m.num_heads,))
    b.emit("replacement_key", ("k", "a"), "k", p + "k_a")
    for name, split in (("r", "r"), ("w", "w"), ("k", "k"), (v, "values"), ("a", "a")):
        b.emit("heads", (name,), split, bound=(m.num_heads,))
    b.emit("wkv7", ("r", "w", "k", "values", "removal", "a", "step"), "mixed_heads", bound=place)
    weight, bias, bonus = (_per_head(b, p + name, m) for name in ("head_norm", "head_norm.bias", "r_k"))
    b.emit("layer_norm", ("mixed_heads",), "mixed_heads", bound=(weight, bias, m.eps))
    b.emit("value_bonus", ("r", "k", "values"), "bonus", bound=(bonus,))
    b.emit("add", ("mixed_heads", "bonus"), "mixed_heads")
    b.emit("flat", ("mixed_heads",), "out")
    b.emit("multiply", ("out", "g"), "out")
    b.linear("out", y, p + "o")


def channel_mix(b: Emitter, p: str, f: ChannelMix, place: Place, x: str, y: str) -> None:
    """The same for a feed-forward. Version 4 weighs this token by its mix, version 7 the last one."""
    b.emit("token_shift", (x, "step"), "last", bound=(*place, "ffn_shift"))
    pair = ("last", x) if f.version == 4 else (x, "last")
    b.emit("interpolate", pair, "k", p + "ffn_mix_k")
    b.linear("k", "k", p + "up")
    b.emit("activate", ("k",), "k", bound=("relu2",))
    if f.version == 4:
        b.emit("interpolate", pair, "r", p + "ffn_mix_r")
        b.linear("r", "r", p + "ffn_r")
    b.linear("k", y, p + "down")
    if f.version == 4:
        b.emit("gate_rows", (y, "r"), y)


def _low_rank(b: Emitter, p: str, x: str, y: str, inner: str | None = None) -> None:
    """y = second(inner(first x)) + offset, for the weights `p` + "1", "2" and "0"."""
    b.linear(x, y, p + "1")
    if inner is not None:
        b.emit("activate", (y,), y, bound=(inner,))
    b.emit("linear", (y,), y, p + "2", p + "0")


def _per_head(b: Emitter, name: str, m: Rwkv7) -> F32:
    vector = b.vector(name)
    assert vector is not None, "weights were checked"
    return vector.reshape(m.num_heads, m.head_dim)
