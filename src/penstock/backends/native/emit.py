"""Nodes -> native operations, with the memory they work in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.backends.native.entry_forms import entry_forms, stream_form
from penstock.backends.native.row_forms import row_form
from penstock.backends.native.stacks import ExpertCall, expert_stacks
from penstock.backends.native.state_forms import Form, plane_names, state_form
from penstock.core.cache_spec import CacheGroup
from penstock.core.selection import BOUNDS
from penstock.model.fuse import Part, Same, inputs_of, runs_of
from penstock.model.graph import Graph, Node, Value, layer_bounds
from penstock.ops.native.abi import ACTIVATIONS, NORMS, Kind
from penstock.ops.native.adapters import NativeTable
from penstock.ops.native.matrix import Packed, Segments
from penstock.ops.native.packers import DTYPES
from penstock.ops.native.program import ChosenPages, ExpertShare, Layout, NativeOp, RawKeys
from penstock.ops.stored import StoredMatrix, alike

if TYPE_CHECKING:
    from penstock.parallel.experts import ExpertSplit


class NotNativeError(Exception):
    """The native kernels have nothing for this part of a model; the message names it."""


Home = tuple[int, int]
"""A buffer of the layout, and the column in it where a node's result begins."""


@dataclass
class Emitted:
    """`ops[:head]` fill register `hidden`, the others turn it into register `logits`."""

    ops: list[NativeOp]
    labels: list[str]
    layout: Layout
    head: int
    hidden: int
    logits: int
    bounds: tuple[int, ...]
    """See `model.graph.layer_bounds`."""
    queries: list[tuple[int, int]]
    """Registers that keep observed queries until the next run, and into how many heads they fall."""
    tokens_read: npt.NDArray[np.int64]
    """[2], counted as they run: tokens that rehearsals chose, each for a kv head, and those they might have chosen."""
    experts: list[ExpertCall]
    split: Split | None = None
    given: int = -1
    """The register whose rows come from elsewhere (`parallel.spans`), -1: there is none."""


class Split(NamedTuple):
    """Of one stage of a pipeline: `ops[:end]` may run for parts of a step, in turn.

    `own`: the register of what the stage gives to the hidden states that all ranks get, -1: nothing. `most`, `least`:
    how many parts there are, and tokens that each has.
    """

    end: int
    own: int
    most: int
    least: int


def matrix_name(run: list[Part]) -> str:
    """What the matrix of weights that lie one below the other is called: their names."""
    return " ".join(part.name for part in run)


class Run(NamedTuple):
    """What one matrix is packed of, and whether its parts are a pair. `heads`: of how many heads the only part, [H, N,
    K] floats, has a matrix each; 0: it is none of heads."""

    parts: list[Part]
    pair: bool = False
    heads: int = 0


def matrix_runs(graph: Graph, same: Same = alike) -> dict[str, Run]:
    """Every matrix of a fused program. `same`: see `fuse`."""
    found = {}
    for node in graph.nodes:
        runs = runs_of(node.more["parts"], same) if node.op == "linear" else []
        found.update({matrix_name(run): Run(run, node.more["pair"]) for run in runs})
        if node.op in _LATENT:
            weight = node.bound[0].swapaxes(1, 2) if node.op == "latent_query" else node.bound[0]
            found[_latent_name(node)] = Run([Part(_latent_name(node), weight, None)], heads=len(weight))
    for node in graph.nodes:
        if node.op == "embed" and isinstance(node.bound[0], StoredMatrix):
            found.setdefault(node.weights[0], Run([Part(node.weights[0], node.bound[0], None)]))
    return found


SCORES = ("softmax", "sigmoid", "sparse_mixer", "sqrtsoftplus", "even")
"""How PST_ROUTE counts `core.model_spec.Router.score`."""
_LATENT = {"latent_query": "k_b", "latent_output": "v_b"}


def _latent_name(node: Node) -> str:
    if node.weights:
        return node.weights[0]
    turned = node.op == "latent_query" and node.out is not None and node.out.name != "q"
    return f"layers.{node.layer}.{node.out.name if turned and node.out is not None else _LATENT[node.op]}"


