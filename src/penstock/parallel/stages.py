"""One rank's stage of a pipeline: consecutive layers of a model, and what they need of the layers before.

What an earlier stage makes and a later one reads is handed on from stage to stage: the residual stream as a rule, and
whatever else a model reads again further down. What no layer has made (embeddings, angles of rotations) every stage
that reads it makes for itself. Hidden states of the last stage go to all ranks, which share out the head and have all
logits.

Nothing is computed otherwise than on one rank, so all bits are the same. Source: Huang et al., GPipe, arXiv 1811.06965,
section 2; Narayanan et al., PipeDream, arXiv 1806.03377.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.base.errors import ConfigError
from penstock.core.cache_spec import CacheGroup
from penstock.model.graph import NO_LAYER, SELECTED, Graph, Node, Value
from penstock.parallel.comm import Comm, Pipe
from penstock.plan.ranks import even_ranges

_AT_0 = (
    "write_kv", "observe", "attention", "choose_tokens", "attend_chosen", "rehearse", "attend_blocks", "choose_entries",
    "recurrent", "retention", "token_shift", "wkv5", "wkv6", "shared_wkv6", "wkv7", "causal_conv", "mamba_scan",
    "mamba2_scan", "gated_delta", "rg_lru", "diagonal_scan", "mlstm_gates", "mlstm",
)  # fmt: skip
LINES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(_AT_0, (0,)), "wkv4": (2,), "write_entries": (0, 2), "attend_entries": (0, 2), "write_kept": (0,),
}  # fmt: skip
"""Where operations have bound a cache group, and behind it the layer of the group."""
_ANY = -1
"""The stage of what no layer has made."""


class _Stage:
    def __init__(self, graph: Graph, groups: Sequence[CacheGroup], comm: Comm, pipe: Pipe) -> None:
        self._graph, self._groups, self._comm, self._pipe = graph, groups, comm, pipe
        self._homes: dict[int, int] = {}
        for node in graph.nodes[: graph.head]:
            self._homes[id(node)] = self._home(node)
        self._read_by = self._readers()
        self._new: dict[int, Node] = {}
        self.nodes: list[Node] = []

    def _home(self, node: Node) -> int:
        """The stage that runs a node."""
        before = max((self._homes[id(v.maker)] for v in node.inputs if v.maker is not None), default=_ANY)
        if node.layer == NO_LAYER:
            return before
        home = self._pipe.stage_of(node.layer)
        assert before <= home, "layers read what came before them"
        for at in LINES.get(node.op, ()):
            layer = self._groups[node.bound[at]].layers[node.bound[at + 1]]
            if self._pipe.stage_of(layer) != home:
                raise ConfigError(
                    f"pipeline_parallel_size: layer {node.layer} reads keys and values of layer {layer}, so both are "
                    f"of one stage; use fewer than {self._pipe.num_stages} stages",
                    field="pipeline_parallel_size",
                )
        return home

    def _readers(self) -> dict[int, int]:
        """Node -> the last stage that reads what it makes."""
        last = self._pipe.num_stages - 1
        assert self._graph.hidden.maker is not None
        assert self._homes[id(self._graph.hidden.maker)] == last, "the last layers make the hidden states"
        found: dict[int, int] = {id(self._graph.hidden.maker): last}
        for node in self._graph.nodes[: self._graph.head]:
            for v in node.inputs:
                found[id(v.maker)] = max(found.get(id(v.maker), _ANY), self._homes[id(node)])
        return found

    def _crossing(self, cut: int) -> list[Node]:
        """What stages up to `cut` make and later ones read."""
        nodes = self._graph.nodes[: self._graph.head]
        return [n for n in nodes if _ANY < self._homes[id(n)] <= cut < self._read_by.get(id(n), _ANY)]

    def _wanted(self, nodes: Sequence[Node]) -> set[int]:
        """These, and what no layer has made of all that they read."""
        found = {id(node) for node in nodes}
        todo = list(nodes)
        while todo:
            for v in todo.pop().inputs:
                if v.maker is not None and self._homes.get(id(v.maker)) == _ANY and id(v.maker) not in found:
                    found.add(id(v.maker))
                    todo.append(v.maker)
        return found

    def build(self) -> Graph:
        graph, pipe, stage = self._graph, self._pipe, self._pipe.stage
        if pipe.before is not None:
            for old in self._crossing(stage - 1):
                assert old.out is not None
                node = Node("receive", [], (pipe.before,), layer=pipe.layers.start)
                node.out = replace(old.out, maker=node)
                self.nodes.append(node)
                self._new[id(old)] = node
        body, head = graph.nodes[: graph.head], graph.nodes[graph.head :]
        own = [node for node in body if self._homes[id(node)] == stage]
        wanted = self._wanted([*own, *head])
        for node in body:
            if id(node) in wanted:
                self._add(node)
        if pipe.behind is not None:
            for old in self._crossing(stage):
                assert old.out is not None
                value = self._own(old.out.view(0, old.out.width))
                self.nodes.append(Node("send", [value], (pipe.behind,), layer=pipe.layers[-1]))
        hidden = self._spread()
        at = len(self.nodes)
        for node in head:
            self._add(node)
        return replace(
            graph, nodes=self.nodes, head=at, hidden=hidden, logits=self._own(graph.logits), residuals=(),
        )  # fmt: skip

    def _spread(self) -> Value:
        """Hidden states on all ranks: those of the last stage give a part of the columns each."""
        old, size = self._graph.hidden, self._comm.size
        assert old.maker is not None
        each = size // self._pipe.num_stages
        parts = [(0, 0)] * (size - each) + list(even_ranges(old.width, each, 1))
        first, last = parts[self._comm.rank]
        inputs = [self._own(old.view(first, last - first))] if last > first else []
        widths = tuple(b - a for a, b in parts)
        node = Node("gather", inputs, (self._comm, widths), more={"parts": self._pipe.parts or self._pipe.num_stages})
        node.more["least"] = 1 if self._pipe.parts else LEAST_ROWS
        node.out = Value(node, old.width, SELECTED, name=old.name)
        self.nodes.append(node)
        self._new[id(old.maker)] = Node("flat", [], out=replace(node.out, start=-old.start))
        return node.out

    def _own(self, value: Value) -> Value:
        if value.maker is None:
            return value
        made = self._new[id(value.maker)].out
        assert made is not None
        return replace(value, maker=made.maker, start=value.start + made.start)

    def _add(self, node: Node) -> None:
        bound = list(node.bound)
        for at in LINES.get(node.op, ()):
            layers = self._groups[bound[at]].layers
            bound[at + 1] -= sum(layer < self._pipe.layers.start for layer in layers)
        made = replace(node, inputs=[self._own(v) for v in node.inputs], bound=tuple(bound), more=dict(node.more))
        self.nodes.append(made)
        self._new[id(node)] = made
        if node.out is not None:
            made.out = replace(node.out, maker=made)


LEAST_ROWS = 32
"""Of a part of a step, where nobody says how many there are: weights are read once for each part."""


def stage_of(graph: Graph, groups: Sequence[CacheGroup], comm: Comm, pipe: Pipe) -> Graph:
    """What this rank's stage runs of `graph`: of its last node before the head all ranks have the hidden states.

    `groups`: of all layers; the result counts the layers of a group that the stage has (`plan.stages.stage_groups`).
    `comm`: with all ranks of all stages, stage by stage. Raises: ConfigError where a cut would part layers that share
    keys and values.
    """
    return _Stage(graph, groups, comm, pipe).build()
