"""A program's calls as nodes over values: every result has a name of its own and is never overwritten.

`heads`, `flat` and `columns` make no node: they are other views of what is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.cache_spec import CacheGroup
from penstock.model.program import Call, Program
from penstock.ops.native.abi import SELECTED, TOKENS


class NotNativeError(Exception):
    """The native kernels have nothing for this part of a model; the message names it."""


@dataclass(eq=False)
class Value:
    """Rows of numbers: columns start ... start+width of what node `maker` made, `whole` numbers wide.

    `heads`: into how many equal parts a row falls for those who read it, if any.
    """

    maker: Node | None
    width: int
    rows: int
    start: int = 0
    heads: int | None = None
    constant: Any = None
    """What it is, if it is none of a program's numbers: a rope's table."""

    def view(self, start: int, width: int, heads: int | None = None) -> Value:
        return Value(self.maker, width, self.rows, self.start + start, heads)

    def same(self, other: Value) -> bool:
        """The same numbers, however they are looked at."""
        return self.maker is other.maker and (self.start, self.width) == (other.start, other.width)


@dataclass(eq=False)
class Node:
    """One call. `inputs` are numbers; what is bound is kept as in `model.program.Call`."""

    op: str
    inputs: list[Value]
    bound: tuple[Any, ...]
    named: dict[str, Any]
    weights: tuple[str, ...]
    out: Value | None = None
    source: str = ""
    """For `embed`: "token_ids" or "positions"."""
    more: dict[str, Any] = field(default_factory=dict)
    """What fusing adds: see fuse.py."""


@dataclass
class Trace:
    """`nodes` in order; those from `head` on turn hidden states into logits.

    `hidden` is what they read, `logits` what they give.
    """

    nodes: list[Node]
    head: int
    hidden: Value
    logits: Value


_SAME = {"rms_norm", "layer_norm", "activate", "scale", "clip", "soft_cap", "add", "multiply", "gate_rows", "rope",
         "scale_queries", "activate_gated"}  # fmt: skip
"""Calls whose result looks like their first input."""


def trace(program: Program, groups: Sequence[CacheGroup]) -> Trace:
    """Raises: NotNativeError for a call that has no native form."""
    values: dict[str, Value] = {}
    nodes: list[Node] = []
    num_body = len(program.code) - program.num_head
    head, hidden = 0, None
    for i, call in enumerate(program.code):
        if i == num_body:
            head, hidden = len(nodes), values["x"]
        out = _view(call, values)
        if out is None:
            node = _node(call, values)
            node.out = out = _result(node, call, groups)
            nodes.append(node)
        if out is not None and call.output:
            values[call.output] = out
    assert hidden is not None
    return Trace(nodes, head, hidden, values["logits"])


def _view(call: Call, values: Mapping[str, Value]) -> Value | None:
    """The result of a call that computes nothing."""
    if call.op == "rope_angles":
        return Value(None, 0, TOKENS, constant=call.bound[0])
    if call.op not in ("heads", "flat", "columns"):
        return None
    x = values[call.inputs[0]]
    if call.op == "columns":
        start, stop = call.bound
        return x.view(start, stop - start)
    return x.view(0, x.width, call.bound[0] if call.op == "heads" else None)


def _node(call: Call, values: Mapping[str, Value]) -> Node:
    inputs = [values[name] for name in call.inputs if name not in ("step", "token_ids", "positions", "rows")]
    source = call.inputs[0] if call.op == "embed" else ""
    return Node(call.op, inputs, call.bound, call.named, call.weights, source=source)


def _result(node: Node, call: Call, groups: Sequence[CacheGroup]) -> Value | None:
    if call.op in _SAME:
        x = node.inputs[0]
        return Value(node, x.width, x.rows, heads=x.heads)
    match call.op:
        case "embed":
            return Value(node, node.bound[0].shape[1], TOKENS)
        case "select":
            return Value(node, node.inputs[0].width, SELECTED)
        case "linear":
            return Value(node, node.bound[0].shape[0], node.inputs[0].rows)
        case "write_kv" | "observe":
            return None
        case "attention":
            if len(call.named["keys"]) != 1:
                raise NotNativeError("attention over several planes of keys (latent attention)")
            group, q = groups[node.bound[0]], node.inputs[0]
            value = next(p for p in group.spec.planes if p.name == call.named["value"])
            assert q.heads is not None
            return Value(node, q.heads * value.dim, TOKENS, heads=q.heads)
    raise NotNativeError(f"operation {call.op}")
