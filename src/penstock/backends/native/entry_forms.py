"""The native form of residual streams, and of entries that several tokens share."""

from __future__ import annotations

import numpy as np

from penstock.backends.native.state_forms import Form, Planes
from penstock.model.graph import Node
from penstock.ops.native.abi import Kind


def stream_form(node: Node) -> Form | None:
    """None for an operation that is about no streams."""
    match node.op:
        case "spread":
            return Form(Kind.SPREAD, n=node.bound)
        case "weigh_streams":
            scale, base, num, iterations, eps = node.bound
            pointers = (np.ascontiguousarray(scale, np.float32), np.ascontiguousarray(base, np.float32))
            return Form(Kind.WEIGH_STREAMS, n=(num, iterations), f=(eps,), pointers=pointers, in_place=0)
        case "collapse_streams":
            return Form(Kind.COLLAPSE_STREAMS, n=node.bound)
        case "blend_streams":
            return Form(Kind.MIX_STREAMS, n=node.bound, in_place=0)
    return None


def entry_forms(node: Node, planes: Planes, max_tokens: int) -> list[Form] | None:
    """What an operation falls into; None for one that is about no entries. `max_tokens`: of a sequence."""
    match node.op:
        case "write_entries":
            return _write(node, planes)
        case "choose_entries":
            return [_choose(node, planes, max_tokens)]
        case "attend_entries":
            return [_attend(node, planes)]
    return None


def _choose(node: Node, planes: Planes, max_tokens: int) -> Form:
    group, layer, plane, _, scale, every = node.bound
    q = node.inputs[0]
    assert q.heads
    n = (group, layer, planes(group).index(plane), every, q.heads, q.width // q.heads, max_tokens // every)
    return Form(Kind.CHOOSE_ENTRIES, f"group {group} layer {layer}", n, (scale,))


def _attend(node: Node, planes: Planes) -> Form:
    group, layer, far_group, far_layer, near, far = node.bound
    q, named = node.inputs[0], node.named
    assert q.heads
    n = (
        group, layer, planes(group).index(near), far_group, far_layer, planes(far_group).index(far), named["every"],
        named["window"], q.heads, q.width // q.heads,
    )  # fmt: skip
    sinks = np.ascontiguousarray(named["sinks"], np.float32)
    return Form(Kind.ATTEND_ENTRIES, f"groups {group}, {far_group} layer {layer}", n, (named["scale"],), (sinks,))


def _write(node: Node, planes: Planes) -> list[Form]:
    """What tokens give is kept first, as keys and values are; entries are made of what is kept."""
    group, layer, far_group, far_layer, plane = node.bound
    value, named = node.inputs[0], node.named
    kept = [planes(group).index(f"{plane}_{part}") for part in ("value", "score")]
    table = np.ascontiguousarray(named["table"], np.float32)
    _, positions, half = table.shape
    n = (
        group, layer, *kept, far_group, far_layer, planes(far_group).index(plane), named["every"],
        int(named["overlap"]), positions, int(named["interleaved"]), half,
    )  # fmt: skip
    pointers = tuple(np.ascontiguousarray(named[name], np.float32) for name in ("bias", "weight"))
    return [
        Form(Kind.WRITE, f"group {group} layer {layer}", (group, layer, 1, value.width, 1, value.width, *kept)),
        Form(Kind.WRITE_ENTRIES, f"group {far_group} layer {far_layer}", n, (named["eps"],), (*pointers, table)),
    ]
