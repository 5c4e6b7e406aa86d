"""A model's graph in pieces that run one after the other, forwards and backwards, for a few tokens of a text each.

A piece is a layer, or what stands before the first or behind the last. Between pieces only values that others read are
kept, and of attention its keys and values; going back, a piece is computed once more and differentiated. So a slice of
tokens in one layer is the unit of work, and a text may be as long as memory allows. Slices go back in the opposite
order: those behind have added to the gradients of a slice's keys and values by then.
Source: FlexLLM, Miao et al., arXiv 2402.18789, section 6 (token-level finetuning).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.backends.gpu.ops import PLAIN, rope_angles
from penstock.backends.gpu.train.frozen import FrozenMatrix, Wide, vector_of
from penstock.base.errors import UnsupportedError
from penstock.model.graph import NO_LAYER, Graph, Node, Value

_OPS = frozenset({
    "select", "rope_angles", "linear", "rms_norm", "layer_norm", "rope", "activate", "activate_gated", "xielu", "add",
    "multiply", "scale", "clip", "soft_cap", "gate_rows", "scale_queries", "interpolate", "concat",
})  # fmt: skip
Place = tuple[int, int]
"""A cache group, and the layer in it."""


class Tuned(Protocol):
    """What is trained at one product."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [t, K] -> [t, N], of the frozen `weight` [N, K] and what is trained."""
        ...


class Head(NamedTuple):
    """What makes logits of hidden states: a matrix, its bias, and operations on each logit by itself."""

    matrix: FrozenMatrix
    bias: Tensor | None
    after: Sequence[Node]


