"""The native form of operations that keep a state per sequence, and of RWKV's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from penstock.core.cache_spec import CacheGroup
from penstock.model.graph import Node
from penstock.ops.native.abi import Kind


class Form(NamedTuple):
    """What a native operation is told besides its registers; see `csrc/include/penstock.h`.

    `in_place`: the number of the input whose place the result may take, if any.
    """

    kind: Kind
    label: str = ""
    n: tuple[int, ...] = ()
    f: tuple[float, ...] = ()
    pointers: tuple[Any, ...] = ()
    in_place: int | None = None


Planes = Callable[[int], list[str]]
"""Cache group -> the names of its planes, in their order."""


def state_form(node: Node, planes: Planes) -> Form | None:
    """None for an operation that is none of these."""
    make = _FORMS.get(node.op)
    return None if make is None else make(node, planes)


def plane_names(group: CacheGroup) -> list[str]:
    """Names of a group's planes, in the order of `runner.storage`."""
    return [p.name for p in (*group.spec.planes, *group.spec.page_planes)]


def _place(group: Any, layer: Any, planes: Planes, *names: str) -> tuple[tuple[int, ...], str]:
    return (group, layer, *(planes(group).index(name) for name in names)), f"group {group} layer {layer}"


def _numbers(x: Any) -> Any:
    return None if x is None else np.ascontiguousarray(x, np.float32).reshape(-1)


def _conv(node: Node, planes: Planes) -> Form:
    group, layer, taps, bias, plane = (*node.bound, "conv")[:5]
    place, label = _place(group, layer, planes, plane)
    silu = int(node.more.get("activation") == "silu")
    return Form(Kind.CONV, label, (*place, len(taps), silu), pointers=(_numbers(taps), _numbers(bias)))


def _shift(node: Node, planes: Planes) -> Form:
    group, layer, plane = node.bound
    place, label = _place(group, layer, planes, plane)
    return Form(Kind.SHIFT, label, place)


def _scan(node: Node, planes: Planes) -> Form:
    group, layer, a, d = node.bound
    place, label = _place(group, layer, planes, "state")
    return Form(Kind.SCAN, label, place, pointers=(_numbers(a), _numbers(d)), in_place=0)


