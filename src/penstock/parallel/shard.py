"""One rank's part of a model: every product by its outputs, attention by heads of keys and values.

A product's outputs are shared out in runs of rows of its weights, so each of them is computed by one rank as it would
be alone: whatever the number of ranks, the bits are the same. What ranks have is put side by side where an operation
needs whole rows (`gather`), and stays apart where it does not: an activation, a rotation of heads, attention over a
rank's own heads. Megatron-LM (Shoeybi et al., arXiv 1909.08053, section 3) splits every second product by inputs
instead and adds the sums of ranks up, here in the order of ranks: two exchanges a layer instead of four, and other
bits (`sums`).

Or attention is shared out by tokens: a rank keeps every so-manieth token's keys and values and finds what all heads
make of those; what ranks have found is merged, each rank its own heads (`merge`; DistAttention: Lin et al.,
Infinite-LLM, arXiv 2401.02669). Nobody needs a head's keys whole then, and fewer heads of keys than ranks
are no copies. Softmax sums are taken in another order than by one rank: other bits, the same on all ranks.

What no rule here knows runs whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.core.cache_spec import CacheGroup
from penstock.model.graph import Graph, Node, Value, result_of
from penstock.ops.adapters import LowRank, Rescaled
from penstock.parallel.comm import Comm
from penstock.parallel.experts import ExpertSplit, by_outputs, rows_of
from penstock.plan.ranks import LEAST_ROWS, UNIT, Ranges, expert_ranges, output_ranges

_BY_COLUMNS = {"activate", "activate_gated", "xielu", "multiply", "add", "scale", "clip", "soft_cap"}
"""Operations whose result in a column needs their inputs in that column only."""
ANY_BLOCKS = -1
"""For the number of ranks that tokens go round: each block lies on one of them, and the plan says which are here."""
_BY_HEADS = {"rope", "rms_norm", "layer_norm", "hadamard", "scale_queries"}
"""The same of heads, if their first input has heads."""


@dataclass
class _Made:
    """What became of a node's result: the rank's own columns, all of them, or both."""

    width: int
    own: Value | None = None
    ranges: Ranges = ()
    whole: Value | None = None


def head_ranges(num_heads: int, dim: int, size: int) -> Ranges:
    """Columns of `num_heads` heads for `size` ranks; where there are fewer heads than ranks, several have the same."""
    if num_heads >= size:
        assert num_heads % size == 0, f"{num_heads} heads for {size} ranks"
        each = num_heads // size
        return tuple((r * each * dim, (r + 1) * each * dim) for r in range(size))
    assert size % num_heads == 0, f"{num_heads} heads for {size} ranks"
    return tuple((r * num_heads // size * dim, (r * num_heads // size + 1) * dim) for r in range(size))


def outputs_of(part: LowRank, first: int, last: int) -> LowRank:
    """What an adapter does to outputs first ... last - 1 of a product."""
    codes = part.codes
    if isinstance(codes, Rescaled):
        matrix, bias = codes.matrix, codes.bias
        codes = Rescaled(
            codes.scales[first:last], None if matrix is None else matrix.rows(first, last),
            None if bias is None else bias[first:last],
        )  # fmt: skip
    elif codes is not None:
        codes = codes.rows(first, last)
    gain, shift = (None if v is None else v[first:last] for v in (part.gain, part.shift))
    return part._replace(b=np.ascontiguousarray(part.b[first:last]), gain=gain, shift=shift, codes=codes)


class _Shard:
    def __init__(
        self, graph: Graph, groups: Sequence[CacheGroup], comm: Comm, sums: bool, whole_experts: bool, pairwise: bool
    ) -> None:  # fmt: skip
        self._graph, self.comm, self._sums = graph, comm, sums
        self._whole_experts, self._pairwise = whole_experts, pairwise
        self._made: dict[int, _Made] = {}
        self.nodes: list[Node] = []
        self.rows: dict[str, tuple[int, int]] = {}
        """The rows of each weight that this rank has, where it has not all of them."""
        self._tables = {node.weights[0] for node in graph.nodes if node.op == "embed"}
        self._split = split_groups(graph, groups)
        self._by_tokens = {group.index for group in groups if group.spec.ranks > 1}
        self._whole_blocks = {group.index for group in groups if group.spec.whole}
        self._wanted = self._head_products()

    # -- what is split how ---------------------------------------------------------------------------------------

    def _head_products(self) -> dict[int, Ranges]:
        """Products whose outputs are heads that attention is split by, and how; where it is by tokens, heads are made
        apart as far as each has one rank."""
        found: dict[int, Ranges] = {}
        for node in self._graph.nodes:
            if node.op not in ("write_kv", "attention") or node.bound[0] not in self._split | self._by_tokens:
                continue
            for value in node.inputs:
                maker = _product_of(value)
                if maker is not None and maker.out is not None and value.heads:
                    if node.bound[0] in self._by_tokens and value.heads % self.comm.size:
                        continue
                    ranges = head_ranges(value.heads, value.width // value.heads, self.comm.size)
                    if value.heads < self.comm.size and not self._only_attended(maker):
                        continue
                    if maker.out.width == value.width and found.setdefault(id(maker), ranges) != ranges:
                        del found[id(maker)]
        return found

    def _only_attended(self, maker: Node) -> bool:
        """Nobody needs all of this product: where several ranks have the same heads, nobody could put it together."""
        for node in self._graph.nodes:
            if not any(value.maker is maker for value in node.inputs):
                continue
            attends = node.op in ("write_kv", "attention") and node.bound[0] in self._split
            if not attends and not (
                node.op in _BY_HEADS and node.inputs[0].maker is maker and self._only_attended(node)
            ):
                return False
        return True

    def _ranges(self, node: Node) -> Ranges:
        """Of the outputs of a product; nothing if every rank has all of them."""
        return self._wanted[id(node)] if id(node) in self._wanted else self._even(node.bound[0].shape[0])

    def _even(self, rows: int) -> Ranges:
        return output_ranges(rows, self.comm.size, UNIT, LEAST_ROWS) if self.comm.size > 1 else ()

    # -- values --------------------------------------------------------------------------------------------------

    def whole(self, value: Value) -> Value:
        """All columns of `value`, gathered if need be."""
        if value.maker is None:
            return value
        made = self._made[id(value.maker)]
        if made.whole is None:
            assert made.own is not None
            assert made.own.maker is not None
            own = made.own.view(0, made.own.width)
            widths = tuple(last - first for first, last in made.ranges)
            assert [r[0] for r in made.ranges[1:]] == [r[1] for r in made.ranges[:-1]], "every column is of one rank"
            node = Node("gather", [own], (self.comm, widths), layer=made.own.maker.layer)
            node.out = made.whole = result_of(node, value.name)
            self.nodes.append(node)
        assert made.whole is not None
        return made.whole.view(value.start, value.width, value.heads, value.name)

    def own(self, value: Value, ranges: Ranges) -> Value | None:
        """This rank's columns of `value`; None if they are not there and all of them are not, either."""
        if value.maker is None:
            return None
        made, (first, last) = self._made[id(value.maker)], ranges[self.comm.rank]
        if value.heads is not None and not _whole_heads(ranges, value.width // value.heads):
            return None
        heads = None if value.heads is None else value.heads * (last - first) // value.width
        if made.own is not None and made.ranges == ranges and (value.start, value.width) == (0, made.width):
            return made.own.view(0, last - first, heads, value.name)
        if made.whole is not None:
            return made.whole.view(value.start + first, last - first, heads, value.name)
        return None

    def ranges_of(self, value: Value) -> Ranges:
        """How `value` is split; nothing if it is whole already, or a part of something."""
        if value.maker is None:
            return ()
        made = self._made[id(value.maker)]
        return made.ranges if made.whole is None and (value.start, value.width) == (0, made.width) else ()

    # -- nodes ---------------------------------------------------------------------------------------------------

    def node(self, node: Node) -> None:
        if self._sums and node.op == "linear" and self._partial_sums(node):
            return
        if node.op == "linear" and (ranges := self._ranges(node)):
            self._linear(node, ranges)
            return
        if node.op in ("write_kv", "attention") and node.bound[0] in self._split:
            self._attention(node)
            return
        if node.op == "experts" and self.comm.exchange is not None and self._experts(node):
            return
        if node.op in ("write_kv", "attention") and node.bound[0] in self._by_tokens:
            self._attention_by_tokens(node)
            return
        ranges = self.ranges_of(node.inputs[0]) if node.inputs else ()
        if ranges and node.out is not None and node.out.heads is not None:
            ranges = ranges if _whole_heads(ranges, node.out.width // node.out.heads) else ()
        if ranges and (node.op in _BY_COLUMNS or (node.op in _BY_HEADS and _falls_by_heads(node))):
            by_columns = node.op in _BY_COLUMNS
            parts = [self.own(v, ranges) if by_columns or i == 0 else v for i, v in enumerate(node.inputs)]
            if all(part is not None for part in parts):
                inputs = [
                    part if by_columns or i == 0 else self.whole(part)
                    for i, part in enumerate(parts)
                    if part is not None
                ]
                self._add(node, inputs, ranges, **self._bound_by_heads(node, ranges))
                return
        self._whole(node)

    def _linear(self, node: Node, ranges: Ranges) -> None:
        first, last = ranges[self.comm.rank]
        weight, *bias = node.bound
        self.rows[node.weights[0]] = (first, last)
        bound = (rows_of(weight, first, last), *(None if b is None else b[first:last] for b in bias))
        name, *more = node.weights
        if name in self._tables:  # looked up whole, too: another matrix
            name = "own." + name
        self._add(node, [self.whole(node.inputs[0])], ranges, bound=bound, weights=(name, *more))

    def _experts(self, node: Node) -> bool:
        """Some outputs of every expert, or some experts, as native kernels exchange them; False: too few outputs."""
        weights, comm, named = node.bound[0], self.comm, dict(node.named)
        outputs: Ranges = ()
        if self._whole_experts:
            ranges = expert_ranges(len(weights), comm.size)
            own = weights[slice(*ranges[comm.rank])]
            named["shared"] = ExpertSplit(comm, starts=(*(first for first, _ in ranges), len(weights)))
        else:
            inner, outputs = self._even(weights[0].up.shape[0]), self._even(weights[0].down.shape[0])
            if not inner and not outputs:
                return False
            own = by_outputs(weights, inner, outputs, comm.rank)
            if inner:
                named["shared"] = ExpertSplit(comm, widths=tuple(last - first for first, last in inner))
        self._add(node, [self.whole(v) for v in node.inputs], outputs, bound=(own,), named=named)
        return True

    def _partial_sums(self, node: Node) -> bool:
        """The product by this rank's inputs alone, and the sum of all ranks'; False if its inputs are not apart."""
        ranges, weight = self.ranges_of(node.inputs[0]), node.bound[0]
        if not ranges or not isinstance(weight, np.ndarray) or node.out is None:
            return False
        own = self.own(node.inputs[0], ranges)
        if own is None:
            return False
        (first, last), bias = ranges[self.comm.rank], node.bound[1:]
        bound = (np.ascontiguousarray(weight[:, first:last]), *(bias if self.comm.rank == 0 else ()))
        part = replace(node, inputs=[own], bound=bound, weights=node.weights[: len(bound)], more={})
        part.out = replace(node.out, maker=part)
        gathered = Node("gather", [part.out], (self.comm, (node.out.width,) * self.comm.size), layer=node.layer)
        gathered.out = result_of(gathered, node.out.name)
        assert gathered.out is not None
        self.nodes += [part, gathered]
        total = gathered.out.view(0, node.out.width)
        for rank in range(1, self.comm.size):
            more = gathered.out.view(rank * node.out.width, node.out.width)
            add = Node("add", [total, more], layer=node.layer)
            add.out = total = Value(add, node.out.width, node.out.rows, name=node.out.name)
            self.nodes.append(add)
        self._made[id(node)] = _Made(node.out.width, whole=total)
        return True

    def _attention(self, node: Node) -> None:
        parts = []
        for value in node.inputs:
            assert value.heads
            ranges = head_ranges(value.heads, value.width // value.heads, self.comm.size)
            part = self.own(value, ranges)
            if part is None:
                self.whole(value)
                part = self.own(value, ranges)
            assert part is not None
            parts.append(part)
        if node.out is None:
            self._add(node, parts, ())
            return
        assert node.out.heads
        out = head_ranges(node.out.heads, node.out.width // node.out.heads, self.comm.size)
        dim = node.out.width // node.out.heads
        first, last = (column // dim for column in out[self.comm.rank])
        named = dict(node.named)
        for name in ("slopes", "sinks"):
            if named.get(name) is not None:
                named[name] = np.asarray(named[name]).reshape(-1)[first:last]
        self._add(node, parts, out, named=named)

    def _attention_by_tokens(self, node: Node) -> None:
        """Every rank writes what is its own of whole keys and values, and reads it with whole queries."""
        comm = self.comm
        ranks = ANY_BLOCKS if node.bound[0] in self._whole_blocks else comm.size
        inputs, named = [self.whole(v) for v in node.inputs], node.named | {"share": (ranks, comm.rank)}
        if node.out is None:
            self._add(node, inputs, (), named=named)
            return
        width, heads = node.out.width, node.out.heads
        assert heads
        ranges = head_ranges(heads, width // heads, comm.size)
        first, last = ranges[comm.rank]
        sinks = named.pop("sinks", None)
        if sinks is not None:  # once for all tokens
            sinks = np.asarray(sinks).reshape(-1)[first * heads // width : last * heads // width]
        part = replace(node, inputs=inputs, named=named, more=dict(node.more))
        part.out = Value(part, width + 2 * heads, node.out.rows, name=node.out.name)
        pairwise = self._pairwise and comm.size & (comm.size - 1) == 0
        merge = Node("merge", [part.out], (comm, heads, width // heads, pairwise, sinks), layer=node.layer)
        merge.out = replace(node.out, maker=merge, width=last - first, heads=heads // comm.size)
        self.nodes += [part, merge]
        self._made[id(node)] = _Made(width, merge.out, ranges)

    def _bound_by_heads(self, node: Node, ranges: Ranges) -> dict[str, Any]:
        """Weights of norms that every head has of its own."""
        x = node.inputs[0]
        if node.op not in ("rms_norm", "layer_norm") or x.heads is None:
            return {}
        dim = x.width // x.heads
        first, last = (column // dim for column in ranges[self.comm.rank])
        bound = tuple(b[first:last] if isinstance(b, np.ndarray) and b.ndim == 2 else b for b in node.bound)
        return {"bound": bound}

    def _whole(self, node: Node) -> None:
        self._add(node, [self.whole(v) for v in node.inputs], ())

    def _add(self, node: Node, inputs: Sequence[Value], ranges: Ranges, **changed: Any) -> None:
        made = replace(node, inputs=list(inputs), more=dict(node.more), **changed)
        self.nodes.append(made)
        if node.out is None:
            return
        width, heads = node.out.width, node.out.heads
        if not ranges:
            made.out = replace(node.out, maker=made)
            self._made[id(node)] = _Made(width, whole=made.out)
            return
        first, last = ranges[self.comm.rank]
        own_heads = None if heads is None else heads * (last - first) // width
        made.out = replace(node.out, maker=made, width=last - first, heads=own_heads)
        self._made[id(node)] = _Made(width, made.out, ranges)


def _product_of(value: Value) -> Node | None:
    """The product that heads come from, through what is done to each of them by itself."""
    maker = value.maker
    while maker is not None and maker.op in _BY_HEADS | _BY_COLUMNS and maker.inputs:
        if maker.inputs[0].width != value.width:
            return None
        maker = maker.inputs[0].maker
    return maker if maker is not None and maker.op == "linear" else None


def _whole_heads(ranges: Ranges, dim: int) -> bool:
    return all(column % dim == 0 for run in ranges for column in run)


def _falls_by_heads(node: Node) -> bool:
    """Whether each head of the first input goes its own way."""
    x = node.inputs[0]
    if x.heads is None:
        return False
    if node.op == "rope":
        angles = node.inputs[1].maker
        return angles is not None and angles.bound[0].ndim == 3
    return all(b.ndim < 2 or b.shape[0] == x.heads for b in node.bound if isinstance(b, np.ndarray))


def split_groups(graph: Graph, groups: Sequence[CacheGroup]) -> set[int]:
    """The cache groups whose planes hold a rank's heads only (`plan.ranks.ranked_groups` has decided)."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op != "write_kv":
            continue
        group, planes = groups[node.bound[0]], node.bound[2]
        heads = {plane.name: plane.heads for plane in group.spec.planes}
        if any(heads[name] < (value.heads or 0) for name, value in zip(planes, node.inputs, strict=True)):
            found.add(node.bound[0])
    return found


def shard(
    graph: Graph,
    groups: Sequence[CacheGroup],
    comm: Comm,
    *,
    sums: bool = False,
    whole_experts: bool = False,
    pairwise: bool = False,
    body: Comm | None = None,
) -> tuple[Graph, Mapping[str, tuple[int, int]]]:
    """What this rank runs of `graph`, and the rows of each weight that it has, where it has not all of them.

    `groups`: of the rank (`plan.ranks.ranked_groups`). `sums`: products whose inputs ranks have parts of are split by
    inputs, where weights are plain numbers. `whole_experts`: each rank has some experts of a mixture, not some outputs
    of all; every layer has one for each rank at least. `pairwise`: what ranks found of tokens is merged as in a tree,
    where their number is a power of two. `body`: with the ranks that share the layers, if not all do; the head is
    shared out to all.
    """
    made = _Shard(graph, groups, body or comm, sums, whole_experts, pairwise)
    head = 0
    for i, node in enumerate(graph.nodes):
        if i == graph.head:
            made.whole(graph.hidden)
            made.comm, head = comm, len(made.nodes)
        made.node(node)
    residuals = tuple(made.whole(v) for v in graph.residuals) if graph.residuals else ()
    hidden, logits = made.whole(graph.hidden), made.whole(graph.logits)
    if graph.head >= len(graph.nodes):
        head = len(made.nodes)
    sharded = replace(graph, nodes=made.nodes, head=head, hidden=hidden, logits=logits, residuals=residuals)
    return sharded, made.rows
