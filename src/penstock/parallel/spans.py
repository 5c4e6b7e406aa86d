"""Consecutive layers of a model by themselves: rows of the residual stream in, rows out, wherever they come from.

A *span* is what a server of layers runs (Borzunov et al., Petals, arXiv 2209.01188, section 2.1). In front of all spans
stands the embedding, behind them the head; whoever wants tokens runs those two. Unlike stages (`parallel.stages`),
which hand on whatever a model reads again further down, spans meet in one value: any chain of them is the model.
Nothing is computed otherwise than in one piece, so all bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.base.errors import UnsupportedError
from penstock.core.cache_spec import CacheGroup
from penstock.model.graph import NO_LAYER, Graph, Node, Value
from penstock.parallel.stages import LINES

GIVEN = "given"
"""The operation of a node that computes nothing: whoever runs the graph puts its rows there."""


class _Span:
    def __init__(self, graph: Graph, groups: Sequence[CacheGroup], layers: range, given: Value | None) -> None:
        self._graph, self._groups, self._layers, self._given = graph, groups, layers, given
        self.nodes: list[Node] = []
        self._new: dict[int, Node] = {}
        if given is not None:
            node = Node(GIVEN, [], layer=layers.start if layers else NO_LAYER)
            node.out = replace(given, maker=node, start=0)
            self.nodes.append(node)
            self._source = node

    def take(self, wanted: Sequence[Node], first: int, last: int) -> None:
        """These nodes and what they read, of layers `first` ... `last` - 1; in the graph's order."""
        found = {id(node) for node in wanted}
        todo = list(wanted)
        while todo:
            node = todo.pop()
            self._check(node, first, last)
            for value in node.inputs:
                if value.maker is None or self._is_given(value) or id(value.maker) in found:
                    continue
                found.add(id(value.maker))
                todo.append(value.maker)
        for node in self._graph.nodes:
            if id(node) in found:
                self._add(node)

    def _check(self, node: Node, first: int, last: int) -> None:
        if node.layer != NO_LAYER and not first <= node.layer < last:
            raise UnsupportedError(
                f"what reads the residual stream behind layer {node.layer} reads more of that layer ({node.op}), so "
                "this model cannot be cut there"
            )
        if self._given is not None and node.takes is not None and node.takes[0] == "token_ids":
            raise UnsupportedError(
                "layers of this model go by token ids as well, and who has them is given the residual stream alone"
            )

    def _is_given(self, value: Value) -> bool:
        given = self._given
        if given is None or value.maker is not given.maker:
            return False
        return given.start <= value.start and value.start + value.width <= given.start + given.width

    def has(self, node: Node) -> bool:
        return id(node) in self._new

    def own(self, value: Value) -> Value:
        """The value of this graph that is `value` of the whole one."""
        if value.maker is None:
            return value
        if self._is_given(value):
            assert self._given is not None
            return replace(value, maker=self._source, start=value.start - self._given.start)
        made = self._new[id(value.maker)].out
        assert made is not None
        return replace(value, maker=made.maker, start=value.start + made.start)

    def _add(self, node: Node) -> None:
        bound = list(node.bound)
        for at in LINES.get(node.op, ()):
            layers = self._groups[bound[at]].layers
            if layers[bound[at + 1]] not in self._layers:
                raise UnsupportedError(
                    f"layer {node.layer} reads keys and values of layer {layers[bound[at + 1]]}: a span has both, "
                    "or neither"
                )
            bound[at + 1] -= sum(layer < self._layers.start for layer in layers)
        made = replace(node, inputs=[self.own(v) for v in node.inputs], bound=tuple(bound), more=dict(node.more))
        self.nodes.append(made)
        self._new[id(node)] = made
        if node.out is not None:
            made.out = replace(node.out, maker=made)


def front_of(graph: Graph) -> Graph:
    """From token ids to what the first layer reads; that is both `hidden` and `logits`."""
    made, out = _Span(graph, (), range(0), None), graph.residuals[0]
    assert out.maker is not None
    made.take([out.maker], 0, 0)
    value = made.own(out)
    return replace(graph, nodes=made.nodes, head=len(made.nodes), hidden=value, logits=value, residuals=())


def span_of(graph: Graph, groups: Sequence[CacheGroup], first: int, last: int, held: range) -> Graph:
    """From what layer `first` reads to what the one behind layer `last` - 1 does: `hidden` and `logits` are that.

    `groups`: of all layers; `held`: those whose keys and values its server keeps, `first` ... `last` - 1 among them:
    the result counts their layers alone (`plan.stages.stage_groups`). Raises: UnsupportedError for a model whose
    layers read more of each other than the residual stream.
    """
    given, out = graph.residuals[first], graph.residuals[last]
    made = _Span(graph, groups, held, given)
    assert out.maker is not None
    effects = [node for node in graph.nodes if node.out is None and first <= node.layer < last]
    made.take([*effects, out.maker], first, last)
    value = made.own(out)
    return replace(graph, nodes=made.nodes, head=len(made.nodes), hidden=value, logits=value, residuals=())


def back_of(graph: Graph) -> Graph:
    """From what comes behind all layers to logits. Raises: UnsupportedError for a model whose head reads more."""
    made = _Span(graph, (), range(0), graph.residuals[-1])
    assert graph.logits.maker is not None
    made.take([graph.logits.maker], 0, 0)
    at = 1 + sum(made.has(node) for node in graph.nodes[: graph.head])
    return replace(
        graph, nodes=made.nodes, head=at, hidden=made.own(graph.hidden), logits=made.own(graph.logits), residuals=()
    )
