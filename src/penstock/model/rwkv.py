"""The operations of RWKV's time mixing and channel mixing."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.base.bf16 import F32
from penstock.core.mixers.rwkv import MIXED_6
from penstock.core.model_spec import ChannelMix, Qrwkv6, Rwkv4, Rwkv5, Rwkv6, Rwkv7
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


def rwkv5(b: Emitter, p: str, m: Rwkv5, place: Place, x: str, y: str) -> None:
    """As `rwkv4`."""
    b.emit("token_shift", (x, "step"), "last", bound=(*place, "shift"))
    for name in ("k", "v", "r", "g"):
        b.emit("interpolate", ("last", x), name, p + "mix_" + name)
        b.linear(name, name, p + name)
    decay = b.vector(p + "time_decay")
    assert decay is not None, "weights were checked"
    with np.errstate(over="ignore"):  # 0: the past is gone at once
        decay = np.exp(-np.exp(decay)).reshape(m.num_heads, m.head_dim)
    _read_states(b, p, m, "wkv5", (), (*place, _per_head(b, p + "time_first", m), decay), y)


def rwkv6(b: Emitter, p: str, m: Rwkv6, place: Place, x: str, y: str) -> None:
    """As `rwkv4`."""
    _mixed_6(b, p, m, MIXED_6, place, x)
    _read_states(b, p, m, "wkv6", ("w",), (*place, _per_head(b, p + "time_first", m)), y)


def qrwkv6(b: Emitter, p: str, m: Qrwkv6, place: Place, x: str, y: str) -> None:
    """As `rwkv4`."""
    _mixed_6(b, p, m, m.mixed, place, x)
    for name, heads in (("r", m.num_heads), ("k", m.kv_heads), ("v", m.kv_heads)):
        b.emit("heads", (name,), name, bound=(heads,))
    b.emit("shared_wkv6", ("r", "k", "v", "w", "step"), "mixed_heads", bound=place)
    b.emit("flat", ("mixed_heads",), "out")
    b.emit("gate_rows", ("out", "g"), "out")
    b.linear("out", y, p + "o")


def _mixed_6(b: Emitter, p: str, m: Rwkv6 | Qrwkv6, order: str, place: Place, x: str) -> None:
    """Registers r, k, v, g, and w, which goes into the decay, from x and its predecessor."""
    b.emit("token_shift", (x, "step"), "last", bound=(*place, "shift"))
    b.emit("interpolate", (x, "last"), "low", p + "mix_x")
    b.linear("low", "low", p + "mix_down")
    b.emit("activate", ("low",), "low", bound=("tanh",))
    for i, name in enumerate(order):
        b.emit("columns", ("low",), "share", bound=(i * m.mix_rank, (i + 1) * m.mix_rank))
        b.emit("linear", ("share",), "share", p + "mix_up_" + name, p + "mix_" + name)
        b.emit("interpolate", (x, "last", "share"), name)
        if name != "w":
            b.linear(name, name, p + name)
    b.linear("w", "w", p + "w1")
    b.emit("activate", ("w",), "w", bound=("tanh",))
    b.emit("linear", ("w",), "w", p + "w2", p + "time_decay")
    b.emit("heads", ("w",), "w", bound=(m.num_heads,))


def _read_states(
    b: Emitter, p: str, m: Rwkv5 | Rwkv6, op: str, more: tuple[str, ...], bound: tuple[Any, ...], y: str
) -> None:
    """What `op` reads of r, k and v, normed head by head, times silu(g)."""
    for name in ("r", "k", "v"):
        b.emit("heads", (name,), name, bound=(m.num_heads,))
    b.emit(op, ("r", "k", "v", *more, "step"), "mixed_heads", bound=bound)
    weight, bias = (_per_head(b, p + name, m) for name in ("head_norm", "head_norm.bias"))
    b.emit("layer_norm", ("mixed_heads",), "mixed_heads", bound=(weight, bias, m.eps))
    b.emit("flat", ("mixed_heads",), "out")
    b.emit("activate", ("g",), "g", bound=("silu",))
    b.emit("multiply", ("out", "g"), "out")
    b.linear("out", y, p + "o")


def rwkv7(b: Emitter, p: str, m: Rwkv7, place: Place, x: str, y: str) -> None:
    """As `rwkv4`. The first layer leaves its values in register v_first, where the later ones find them."""
    b.emit("token_shift", (x, "step"), "last", bound=(*place, "shift"))
    for name in m.mixed:
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
    if m.gate_rank:
        b.linear("g", "g", p + "g1")
        b.emit("activate", ("g",), "g", bound=("sigmoid",))
        b.linear("g", "g", p + "g2")

    b.emit("removal_key", ("k",), "removal", p + "k_k", bound=(m.num_heads,))
    b.emit("replacement_key", ("k", "a"), "k", p + "k_a")
    for name, split in (("r", "r"), ("w", "w"), ("k", "k"), (v, "values"), ("a", "a")):
        b.emit("heads", (name,), split, bound=(m.num_heads,))
    b.emit("wkv7", ("r", "w", "k", "values", "removal", "a", "step"), "mixed_heads", bound=place)
    if m.normed:
        weight, bias = (_per_head(b, p + name, m) for name in ("head_norm", "head_norm.bias"))
        b.emit("layer_norm", ("mixed_heads",), "mixed_heads", bound=(weight, bias, m.eps))
    b.emit("value_bonus", ("r", "k", "values"), "bonus", bound=(_per_head(b, p + "r_k", m),))
    b.emit("add", ("mixed_heads", "bonus"), "mixed_heads")
    b.emit("flat", ("mixed_heads",), "out")
    if m.gate_rank:
        b.emit("multiply", ("out", "g"), "out")
    b.linear("out", y, p + "o")


def channel_mix(b: Emitter, p: str, f: ChannelMix, place: Place, x: str, y: str) -> None:
    """The same for a feed-forward. Version 4 weighs this token by its mix, later ones the last one."""
    b.emit("token_shift", (x, "step"), "last", bound=(*place, "ffn_shift"))
    pair = ("last", x) if f.version == 4 else (x, "last")
    b.emit("interpolate", pair, "k", p + "ffn_mix_k")
    b.linear("k", "k", p + "up")
    b.emit("activate", ("k",), "k", bound=("relu2",))
    if f.version != 7:
        b.emit("interpolate", pair, "r", p + "ffn_mix_r")
        b.linear("r", "r", p + "ffn_r")
    b.linear("k", y, p + "down")
    if f.version != 7:
        b.emit("gate_rows", (y, "r"), y)


def _low_rank(b: Emitter, p: str, x: str, y: str, inner: str | None = None) -> None:
    """y = second(inner(first x)) + offset, for the weights `p` + "1", "2" and "0"."""
    b.linear(x, y, p + "1")
    if inner is not None:
        b.emit("activate", (y,), y, bound=(inner,))
    b.emit("linear", (y,), y, p + "2", p + "0")


def _per_head(b: Emitter, name: str, m: Rwkv5 | Rwkv6 | Rwkv7) -> F32:
    vector = b.vector(name)
    assert vector is not None, "weights were checked"
    return vector.reshape(m.num_heads, m.head_dim)
