"""A model as operations over values: every result has a name of its own and is never overwritten.

What `heads`, `flat` and `columns` give is no operation here: it is another view of what there is. Backends lower a
graph: bind it to their operations, or compile it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

STEP_INPUTS = ("step", "token_ids", "positions", "rows")
"""What a step brings; see `ops.table` for which operation reads which."""
NO_LAYER = -1
"""Embedding, head, and what layers share."""
TOKENS, SELECTED = 0, 1
"""Rows of a value: all tokens of the step, or those whose logits are wanted."""


@dataclass(eq=False)
class Value:
    """Rows of numbers: columns start ... start+width of what node `maker` made.

    `rows`: TOKENS or SELECTED. `heads`: into how many equal parts a row falls for those who read it, if any. `name`
    is for people.
    """

    maker: Node | None = field(repr=False)  # whose inputs have makers: each would be told many times
    width: int
    rows: int
    start: int = 0
    heads: int | None = None
    name: str = ""

    def view(self, start: int, width: int, heads: int | None = None, name: str = "") -> Value:
        return Value(self.maker, width, self.rows, self.start + start, heads, name)

    def same(self, other: Value) -> bool:
        """The same numbers, however they are looked at."""
        return self.maker is other.maker and (self.start, self.width) == (other.start, other.width)


@dataclass(eq=False)
class Node:
    """One operation of `ops.table.CONTRACTS`: its inputs that are values, and what is bound once.

    `takes`: which of STEP_INPUTS it reads, and its place among the inputs. `weights` are the names of the first of
    `bound`; `label` says to people what is bound. `layer`: which it belongs to, or NO_LAYER.
    """

    op: str
    inputs: list[Value]
    bound: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    takes: tuple[str, int] | None = None
    label: str = ""
    layer: int = NO_LAYER
    out: Value | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """What fusing adds: see fuse.py."""


@dataclass
class Graph:
    """`nodes` in order; those from `head` on turn hidden states into logits.

    `hidden` is what they read, `logits` what they give. `residuals[n]` is what layer n reads; the last one is what
    comes behind all layers.
    """

    nodes: list[Node]
    head: int
    hidden: Value
    logits: Value
    residuals: tuple[Value, ...]
    vocab_size: int
    max_model_len: int

    def copy(self, layers: Collection[int] | None = None) -> Graph:
        """Nodes and values of its own, over the same weights: passes change what they are given.

        `layers`: the model without all others; what a layer gave that is left out is what it was given.
        """
        left_out = range(len(self.residuals) - 1) if layers is not None else ()
        before = {id(self.residuals[n + 1].maker): self.residuals[n] for n in left_out if n not in (layers or ())}
        nodes: dict[int, Node] = {}

        def own(value: Value) -> Value:
            while id(value.maker) in before:
                given = before[id(value.maker)]
                value = replace(value, maker=given.maker, start=value.start + given.start)
            return replace(value, maker=None if value.maker is None else nodes[id(value.maker)])

        head = 0
        for i, node in enumerate(self.nodes):
            head = len(nodes) if i == self.head else head
            if layers is None or node.layer == NO_LAYER or node.layer in layers:
                made = replace(node, inputs=[own(v) for v in node.inputs], more=dict(node.more))
                nodes[id(node)] = made
                if node.out is not None:
                    made.out = replace(node.out, maker=made)
        residuals = tuple(map(own, self.residuals)) if layers is None else ()
        return replace(
            self, nodes=list(nodes.values()), head=head, hidden=own(self.hidden), logits=own(self.logits),
            residuals=residuals,
        )  # fmt: skip


def layer_bounds(graph: Graph, ends: Sequence[int]) -> tuple[int, ...]:
    """Where a lowered graph may pause: [num_layers + 1], the first call of each layer, and of what comes behind them.

    `ends`: [num_nodes + 1], calls that the first so many nodes have become. What a layer has in common with one before
    it, and was joined with that, comes there.
    """
    places = [(node.layer, i) for i, node in enumerate(graph.nodes) if node.layer != NO_LAYER]
    if not places:
        return (ends[graph.head],)
    last = max(i for _, i in places)
    bounds = [ends[last + 1]]
    for layer in range(max(layer for layer, _ in places), -1, -1):
        bounds.append(min([bounds[-1], *(ends[i] for other, i in places if other == layer)]))
    return tuple(reversed(bounds))


def view_of(op: str, x: Value, bound: Sequence[Any], name: str) -> Value | None:
    """What an operation gives that computes nothing; None for others."""
    match op:
        case "heads":
            return x.view(0, x.width, bound[0], name)
        case "flat":
            return x.view(0, x.width, None, name)
        case "columns":
            start, stop = bound
            return x.view(start, stop - start, None, name)
    return None


def result_of(node: Node, name: str, width: int | None = None) -> Value | None:
    """What a node gives, by the contract of its operation. `width`: of attention, whose values lie in a cache."""
    first = node.inputs[0] if node.inputs else None
    match node.op:
        case "write_kv" | "write_kept" | "write_entries" | "observe" | "rehearse":
            return None
        case "embed":
            return Value(node, node.bound[0].shape[1], TOKENS, name=name)
        case "rope_angles":
            return Value(node, 0, TOKENS, name=name)
    assert first is not None, f"{node.op} reads nothing"
    width, rows, heads = width or first.width, first.rows, first.heads
    match node.op:
        case "stack_streams":
            heads = len(node.inputs)
            width *= heads
        case "select":
            rows = SELECTED
        case "gather":
            width, heads = sum(node.bound[1]), None
        case "linear":
            width, heads = node.bound[0].shape[0], None
        case "route" | "route_listed":
            width = node.bound[0]
        case "spread":
            width *= node.bound[0]
        case "collapse_streams":
            width //= node.bound[0]
        case "removal_key":
            heads = node.bound[1]
        case "mlstm_gates":
            width, heads = 3 * first.width, None
        case "concat":
            width, heads = first.width + node.inputs[1].width, None
        case "recurrent" | "retention" | "value_bonus" | "gated_delta" | "mlstm" | "wkv5" | "wkv6":
            width, heads = node.inputs[2].width, node.inputs[2].heads
        case "biased_heads":
            width += 4 * (heads or 0)
        case "latent_query":
            num_heads, nope, rank = node.bound[0].shape
            width += num_heads * (rank - nope)
        case "latent_output":
            width = node.bound[0].shape[0] * node.bound[0].shape[1]
    return Value(node, width, rows, heads=heads, name=name)