def emit(
    graph: Graph, groups: Sequence[CacheGroup], matrices: Mapping[str, Packed], *, max_tokens: int = 1,
    same: Same = alike, adapters: NativeTable | None = None,
) -> Emitted:  # fmt: skip
    """`max_tokens`: of a sequence; `same`: see `fuse`; `adapters`: of a graph with places for them.

    Raises: NotNativeError for what has no native form.
    """
    e = _Emitter(graph, groups, matrices, max_tokens, same, adapters)
    ends = [0]
    for i, node in enumerate(graph.nodes):
        e.node(i, node)
        ends.append(len(e.ops))
    return Emitted(
        e.ops, e.labels, e.layout, ends[graph.head], e.register(graph.hidden), e.register(graph.logits),
        layer_bounds(graph, ends), e.queries, e.tokens_read, e.experts, _split(graph, e, ends), e.given,
    )  # fmt: skip


def _split(graph: Graph, e: _Emitter, ends: Sequence[int]) -> Split | None:
    """See `parallel.stages`: the last node before the head spreads hidden states."""
    node = graph.nodes[graph.head - 1] if graph.head else None
    if node is None or node.op != "gather" or "parts" not in node.more:
        return None
    own = e.register(node.inputs[0]) if node.inputs else -1
    return Split(ends[graph.head - 1], own, node.more["parts"], node.more["least"])


