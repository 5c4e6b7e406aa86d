"""Nodes that one operation can do become one. Passes know no backend: each names those that it wants.

A fused `linear` keeps in `more`: `parts`, the (weight names, weight, bias) it is stacked of; `pair`, whether they are
gate and up; `activation` and `limit`, what follows the product; `residual` (a Value) and `factor`: out = residual +
factor * y; `norm`: the node whose norm comes first. A pair whose gate or up is adapted gives both side by side, in the
order of its matrix; each `adapt` knows its `half` (1 gate, 2 up), and `activate_pairs` follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from penstock.model.graph import SELECTED, Graph, Node, Value
from penstock.ops.stored import alike

PAIR = 32
"""Outputs of a gate that lie beside as many of an up."""


class Part(NamedTuple):
    """One weight matrix [N, K] and its bias [N] or None."""

    name: str
    weight: Any
    bias: Any


Same = Callable[[Any, Any], bool]
"""An equivalence of weights."""
PASSES = ("selection", "gates", "activations", "siblings", "residuals", "norms")
"""Each does without the others; they run in this order."""


def fuse(graph: Graph, passes: Collection[str] = PASSES, *, same: Same = alike, together: Same | None = None) -> None:
    """Mutates: `graph`. The order of what is left stays. `passes`: fewer of them to see what one is worth.

    `same`: whether two weights can be rows of one matrix, so that those of a pair must be; `together`, by default the
    same: whether one operation can multiply rows with both side by side. Those that are the same lie next to each
    other.
    """
    assert set(passes) <= set(PASSES), f"passes are {PASSES}"
    for node in graph.nodes:
        if node.op == "linear":
            bias = node.bound[1] if len(node.bound) > 1 else None
            node.more = {"parts": [Part(node.weights[0], node.bound[0], bias)], "pair": False, "factor": 1.0}
    gates, siblings = partial(_gates, same=same), partial(_siblings, same=same, together=together or same)
    runs: tuple[Callable[[Graph], None], ...]
    runs = (_selection, gates, _activations, siblings, _residuals, _norms)
    for name, run in zip(PASSES, runs, strict=True):
        if name in passes:
            run(graph)


def readers(graph: Graph) -> Counter[int]:
    """How many inputs of nodes are (views of) what each node, by its id, made. What leaves the program counts too."""
    counts = Counter(id(v.maker) for node in graph.nodes for v in inputs_of(node) if v.maker is not None)
    counts.update(id(v.maker) for v in (graph.hidden, graph.logits))
    return counts


def inputs_of(node: Node) -> list[Value]:
    residual = node.more.get("residual")
    return node.inputs if residual is None else [*node.inputs, residual]


def _remove(graph: Graph, gone: list[Node]) -> None:
    ids = {id(node) for node in gone}
    graph.head -= sum(id(node) in ids for node in graph.nodes[: graph.head])
    graph.nodes = [node for node in graph.nodes if id(node) not in ids]


def _rebind(graph: Graph, old: Node, new: Node, offset: int = 0) -> None:
    """Every view of what `old` made is one of what `new` makes, `offset` columns further."""
    seen: set[int] = set()
    values = [v for node in graph.nodes for v in (*inputs_of(node), node.out) if v is not None]
    for v in [*values, graph.hidden, graph.logits]:
        if v.maker is old and id(v) not in seen:
            seen.add(id(v))
            v.maker, v.start = new, v.start + offset


def _is_alone(value: Value, counts: Counter[int], op: str) -> bool:
    """Nobody else reads anything of the `op` that made this, and this is all of it."""
    maker = value.maker
    whole = maker is not None and maker.out is not None and maker.out.width == value.width
    return maker is not None and whole and maker.op == op and counts[id(maker)] == 1


BY_ROWS = {
    "linear", "adapt", "gather", "merge", "rms_norm", "layer_norm", "activate", "activate_gated", "scale", "clip",
    "soft_cap", "add", "multiply",
    "gate_rows", "interpolate", "value_bonus", "attention", "attend_chosen", "latent_output", "route", "experts",
    "cut_off", "match_magnitude", "scale_columns", "stack_streams", "mix_streams", "correct_streams", "add_streams",
    "rope", "scale_queries",
    "weigh_streams", "collapse_streams", "blend_streams",
}  # fmt: skip
"""Calls whose result at a token needs their inputs at that token only. Attention may read queries (and what they
chose) of all tokens and give some rows; rotations and scales of queries look up where a token stands."""


_OF_ALL_TOKENS = ("attention", "attend_chosen")


def _goes_by_rows(node: Node) -> bool:
    """Routes have no rows that could be selected, and listed ones are looked up by token: there experts take all."""
    if node.op == "experts" and (routes := node.inputs[1].maker) is not None and routes.op == "route_listed":
        return False
    return node.op in BY_ROWS


def _selection(graph: Graph) -> None:
    """What leads to selected rows and to nothing else is done for those rows: all that comes behind the last keys and
    values. Of a prompt's tokens one is selected as a rule, of a chunk that more follows none."""
    keeping = {node.layer for node in graph.nodes if node.op in ("write_kv", "write_kept")}
    select = next((node for node in graph.nodes if node.op == "select"), None)
    if select is None:  # a stage of a pipeline
        return
    only = {id(select)}
    read_by: dict[int, list[int]] = {}
    for node in graph.nodes:
        for v in inputs_of(node):
            # Queries that are made beside keys and values are read at all tokens.
            beside = node.op in _OF_ALL_TOKENS and node.layer in keeping
            read_by.setdefault(id(v.maker), []).append(0 if beside else id(node))
    for node in reversed(graph.nodes[: graph.nodes.index(select)]):
        if _goes_by_rows(node) and id(node) in read_by and only.issuperset(read_by[id(node)]):
            only.add(id(node))
    if id(select.inputs[0].maker) not in only:
        return
    nodes: list[Node] = []
    for node in graph.nodes:
        if id(node) in only and node is not select:
            assert node.out is not None
            node.out.rows = SELECTED
            if node.op not in _OF_ALL_TOKENS or node.layer not in keeping:
                angles = node.inputs[1:] if node.op == "rope" else []
                rows = node.inputs[:1] if angles else node.inputs
                node.inputs = [_selected(v, only, nodes) for v in rows] + angles
        nodes.append(node)
    graph.head += len(nodes) - len(graph.nodes)
    graph.nodes = nodes
    last = select.inputs[0]
    assert last.maker is not None
    _rebind(graph, select, last.maker, last.start)
    _remove(graph, [select])


