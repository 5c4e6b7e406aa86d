"""A graph with places for adapters: behind the product of every weight that one of them changes stands an `adapt`.

Where no adapter is, the operations stay those of the plain graph, so rows without one have its bits.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from penstock.core.model_spec import ModelSpec, cache_groups, weight_shapes
from penstock.model.builder import build
from penstock.model.graph import NO_LAYER, Graph, Node, Value


def adapted(graph: Graph, names: Collection[str]) -> Graph:
    """A copy of `graph` in which products of the weights `names` are adapted."""
    graph = graph.copy()
    nodes: list[Node] = []
    behind: dict[int, Node] = {}
    for node in graph.nodes:
        node.inputs = [_moved(v, behind) for v in node.inputs]
        nodes.append(node)
        if node.op == "linear" and node.weights[0] in names:
            x, y = node.inputs[0], node.out
            assert y is not None, "a product has a result"
            own = Node(
                "adapt", [x, y], (node.weights[0],), takes=("step", 2), label=node.weights[0], layer=node.layer
            )  # fmt: skip
            own.out = Value(own, y.width, y.rows, heads=y.heads, name=y.name)
            behind[id(node)] = own
            nodes.append(own)
    first = graph.nodes[graph.head] if graph.head < len(graph.nodes) else None
    graph.head = next((i for i, node in enumerate(nodes) if node is first), len(nodes))
    graph.nodes = nodes
    graph.hidden, graph.logits = _moved(graph.hidden, behind), _moved(graph.logits, behind)
    graph.residuals = tuple(_moved(v, behind) for v in graph.residuals)
    return graph


def _moved(value: Value, behind: dict[int, Node]) -> Value:
    """The same columns of what has been adapted."""
    own = behind.get(id(value.maker))
    return value if own is None else Value(own, value.width, value.rows, value.start, value.heads, value.name)


def adaptable(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """The weights of layers with which rows are multiplied, each by itself, and their shapes [N, K]. Takes
    milliseconds."""
    element = np.zeros((), np.uint16)
    shapes = weight_shapes(spec)
    made = {shape: np.broadcast_to(element, shape) for shape in set(shapes.values())}
    graph = build(spec, {n: made[s] for n, s in shapes.items()}, cache_groups(spec, "bfloat16"), max_model_len=1)
    found = [n.weights[0] for n in graph.nodes if n.op == "linear" and n.layer != NO_LAYER]
    return {name: (shapes[name][0], shapes[name][1]) for name in found if len(shapes[name]) == 2}