class _Emitter:
    def __init__(
        self, graph: Graph, groups: Sequence[CacheGroup], matrices: Mapping[str, Packed], max_tokens: int, same: Same,
        adapters: NativeTable | None = None,
    ) -> None:  # fmt: skip
        self._adapters = adapters
        self.ops: list[NativeOp] = []
        self.labels: list[str] = []
        self.layout = Layout()
        self.queries: list[tuple[int, int]] = []
        self.given = -1
        self.experts: list[ExpertCall] = []
        self._groups, self._matrices, self._max_tokens, self._same = groups, matrices, max_tokens, same
        self.tokens_read = np.zeros(2, np.int64)
        self._choices: list[int] = []
        self._rehearsed: dict[tuple[int, int], int] = {}
        """Where the choice of a layer of a group is."""
        self._homes: dict[int, Home] = {}
        self._free: list[int] = []
        self._last_read = _last_reads(graph)
        self._readers = _later_readers(graph)

    # -- memory --------------------------------------------------------------------------------------------------

    def register(self, value: Value) -> int:
        buffer, start = self._homes[id(value.maker)]
        wanted = (buffer, start + value.start, value.width)
        for number, v in enumerate(self.layout.registers):
            if (v.buffer, v.start, v.width) == wanted:
                return number
        return self.layout.view(*wanted)

    def _new_home(self, node: Node, width: int | None = None) -> int:
        """A place for the node's result (or for rows of `width`) that nobody is using. Returns its register."""
        assert node.out is not None
        shape = (node.out.width if width is None else width, node.out.rows)
        free = next((b for b in self._free if self.layout.buffers[b] == shape), None)
        if free is None:
            free = self.layout.buffer(*shape)
        else:
            self._free.remove(free)
        self._homes[id(node)] = (free, 0)
        return self.register(Value(node, *shape))

    def _in_place(self, node: Node, value: Value) -> int:
        """The result of `node` lies where `value` lay."""
        buffer, start = self._homes[id(value.maker)]
        self._homes[id(node)] = (buffer, start + value.start)
        assert node.out is not None
        return self.register(node.out)

    def _is_dead(self, i: int, value: Value) -> bool:
        """No node after the i-th reads any of these numbers."""
        return not any(
            j > i and v.start < value.start + value.width and value.start < v.start + v.width
            for j, v in self._readers.get(id(value.maker), [])
        )

    def _release(self, i: int) -> None:
        """Buffers whose every tenant has been read for the last time are free."""
        busy = {self._homes[m][0] for m, last in self._last_read.items() if m in self._homes and last > i}
        held = {buffer for buffer, _ in self._homes.values()}
        for buffer in held - busy:
            if buffer not in self._free:
                self._free.append(buffer)

    # -- operations ----------------------------------------------------------------------------------------------

    def node(self, i: int, node: Node) -> None:
        if node.op == "rope_angles":
            return  # the table itself is bound to the rotation
        method = getattr(self, "_" + node.op, None)
        if method is not None:
            method(i, node)
        elif (form := state_form(node, self._planes) or row_form(node) or stream_form(node)) is not None:
            self._of_form(i, node, form)
        elif (forms := entry_forms(node, self._planes, self._max_tokens)) is not None:
            for form in forms:
                out = -1 if node.out is None else self._new_home(node)
                inputs = () if form.kind == Kind.WRITE_ENTRIES else tuple(self.register(v) for v in node.inputs)
                self._add_op(form.kind, form.label, inputs, out, n=form.n, f=form.f, pointers=form.pointers)
        else:
            raise NotNativeError(f"operation {node.op}")
        self._release(i)

    def _add_op(self, kind: Kind, label: str, inputs: tuple[int, ...], out: int, **more: Any) -> None:
        self.ops.append(NativeOp(kind, inputs, out, **more))
        self.labels.append(f"{kind.name.lower()} {label}".strip())

    def _out(self, i: int, node: Node, *candidates: Value) -> int:
        """In place on the first candidate that nobody reads afterwards, else in memory of its own."""
        assert node.out is not None
        for value in candidates:
            if value.maker is not None and value.width == node.out.width and self._is_dead(i, value):
                return self._in_place(node, value)
        return self._new_home(node)

    def _elementwise(self, i: int, node: Node, kind: Kind, **more: Any) -> None:
        inputs = tuple(self.register(v) for v in node.inputs)
        self._add_op(kind, "", inputs, self._out(i, node, *node.inputs[:2]), **more)

    def _of_form(self, i: int, node: Node, form: Form) -> None:
        inputs = tuple(self.register(v) for v in node.inputs)
        candidates = () if form.in_place is None else (node.inputs[form.in_place],)
        out = self._out(i, node, *candidates)
        if form.kind == Kind.MIX_STREAMS and out != inputs[0]:
            raise NotNativeError("streams that are read as they were, too")
        self._add_op(form.kind, form.label, inputs, out, n=form.n, f=form.f, pointers=form.pointers)

    def _embed(self, i: int, node: Node) -> None:
        table, name = node.bound[0], node.weights[0]
        coded = isinstance(table, StoredMatrix)
        by_position = int(node.takes is not None and node.takes[0] == "positions")
        part, vocab = node.bound[1:] or ("", 0)
        n = (0 if coded else int(DTYPES[table.dtype]), by_position, table.shape[0], vocab, int(part == "type"))
        pointers = (None, self._matrices[name]) if coded else (table,)
        self._add_op(Kind.EMBED, name, (), self._new_home(node), n=n, f=(1.0,), pointers=pointers)

    def _select(self, i: int, node: Node) -> None:
        self._add_op(Kind.SELECT, "", (self.register(node.inputs[0]),), self._new_home(node))

    def _rms_norm(self, i: int, node: Node) -> None:
        weight, eps = node.bound
        self._norm(i, node, "rms", weight, None, eps)

    def _layer_norm(self, i: int, node: Node) -> None:
        self._norm(i, node, "layer", *node.bound)

    def _norm(self, i: int, node: Node, kind: str, weight: Any, bias: Any, eps: float) -> None:
        x = node.inputs[0]
        stretch = x.width // (x.heads or 1)
        each = weight is not None and weight.size != stretch
        if weight is not None and weight.size not in (stretch, x.width):
            raise NotNativeError("a norm whose weights are shared by some heads")
        if bias is not None and (weight is None or bias.size != weight.size):
            raise NotNativeError("a norm whose bias is not shaped like its weights")
        pointers = tuple(None if w is None else np.ascontiguousarray(w, np.float32) for w in (weight, bias))
        inputs = (self.register(x),)
        out = self._out(i, node, x)
        self._add_op(Kind.NORM, kind, inputs, out, n=(stretch, NORMS[kind], int(each)), f=(eps,), pointers=pointers)

    def _linear(self, i: int, node: Node) -> None:
        more = node.more
        names = [matrix_name(run) for run in runs_of(more["parts"], self._same)]
        x, residual, norm = node.inputs[0], more.get("residual"), more.get("norm")
        inputs = [self.register(x)]
        if residual is not None:
            inputs.append(self.register(residual))
        kind, weight, bias, eps = "none", None, None, 0.0
        if norm is not None and norm.op == "rms_norm":
            kind, (weight, eps) = "rms", norm.bound
        elif norm is not None:
            kind, (weight, bias, eps) = "layer", norm.bound
        activation = more.get("activation")
        then = 0 if activation is None else 2 if more["pair"] else 1
        if more["pair"] and activation is None:
            then = 3
        limit = more.get("limit") or 0.0
        # Rows are read again for every stretch of outputs: the result must not lie on them.
        in_place = [] if residual is None or residual.maker is x.maker else [residual]
        out = self._out(i, node, *in_place)
        self._add_op(
            Kind.LINEAR, " ".join(names), tuple(inputs), out,
            n=(NORMS[kind], then, 0 if activation is None else ACTIVATIONS[activation], len(names)),
            f=(eps, more["factor"], limit),
            pointers=(Segments([self._matrices[name] for name in names]), weight, bias),
        )  # fmt: skip

    def _gather(self, i: int, node: Node) -> None:
        ranks, widths = node.bound
        if ranks.exchange is None:
            raise NotNativeError("ranks that share no memory")
        pointers = (ranks.exchange, np.array(widths, np.int32))
        label, inputs = f"{ranks.rank} of {ranks.size} ranks", tuple(map(self.register, node.inputs))
        self._add_op(Kind.GATHER, label, inputs, self._new_home(node), pointers=pointers)

    def _merge(self, i: int, node: Node) -> None:
        ranks, heads, dim, pairwise, sinks = node.bound
        if ranks.exchange is None:
            raise NotNativeError("ranks that share no memory")
        inputs, out = (self.register(node.inputs[0]),), self._new_home(node)
        pointers = (ranks.exchange, None if sinks is None else np.ascontiguousarray(sinks, np.float32))
        label = f"{ranks.rank} of {ranks.size} ranks"
        self._add_op(Kind.MERGE, label, inputs, out, n=(heads, dim, int(pairwise)), pointers=pointers)

    def _send(self, i: int, node: Node) -> None:
        self._add_op(Kind.SEND, "", (self.register(node.inputs[0]),), -1, pointers=node.bound)

    def _receive(self, i: int, node: Node) -> None:
        self._add_op(Kind.RECEIVE, "", (), self._new_home(node), pointers=node.bound)

    def _given(self, i: int, node: Node) -> None:
        self.given = self._new_home(node)

    def _adapt(self, i: int, node: Node) -> None:
        """In place on the product: see `fuse` for those of a pair."""
        x, y = node.inputs
        (name,), adapters = node.bound, self._adapters
        assert adapters is not None, "only a program with a table of adapters has places for them"
        if not self._is_dead(i, y):
            raise NotNativeError("an adapted product that is read unadapted too")
        half, width = node.more.get("half", (0, y.width))
        inputs, out = (self.register(x), self.register(y)), self._in_place(node, y)
        slots = adapters.of(name)
        if name in adapters.bases:
            base = adapters.bases[name]
            assert base is None or base.half == half, "pairs are pairs in both programs"
            pointers = (adapters.step, slots.codes, None if base is None else base.matrix)
            self._add_op(Kind.ADAPT_CODES, name, inputs, out, n=(width, half), pointers=pointers)
        self._add_op(
            Kind.ADAPT, name, inputs, out, n=(width, half, adapters.largest), pointers=(adapters.step, slots)
        )  # fmt: skip

    def _activate_pairs(self, i: int, node: Node) -> None:
        activation, limit = node.bound
        n, inputs = (ACTIVATIONS[activation], 1), (self.register(node.inputs[0]),)
        self._add_op(Kind.GATED, activation, inputs, self._new_home(node), n=n, f=(limit or 0.0,))

    def _rope(self, i: int, node: Node) -> None:
        x, angles = node.inputs
        interleaved, first = (*node.bound, 0)[:2]
        # A table for each run of heads is an operation for each: all of them in place, on parts of the same rows.
        assert angles.maker is not None
        (whole,) = angles.maker.bound
        tables = [whole] if whole.ndim == 3 else list(np.moveaxis(whole, 2, 0))
        assert x.heads is not None
        if not self._is_dead(i, x):
            raise NotNativeError("a rotation of something that is read unrotated too")
        heads, width = x.heads // len(tables), x.width // len(tables)
        for run, table in enumerate(tables):
            _, num_positions, half = table.shape
            n = (heads, x.width // x.heads, first, half, int(interleaved), num_positions)
            register, pointers = self.register(x.view(run * width, width)), (np.ascontiguousarray(table),)
            self._add_op(Kind.ROPE, "", (register,), register, n=n, pointers=pointers)
        self._in_place(node, x)

    def _write_kv(self, i: int, node: Node) -> None:
        a, b = node.inputs
        group, layer, names = node.bound
        planes = self._planes(group)
        assert a.heads
        assert b.heads
        n = (
            group, layer, a.heads, a.width // a.heads, b.heads, b.width // b.heads,
            *(planes.index(name) for name in (*names, *(node.named.get("bounds") or ()))),
        )  # fmt: skip
        if (share := node.named.get("share")) is not None:
            n = (*n, 0, 0, *share)
        # One plane of which the same rows are written twice is written once.
        inputs = (a,) if a.same(b) and names[0] == names[1] else (a, b)
        self._add_op(Kind.WRITE, f"group {group} layer {layer}", tuple(map(self.register, inputs)), -1, n=n)

    def _planes(self, group: int) -> list[str]:
        return plane_names(self._groups[group])

    def _observe(self, i: int, node: Node) -> None:
        q = node.inputs[0]
        assert q.heads is not None
        kept = self.layout.register(q.width)  # of no node, so nobody uses it again
        self._add_op(Kind.SCALE, "queries", (self.register(q),), kept, f=(1.0,))
        self.queries.append((kept, q.heads))

    def _attention(self, i: int, node: Node) -> None:
        group, layer = node.bound
        x, named, q = node.out, node.named, node.inputs[0]
        assert x is not None
        assert q.heads is not None
        planes = self._groups[group].spec.planes
        names = [p.name for p in planes]
        keys, value = names.index(named["keys"][0]), names.index(named["value"])
        more = 0
        if len(named["keys"]) > 1:
            more = names.index(named["keys"][1])
        n = (
            group, layer, q.heads, planes[keys].heads, q.width // q.heads, planes[value].dim, keys, value,
            named.get("window") or 0, named.get("chunk") or 0, more, planes[more].dim if more else 0,
        )  # fmt: skip
        pointers: list[Any] = [
            None if w is None else np.ascontiguousarray(w, np.float32).reshape(-1)
            for w in (named.get("slopes"), named.get("sinks"))
        ]
        share = named.get("share")
        if share is not None:
            pointers[1] = np.array(share, np.int32)
        if (rotation := named.get("rotation")) is not None:
            table, interleaved, first = rotation
            if table.ndim != 3:
                raise NotNativeError("raw keys whose heads turn differently")
            pointers.append(RawKeys(np.ascontiguousarray(table, np.float32), first=first, interleaved=interleaved))
        if (reads := named.get("pages")) is not None:
            low, high = (self._planes(group).index(name) for name in BOUNDS)
            pointers += [None] * (3 - len(pointers)) + [ChosenPages(reads, low, high, self._max_tokens)]
        inputs = tuple(self.register(v) for v in node.inputs)
        if (chosen := named.get("chosen")) is not None:
            pointers += [None] * (3 - len(pointers)) + [ChosenPages(chosen, 0, 0, self._max_tokens)]
            inputs = (*inputs, -1, self._rehearsed[group, layer])
        f = (named["scale"], named.get("soft_cap") or 0.0)
        self._add_op(
            Kind.ATTEND if share is None else Kind.ATTEND_PART,
            f"group {group} layer {layer}",
            inputs,
            self._new_home(node),
            n=n,
            f=f,
            pointers=tuple(pointers),
        )

    def _attend_chosen(self, i: int, node: Node) -> None:
        self._attention(i, node)

    def _choose_tokens(self, i: int, node: Node) -> None:
        q, weights = node.inputs
        group, layer, plane, _, scale = node.bound
        assert q.heads is not None
        n = (group, layer, q.heads, q.width // q.heads, self._planes(group).index(plane), self._max_tokens)
        inputs, label = (self.register(q), self.register(weights)), f"group {group} layer {layer}"
        self._add_op(Kind.CHOOSE, label, inputs, self._new_home(node), n=n, f=(float(scale),))

    def _rehearse(self, i: int, node: Node) -> None:
        q = node.inputs[0]
        group, layer, plane, scale, reads, late = node.bound
        assert q.heads is not None
        part = next(p for p in self._groups[group].spec.planes if p.name == plane)
        if not late:
            # Two layers' choices exist at a time. They are of no node, so nobody else uses their places.
            width = part.heads * -(-self._max_tokens // 32)
            while len(self._choices) <= layer % 2:
                self._choices.append(self.layout.register(width))
            self._rehearsed[group, layer] = self._choices[layer % 2]
        n = (group, layer, q.heads, part.heads, part.dim, self._planes(group).index(plane), int(late))
        pointers = (self.tokens_read, None, None, ChosenPages(reads, 0, 0, self._max_tokens))
        label, out = f"group {group} layer {layer}", self._rehearsed[group, layer]
        f = (float(scale), float(reads.reach))
        self._add_op(Kind.REHEARSE, label, (self.register(q),), out, n=n, f=f, pointers=pointers)

    def _latent_query(self, i: int, node: Node) -> None:
        num_heads, nope, rank = node.bound[0].shape
        self._latent(node, num_heads, rank, node.inputs[0].width // num_heads - nope)

    def _latent_output(self, i: int, node: Node) -> None:
        num_heads, width, _ = node.bound[0].shape
        self._latent(node, num_heads, width, 0)

    def _latent(self, node: Node, heads: int, width: int, rest: int) -> None:
        name, inputs = _latent_name(node), (self.register(node.inputs[0]),)
        pointers = (self._matrices[name],)
        self._add_op(Kind.LATENT, name, inputs, self._new_home(node), n=(heads, width, 0, rest), pointers=pointers)

    def _concat(self, i: int, node: Node) -> None:
        assert node.out is not None
        self._new_home(node)
        start = 0
        for x in node.inputs:
            part = self.register(node.out.view(start, x.width))
            self._add_op(Kind.SCALE, "side by side", (self.register(x),), part, f=(1.0,))
            start += x.width

    def _add(self, i: int, node: Node) -> None:
        self._elementwise(i, node, Kind.ADD, f=(float(node.more.get("factor", 0.0)),))

    def _multiply(self, i: int, node: Node) -> None:
        self._elementwise(i, node, Kind.MUL)

    def _scale(self, i: int, node: Node) -> None:
        self._elementwise(i, node, Kind.SCALE, f=(float(node.bound[0]),))

    def _clip(self, i: int, node: Node) -> None:
        self._elementwise(i, node, Kind.CLIP, f=(float(node.bound[0]),))

    def _soft_cap(self, i: int, node: Node) -> None:
        self._elementwise(i, node, Kind.SOFT_CAP, f=(float(node.bound[0]),))

    def _activate(self, i: int, node: Node) -> None:
        self._elementwise(i, node, Kind.ACT, n=(ACTIVATIONS[node.bound[0]],))

    def _activate_gated(self, i: int, node: Node) -> None:
        activation, limit = (*node.bound, None)[:2]
        self._elementwise(i, node, Kind.GATED, n=(ACTIVATIONS[activation],), f=(limit or 0.0,))

    def _xielu(self, i: int, node: Node) -> None:
        self._elementwise(i, node, Kind.ACT, n=(ACTIVATIONS["xielu"],), f=tuple(map(float, node.bound)))

    def _gate_rows(self, i: int, node: Node) -> None:
        x, gate = node.inputs
        n = (int("softplus" in node.bound),)
        if gate.width in (1, x.width):
            inputs = (self.register(x), self.register(gate))
            self._add_op(Kind.GATE_ROWS, "", inputs, self._out(i, node, x), n=n)
            return
        # A gate for each head is an operation for each, in place on parts of the same rows.
        if not self._is_dead(i, x):
            raise NotNativeError("a gate of heads that are read as they were, too")
        for head in range(gate.width):
            part = self.register(x.view(head * (x.width // gate.width), x.width // gate.width))
            self._add_op(Kind.GATE_ROWS, "", (part, self.register(gate.view(head, 1))), part, n=n)
        self._in_place(node, x)

    def _stack_streams(self, i: int, node: Node) -> None:
        self._new_home(node)
        for k, x in enumerate(node.inputs):
            assert node.out is not None
            part = self.register(node.out.view(k * x.width, x.width))
            self._add_op(Kind.SCALE, "", (self.register(x),), part, f=(1.0,))

    def _add_streams(self, i: int, node: Node) -> None:
        x, y = node.inputs
        if not self._is_dead(i, x):
            raise NotNativeError("streams that are read as they were, too")
        for start in range(y.width, x.width, y.width):
            part = self.register(x.view(start, y.width))
            self._add_op(Kind.ADD, "", (part, self.register(y)), part)
        self._in_place(node, x)

    def _route_listed(self, i: int, node: Node) -> None:
        top_k, router, table, *scale = node.bound
        scales = np.ascontiguousarray(scale[0], np.float32) if scale and scale[0] is not None else None
        pointers = (None, scales, np.ascontiguousarray(table, np.int32))
        n = (top_k, SCORES.index(router.score), 1, 1, 0, int(router.renormalize), 0, int(len(table) == 1))
        inputs = (self.register(node.inputs[0]),)
        self._add_op(
            Kind.ROUTE, "listed", inputs, self._new_home(node, 2 * top_k), n=n, f=(router.scale,), pointers=pointers
        )

    def _route(self, i: int, node: Node) -> None:
        top_k, router, *vectors = node.bound
        inputs = (self.register(node.inputs[0]),)
        n = (
            top_k, SCORES.index(router.score), router.groups, router.top_groups, int(router.group_score == "top2"),
            int(router.renormalize), int(router.chosen_only),
        )  # fmt: skip
        # What is added to the scores for the choice, and what the experts' weights are multiplied by.
        pointers = tuple(None if x is None else np.ascontiguousarray(x, np.float32) for x in vectors)
        # An id and a weight of each of the K experts, where the node has K of what nobody names.
        out = self._new_home(node, 2 * top_k)
        self._add_op(Kind.ROUTE, "", inputs, out, n=n, f=(router.scale, 2 * router.jitter), pointers=pointers)

    def _experts(self, i: int, node: Node) -> None:
        x, routes = node.inputs
        stacks, named, weights = expert_stacks(node, self._same), node.named, node.bound[0]
        assert routes.maker is not None
        top_k = routes.maker.bound[0]
        inputs = (self.register(x), self.register(Value(routes.maker, 2 * top_k, routes.rows)))
        share: ExpertSplit | None = named.get("shared")
        total = share.starts[-1] if share is not None and share.starts else len(weights)
        n = (total, top_k, int(named["scale_input"]), ACTIVATIONS[named["activation"]])
        pointers: tuple[Any, ...] = tuple(
            Segments([self._matrices[run.name] for run in runs]) if runs else None
            for runs in (stacks.first, stacks.beside, stacks.down)
        )
        if share is not None:
            pointers = (*pointers, ExpertShare(share.comm.exchange, share.widths, share.starts))
        label = f"{weights[0].name}... of {total}"
        # Rows are read again for every panel: the result must not lie on them.
        out = self._new_home(node)
        f = (named["limit"] or 0.0,)
        self._add_op(Kind.EXPERTS, label, inputs, out, n=n, f=f, pointers=pointers)
        self.experts.append(ExpertCall(len(self.ops) - 1, inputs[0], inputs[1], routes.rows, top_k, stacks))

    def _scale_queries(self, i: int, node: Node) -> None:
        beta, floor, shift = node.bound
        self._elementwise(i, node, Kind.SCALE_QUERIES, f=(float(beta), float(floor), float(shift)))


def _last_reads(graph: Graph) -> dict[int, int]:
    """Node -> place of the last node that reads its result; what leaves the program is read at the very end.

    A result that lies in place keeps its buffer busy by itself: its own readers count for it.
    """
    last: dict[int, int] = {}
    for i, node in enumerate(graph.nodes):
        last[id(node)] = max(i, last.get(id(node), i))
        for v in inputs_of(node):
            if v.maker is not None:
                last[id(v.maker)] = i
    for v in (graph.hidden, graph.logits):
        last[id(v.maker)] = len(graph.nodes)
    return last


def _later_readers(graph: Graph) -> dict[int, list[tuple[int, Value]]]:
    """Node -> (place, value) of everything that reads its result."""
    out: dict[int, list[tuple[int, Value]]] = {}
    for i, node in enumerate(graph.nodes):
        for v in inputs_of(node):
            if v.maker is not None:
                out.setdefault(id(v.maker), []).append((i, v))
    for v in (graph.hidden, graph.logits):
        out.setdefault(id(v.maker), []).append((len(graph.nodes), v))
    return out