def _selected(value: Value, only: Collection[int], nodes: list[Node]) -> Value:
    """`value` at selected rows: as it is if it has no others, else what a `select` in front of its reader makes.

    Mutates: `nodes`, those in front.
    """
    if value.maker is None:
        return value
    if id(value.maker) in only:
        return Value(value.maker, value.width, SELECTED, value.start, value.heads)
    for node in nodes:
        if node.op == "select" and node.inputs[0].same(value):
            found = node
            break
    else:
        found = Node("select", [value], (), {}, ())
        found.out = Value(found, value.width, SELECTED, heads=value.heads)
        nodes.append(found)
    return Value(found, value.width, SELECTED, 0, value.heads)


def runs_of(parts: Collection[Part], same: Same = alike) -> list[list[Part]]:
    """Parts of a product, those together that are the same as the one before."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and same(runs[-1][0].weight, part.weight):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _gates(graph: Graph, same: Same) -> None:
    """act(gate) * up of one input: both products at once, so that a tile has what it needs."""
    counts = readers(graph)
    for node in graph.nodes:
        if node.op != "activate_gated":
            continue
        adapts = [_adapt_of(v, counts) for v in node.inputs]
        gate, up = (v if own is None else own.inputs[1] for v, own in zip(node.inputs, adapts, strict=True))
        if not (_is_alone(gate, counts, "linear") and _is_alone(up, counts, "linear")):
            continue
        first, second = gate.maker, up.maker
        assert first is not None
        assert second is not None
        if not first.inputs[0].same(second.inputs[0]) or not same(_weight(first), _weight(second)):
            continue
        if any(adapts):
            _side_by_side(graph, node, first, second, adapts)
            continue
        activation, limit = node.bound
        node.op, node.inputs = "linear", [first.inputs[0]]
        node.more = {
            "parts": [*first.more["parts"], *second.more["parts"]], "pair": True, "factor": 1.0,
            "activation": activation, "limit": limit,
        }  # fmt: skip
        _remove(graph, [first, second])


def _adapt_of(value: Value, counts: Counter[int]) -> Node | None:
    return value.maker if _is_alone(value, counts, "adapt") else None


def _side_by_side(graph: Graph, node: Node, gate: Node, up: Node, adapts: Sequence[Node | None]) -> None:
    """`node` reads both products of a pair, in the order of their one matrix, once each is adapted there."""
    assert gate.out is not None
    pair = Node("linear", [gate.inputs[0]], weights=gate.weights, layer=gate.layer)
    pair.more = {"parts": [*gate.more["parts"], *up.more["parts"]], "pair": True, "factor": 1.0}
    last = pair.out = Value(pair, 2 * PAIR * -(-gate.out.width // PAIR), gate.out.rows)
    at = min(graph.nodes.index(gate), graph.nodes.index(up))
    graph.nodes.insert(at, pair)
    graph.head += at < graph.head
    for half, own in enumerate(adapts, 1):
        if own is not None:
            own.more["half"] = half, own.inputs[1].width
            own.inputs[1] = last
            last = own.out = Value(own, last.width, last.rows)
    # In the order in which they stand.
    places = [i for i, own in enumerate(graph.nodes) if own in adapts]
    for i, own in zip(places, [own for own in adapts if own is not None], strict=True):
        graph.nodes[i] = own
    node.op, node.inputs = "activate_pairs", [last]
    _remove(graph, [gate, up])


def _weight(node: Node) -> Any:
    return node.more["parts"][0].weight


def _activations(graph: Graph) -> None:
    counts = readers(graph)
    for node in list(graph.nodes):
        if node.op == "activate" and _is_alone(node.inputs[0], counts, "linear"):
            linear = node.inputs[0].maker
            assert linear is not None
            if linear.more["pair"]:
                continue
            linear.more["activation"] = node.bound[0]
            _rebind(graph, node, linear)
            linear.out = node.out
            _remove(graph, [node])
        elif node.op == "activate" and node.bound[0] == "silu" and _is_alone(node.inputs[0], counts, "causal_conv"):
            conv = node.inputs[0].maker
            assert conv is not None
            conv.more["activation"] = "silu"
            _rebind(graph, node, conv)
            conv.out = node.out
            _remove(graph, [node])


def _siblings(graph: Graph, same: Same, together: Same) -> None:
    """Products of one input, as q, k and v, become one with their outputs side by side.

    What layers share stays apart from what is a layer's own: it would be stored once for each of them.
    """
    plain = [n for n in graph.nodes if n.op == "linear" and not n.more["pair"] and "activation" not in n.more]
    families: list[list[Node]] = []
    for node in plain:
        for family in families:
            first = family[0]
            one_owner = first.inputs[0].same(node.inputs[0]) and _owner(first) == _owner(node)
            if one_owner and together(_weight(first), _weight(node)):
                places = [i for i, other in enumerate(family, 1) if same(_weight(other), _weight(node))]
                family.insert(places[-1] if places else len(family), node)
                break
        else:
            families.append([node])
    for family in families:
        if len(family) < 2:
            continue
        first, *others = family
        assert first.out is not None
        width = first.out.width
        for other in others:
            assert other.out is not None
            first.more["parts"] += other.more["parts"]
            _rebind(graph, other, first, width)
            width += other.out.width
        # The node's own value is all of it; those who read the first part keep a view of their own.
        first.out = Value(first, width, first.out.rows)
        _remove(graph, others)


def _owner(node: Node) -> str:
    """`layers`, or `shared`."""
    return node.weights[0].partition(".")[0]


def _residuals(graph: Graph) -> None:
    """x + f * (y W^T), written over nothing that is still wanted: emit.py decides where."""
    counts = readers(graph)
    for node in list(graph.nodes):
        if node.op != "add":
            continue
        for y, x in (node.inputs[::-1], node.inputs):
            factor, scaled = 1.0, None
            if _is_alone(y, counts, "scale"):
                scaled = y.maker
                assert scaled is not None
                factor, y = scaled.bound[0], scaled.inputs[0]
            if _is_alone(y, counts, "adapt") and scaled is not None:
                # As the product would add it, rounded once.
                node.inputs, node.more["factor"] = [x, y], factor
                _remove(graph, [scaled])
                break
            if not _is_alone(y, counts, "linear"):
                continue
            linear = y.maker
            assert linear is not None
            if linear.more.get("residual") is not None or linear.more["pair"] or x.maker is linear:
                continue
            if _comes_later(graph, x, linear):
                # The product waits for what it is added to.
                graph.nodes.remove(linear)
                graph.nodes.insert(graph.nodes.index(node), linear)
            linear.more |= {"residual": x, "factor": factor}
            _rebind(graph, node, linear)
            linear.out = node.out
            _remove(graph, [node] if scaled is None else [node, scaled])
            break


def _comes_later(graph: Graph, value: Value, node: Node) -> bool:
    return value.maker is not None and graph.nodes.index(value.maker) > graph.nodes.index(node)


def _norms(graph: Graph) -> None:
    """A norm that one product alone reads is done by it. Not across the border of head and body: hidden states are
    asked for there."""
    counts = readers(graph)
    body = graph.nodes[: graph.head]
    gone = []
    for part in (body, graph.nodes[graph.head :]):
        ids = {id(node) for node in part}
        for node in part:
            if node.op != "linear":
                continue
            x = node.inputs[0]
            if not (_is_alone(x, counts, "rms_norm") or _is_alone(x, counts, "layer_norm")) or id(x.maker) not in ids:
                continue
            norm = x.maker
            assert norm is not None
            if norm.inputs[0].heads is not None:
                continue
            node.more["norm"] = norm
            node.inputs = [norm.inputs[0]]
            gone.append(norm)
    _remove(graph, gone)


def check_order(graph: Graph) -> None:
    """Every value is made before it is read."""
    made: set[int] = set()
    for node in graph.nodes:
        assert all(v.maker is None or id(v.maker) in made for v in inputs_of(node)), f"{node.op} reads what is to come"
        made.add(id(node))