def _matrix(kind: Kind, node: Node, planes: Planes, key: int, value: int, **more: Any) -> Form:
    """Heads of the inputs numbered `key` and `value` say the shape of the state."""
    keys, values = node.inputs[key], node.inputs[value]
    assert keys.heads
    assert values.heads
    place, label = _place(node.bound[0], node.bound[1], planes, "state")
    n = (*place, values.heads, keys.width // keys.heads, values.width // values.heads, keys.heads)
    return Form(kind, label, n, in_place=value, **more)


def _scan2(node: Node, planes: Planes) -> Form:
    a, d, bias, *limits = node.bound[2:]
    pointers = (_numbers(a), _numbers(d), _numbers(bias))
    return _matrix(Kind.SCAN2, node, planes, 2, 0, f=tuple(map(float, limits)), pointers=pointers)


def _recurrent(node: Node, planes: Planes) -> Form:
    return _matrix(Kind.RECURRENT, node, planes, 1, 2)


def _retention(node: Node, planes: Planes) -> Form:
    return _matrix(Kind.RECURRENT, node, planes, 1, 2, pointers=(_numbers(node.bound[2]),))


def _wkv7(node: Node, planes: Planes) -> Form:
    return _matrix(Kind.WKV7, node, planes, 2, 3)


def _wkv5(node: Node, planes: Planes) -> Form:
    return _matrix(Kind.WKV6, node, planes, 1, 2, pointers=tuple(map(_numbers, node.bound[2:])))


def _shared_wkv6(node: Node, planes: Planes) -> Form:
    r, k, v = node.inputs[:3]
    assert r.heads
    assert k.heads
    place, label = _place(node.bound[0], node.bound[1], planes, "state")
    dim = r.width // r.heads
    n = (*place, r.heads, dim, v.width // k.heads, k.heads)
    return Form(Kind.WKV6, label, n, f=(dim**-0.5,))


def _delta(node: Node, planes: Planes) -> Form:
    a, eps, factor, in_turn, floor = (*node.bound[2:], 0.0)[:5]
    f = (float(eps), float(factor), float(floor))
    form = _matrix(Kind.DELTA, node, planes, 1, 2, f=f, pointers=(_numbers(a),))
    return form._replace(n=(*form.n, int(in_turn)))


def _wkv4(node: Node, planes: Planes) -> Form:
    decay, first, group, layer = node.bound
    place, label = _place(group, layer, planes, "num", "den", "exponent")
    return Form(Kind.WKV4, label, place, pointers=(_numbers(decay), _numbers(first)), in_place=1)


def _rg_lru(node: Node, planes: Planes) -> Form:
    group, layer, *fixed = node.bound
    place, label = _place(group, layer, planes, "state")
    return Form(Kind.RG_LRU, label, place, pointers=tuple(map(_numbers, fixed)), in_place=0)


def _diagonal(node: Node, planes: Planes) -> Form:
    group, layer, a, c, skip = node.bound
    place, label = _place(group, layer, planes, "re", "im")
    n = (*place, a.shape[2], int(skip is None))
    return Form(Kind.DIAGONAL, label, n, pointers=(_numbers(a), _numbers(c), _numbers(skip)), in_place=0)


def _mlstm_gates(node: Node, planes: Planes) -> Form:
    group, layer, eps = node.bound
    place, label = _place(group, layer, planes, "norm", "max")
    keys = node.inputs[3]
    assert keys.heads
    return Form(Kind.MLSTM_GATES, label, (*place, keys.heads, keys.width // keys.heads), f=(float(eps),))


def _mlstm(node: Node, planes: Planes) -> Form:
    return _matrix(Kind.MLSTM, node, planes, 1, 2)


def _lerp(node: Node, planes: Planes) -> Form:
    return Form(Kind.LERP, pointers=(_numbers(node.bound[0]) if node.bound else None,), in_place=0)


def _removal_key(node: Node, planes: Planes) -> Form:
    weight, heads = node.bound
    return Form(Kind.REMOVAL_KEY, n=(heads,), pointers=(_numbers(weight),))


def _replacement_key(node: Node, planes: Planes) -> Form:
    return Form(Kind.REPLACEMENT_KEY, pointers=(_numbers(node.bound[0]),), in_place=0)


def _biased_heads(node: Node, planes: Planes) -> Form:
    a, factor = node.bound
    heads = node.inputs[0].heads
    assert heads
    return Form(Kind.BIASED_HEADS, n=(heads,), f=(float(factor),), pointers=(_numbers(a),))


def _value_bonus(node: Node, planes: Planes) -> Form:
    heads = node.inputs[0].heads
    assert heads
    return Form(Kind.VALUE_BONUS, n=(heads,), pointers=(_numbers(node.bound[0]),), in_place=2)


_FORMS: dict[str, Callable[[Node, Planes], Form]] = {
    "causal_conv": _conv, "token_shift": _shift, "mamba_scan": _scan, "mamba2_scan": _scan2, "recurrent": _recurrent,
    "retention": _retention, "wkv4": _wkv4, "wkv5": _wkv5, "wkv6": _wkv5,
    "shared_wkv6": _shared_wkv6, "wkv7": _wkv7, "gated_delta": _delta,
    "interpolate": _lerp, "rg_lru": _rg_lru, "diagonal_scan": _diagonal, "mlstm_gates": _mlstm_gates, "mlstm": _mlstm,
    "removal_key": _removal_key, "replacement_key": _replacement_key, "value_bonus": _value_bonus,
    "biased_heads": _biased_heads,
}  # fmt: skip