class Text:
    """A text's numbers between pieces: [T, ...] each."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.ids = torch.tensor(token_ids, dtype=torch.int64)
        self.length = len(token_ids)
        self.values: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor] = {}
        self.kv: dict[Place, tuple[Tensor, Tensor]] = {}
        self.kv_grads: dict[Place, tuple[Tensor, Tensor]] = {}


class _Run:
    """One piece over tokens a ... b - 1 of a text."""

    def __init__(self, text: Text, a: int, b: int) -> None:
        self.text, self.a, self.b = text, a, b
        self.outs: dict[int, Tensor] = {}
        self.leaves: dict[int, Tensor] = {}
        self.own: dict[Place, tuple[Tensor, Tensor]] = {}
        self.before: dict[Place, tuple[Tensor, Tensor]] = {}


class GraphPieces:
    """Raises: UnsupportedError for a model with operations that are not differentiated here."""

    def __init__(self, graph: Graph, tuned: Mapping[str, Tuned]) -> None:
        """`tuned`: by the names of the weights of products."""
        self._graph, self._tuned, self._wide = graph, tuned, Wide()
        for node in graph.nodes:
            _check(node)
        layers = [node.layer for node in graph.nodes[: graph.head]]
        first = next((i for i, layer in enumerate(layers) if layer != NO_LAYER), graph.head)
        behind = max((i + 1 for i, layer in enumerate(layers) if layer != NO_LAYER), default=first)
        cuts = [0, first]
        cuts += [i for i in range(first + 1, behind) if layers[i] != layers[i - 1] and layers[i] != NO_LAYER]
        cuts += [behind, graph.head]
        self._pieces = [graph.nodes[lo:hi] for lo, hi in pairwise(cuts)]
        self._of = {id(node): n for n, nodes in enumerate(self._pieces) for node in nodes}
        self._frozen = {id(n): FrozenMatrix(n.bound[0]) for n in graph.nodes if n.op in ("linear", "embed")}
        self._bound = {
            id(n): [vector_of(x) for x in (n.bound[1:] if n.op in ("linear", "embed") else n.bound)]
            for n in graph.nodes
        }
        self._read_by_others = self._crossing()
        self._trained_from = self._first_tuned()
        ends = graph.nodes[graph.head :]
        product = ends[0]
        self.head = Head(self._frozen[id(product)], next(iter(self._bound[id(product)]), None), ends[1:])

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    @property
    def first_tuned(self) -> int:
        """The first piece in which something is trained: nothing goes back beyond it."""
        return self._trained_from

    def _first_tuned(self) -> int:
        found = [n for n, nodes in enumerate(self._pieces) for node in nodes if _name(node) in self._tuned]
        return min(found, default=len(self._pieces))

    def _crossing(self) -> set[int]:
        """Nodes whose values another piece, or the head, reads."""
        found = {id(self._graph.hidden.maker)}
        for n, nodes in enumerate(self._pieces):
            for value in (v for node in nodes for v in node.inputs):
                if value.maker is not None and self._of[id(value.maker)] != n and value.maker.op != "rope_angles":
                    found.add(id(value.maker))
        return found

    def forward(self, piece: int, text: Text, a: int, b: int) -> None:
        """Mutates: the text's values, keys and values of these tokens."""
        with torch.no_grad():
            run = self._run(piece, text, a, b, leaves=False)
            for key, own in run.outs.items():
                if key in self._read_by_others:
                    _into(text.values, key, own.reshape(b - a, -1), text.length, a, b)
            for place, pair in run.own.items():
                if place not in text.kv:
                    made = [torch.zeros(text.length, *x.shape[1:]) for x in pair]
                    text.kv[place] = made[0], made[1]
                for whole, part in zip(text.kv[place], pair, strict=True):
                    whole[a:b] = part

    def backward(self, piece: int, text: Text, a: int, b: int) -> None:
        """Mutates: gradients of what is trained, and of what earlier pieces and tokens gave."""
        run = self._run(piece, text, a, b, leaves=True)
        ends: list[Tensor] = []
        grads: list[Tensor] = []
        for key, own in run.outs.items():
            if key in self._read_by_others and key in text.grads and own.requires_grad:
                ends.append(own)
                grads.append(text.grads[key][a:b].reshape(own.shape))
        for place, pair in run.own.items():
            for own, grad in zip(pair, text.kv_grads.get(place, ()), strict=False):
                if own.requires_grad:
                    ends.append(own)
                    grads.append(grad[a:b])
        if not ends:
            return
        torch.autograd.backward(ends, grads)
        for key, leaf in run.leaves.items():
            if leaf.grad is not None:
                _add(text.grads, key, leaf.grad, text.length, a, b)
        for place, pair in run.before.items():
            for i, leaf in enumerate(pair):
                if leaf.grad is not None:
                    whole = text.kv_grads.get(place)
                    if whole is None:
                        made = [torch.zeros_like(x) for x in text.kv[place]]
                        whole = text.kv_grads[place] = made[0], made[1]
                    whole[i][: len(leaf)] += leaf.grad

    def begin(self, piece: int) -> Iterator[None]:
        """Its matrices are made ready, a few rows for each step."""
        for node in self._pieces[piece]:
            if node.op == "linear":
                yield from self._wide.fill(self._frozen[id(node)])

    def left(self) -> None:
        """Another piece is next."""
        self._wide.clear()

    def hidden(self, text: Text, a: int, b: int) -> Tensor:
        """What the head reads."""
        return text.values[id(self._graph.hidden.maker)][a:b]

    def add_hidden_grad(self, text: Text, grad: Tensor, a: int, b: int) -> None:
        _add(text.grads, id(self._graph.hidden.maker), grad, text.length, a, b)

    def _run(self, piece: int, text: Text, a: int, b: int, *, leaves: bool) -> _Run:
        run = _Run(text, a, b)
        for node in self._pieces[piece]:
            own = self._node(node, run, leaves)
            if own is not None:
                run.outs[id(node)] = own
        return run

    def _node(self, node: Node, run: _Run, leaves: bool) -> Tensor | None:
        bound = self._bound[id(node)]
        if node.op == "rope_angles":
            return rope_angles(torch.arange(run.a, run.b), *bound)
        if node.op == "embed":
            by_position = node.takes is not None and node.takes[0] == "positions"
            ids = torch.arange(run.a, run.b) if by_position else run.text.ids[run.a : run.b]
            return self._frozen[id(node)].take(ids)
        inputs = [self._read(value, run, leaves) for value in node.inputs]
        match node.op:
            case "select":
                return inputs[0]
            case "write_kv":
                run.own[node.bound[:2]] = inputs[0], inputs[1]
                return None
            case "attention":
                return self._attend(node, inputs[0], run, leaves)
            case "linear":
                weight, bias = self._wide.of(self._frozen[id(node)]), next(iter(bound), None)
                tuned = self._tuned.get(_name(node) or "")
                if tuned is not None:
                    return tuned.product(inputs[0], weight, bias)
                return torch.nn.functional.linear(inputs[0], weight, bias)
            case "scale_queries":
                inputs.append(torch.arange(run.a, run.b))
        out: Tensor = PLAIN[node.op](*inputs, *bound, **node.named)
        return out

    def _read(self, value: Value, run: _Run, leaves: bool) -> Tensor:
        maker = value.maker
        assert maker is not None, "what a piece reads was made"
        own = run.outs.get(id(maker))
        if maker.op == "rope_angles":
            return own if own is not None else rope_angles(
                torch.arange(run.a, run.b), *self._bound[id(maker)]
            )  # fmt: skip
        if own is None:
            own = run.leaves.get(id(maker))
        if own is None:
            own = run.text.values[id(maker)][run.a : run.b]
            if leaves and self._of[id(maker)] >= self._trained_from:
                own = own.detach().requires_grad_()
            run.leaves[id(maker)] = own
        flat = own.reshape(len(own), -1)
        if (value.start, value.width) != (0, flat.shape[1]):
            flat = flat[:, value.start : value.start + value.width]
        return flat if value.heads is None else flat.reshape(len(flat), value.heads, -1)

    def _attend(self, node: Node, q: Tensor, run: _Run, leaves: bool) -> Tensor:
        place: Place = node.bound[:2]
        own = run.own.get(place)
        if place not in run.before:
            count = run.b if own is None else run.a  # another layer's, or this one's tokens before
            kept = run.text.kv.get(place)
            if kept is None:
                assert own is not None
                kept = own[0][:0], own[1][:0]
            parts = [x[:count].detach() for x in kept]
            if leaves:
                parts = [x.requires_grad_() for x in parts]
            run.before[place] = parts[0], parts[1]
        k, v = run.before[place]
        if own is not None and len(k):
            k, v = torch.cat([k, own[0]]), torch.cat([v, own[1]])
        elif own is not None:
            k, v = own
        named = node.named
        return _attention(
            q, k, v, run.a, named["scale"], named.get("window"), named.get("chunk"), named.get("soft_cap"),
            vector_of(named.get("slopes")), vector_of(named.get("sinks")),
        )  # fmt: skip


def _attention(
    q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None, chunk: int | None,
    soft_cap: float | None, slopes: Tensor | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """q [t, H, D] of the tokens from `first` on, over k [n, G, D] and v [n, G, W] of the first n -> [t, H, W]."""
    t, heads, _ = q.shape
    n, groups, width = v.shape
    grouped = q.reshape(t, groups, heads // groups, -1).permute(1, 2, 0, 3)
    s = torch.matmul(grouped, k.permute(1, 2, 0)[:, None]) * scale
    if soft_cap is not None:
        s = torch.tanh(s / soft_cap) * soft_cap
    at, of = torch.arange(first, first + t)[:, None], torch.arange(n)[None]
    if slopes is not None:
        s = s - slopes.reshape(groups, -1, 1, 1) * (at - of)
    seen = of <= at
    if window is not None:
        seen = seen & (of > at - window)
    if chunk is not None:
        seen = seen & (of >= at // chunk * chunk)
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.reshape(groups, -1, 1, 1).expand(*s.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(s, dim=-1)[..., :n]
    out = torch.matmul(weights, v.permute(1, 0, 2)[:, None])
    return out.permute(2, 0, 1, 3).reshape(t, heads, width)


def _name(node: Node) -> str | None:
    return node.weights[0] if node.op == "linear" else None


def _check(node: Node) -> None:
    match node.op:
        case "write_kv":
            fits = tuple(node.bound[2]) == ("k", "v") and not node.named
        case "attention":
            others = [node.named.get(name) for name in ("rotation", "kept", "pages", "chosen")]
            fits = tuple(node.named["keys"]) == ("k",) and others == [None] * 4
        case "embed":
            fits = not (len(node.bound) > 1 and node.bound[1])
        case _:
            fits = node.op in _OPS
    if not fits:
        raise UnsupportedError(
            f"training: this model has the operation {node.op}, whose gradients are not worked out here; models of "
            "plain attention and feed-forward layers can be trained"
        )


def _into(to: dict[int, Tensor], key: int, part: Tensor, length: int, a: int, b: int) -> None:
    if key not in to:
        to[key] = torch.zeros(length, *part.shape[1:])
    to[key][a:b] = part


def _add(to: dict[int, Tensor], key: int, part: Tensor, length: int, a: int, b: int) -> None:
    if key not in to:
        to[key] = torch.zeros(length, *part.shape[1:])
    to[key][a:b] += part
