"""Operations of a graph that one kernel does become one: see `kernel_ops.KernelTable`, which has them.

This module can be imported without torch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from penstock.core.matrix_format import is_kept
from penstock.model.fuse import fuse, inputs_of, readers
from penstock.model.graph import Graph, Node, Value
from penstock.ops.stored import StoredMatrix, Weight, alike


class Joined(list[Weight]):
    """Matrices [M_i, K] that are alike, to be placed as one, each below the one before."""


def fuse_for_kernels(graph: Graph, *, products: bool = True) -> Graph:
    """A copy with the fused operations of `KernelTable`: a sum with the norm of it, rotations with the cache write,
    and `products`: those of one input as one. What nobody needs in float32 is left in 16 bits."""
    graph = graph.copy()
    _fuse_norms(graph)
    _fuse_rotations(graph)
    if products:
        _join_products(graph)
        _narrow(graph)
    return graph


def _join_products(graph: Graph) -> None:
    """Products of one input, as q, k and v, or gate and up, are one with all their rows."""
    fuse(graph, ("siblings",), same=_joins)
    for node in graph.nodes:
        parts = node.more.get("parts", ())
        if len(parts) < 2:
            continue
        node.weights = tuple(part.name for part in parts)
        node.bound = (Joined(part.weight for part in parts),)
        if any(part.bias is not None for part in parts):
            own = [np.zeros(len(p.weight), np.float32) if p.bias is None else p.bias for p in parts]
            node.bound += (np.concatenate(own),)
        node.label = ", ".join(node.weights)


def _joins(a: Weight, b: Weight) -> bool:
    return alike(a, b) and a.shape[1] == b.shape[1]


def _narrow(graph: Graph) -> None:
    """Products with weights of 16 bits round their inputs to these anyway, so what only they read may be stored so, and
    what they give is rounded once where kernels read it: half the bytes, and no pass that converts.

    Marks nodes by `named["narrow"]`, the name of the type.
    """
    read_by: dict[int, list[Node | None]] = defaultdict(list)
    for node in graph.nodes:
        for v in inputs_of(node):
            read_by[id(v.maker)].append(node)
    for v in (graph.hidden, graph.logits, *graph.residuals):
        read_by[id(v.maker)].append(None)

    def kind(node: Node) -> str | None:
        """The type of a product's operands, if it has 16 bits; of what adapts it, too."""
        if node.op == "adapt":
            product = node.inputs[1].maker
            return None if product is None else kind(product)
        if node.op != "linear" or any(map(is_kept, node.weights[:1])):
            return None
        first: Any = node.bound[0][0] if isinstance(node.bound[0], Joined) else node.bound[0]
        if isinstance(first, StoredMatrix) or first.dtype == np.uint16:
            return "bfloat16"
        return "float16" if first.dtype == np.float16 else None

    def kinds(made: Node) -> str | None:
        """The type of all products that read it, if nobody else does and it is one."""
        found = {None if node is None else kind(node) for node in read_by[id(made)]}
        return found.pop() if len(found) == 1 else None

    def taken(made: Node) -> bool:
        """Whether all who read a product take 16 bits, and give it on to none who does not."""
        for reader in read_by[id(made)]:
            match None if reader is None else reader.op:
                case "rms_norm" | "layer_norm" | "add_rms_norm" | "add_layer_norm":
                    continue
                case "adapt" if reader is not None and reader.inputs[1].maker is made and taken(reader):
                    continue  # what it gives has the type of what it takes
                case "linear" | "activate_gated" | "attention" if reader is not None:
                    if reader.op == "linear" or kinds(reader) is not None:
                        continue
                case "rope_write" if reader is not None:
                    turned = read_by[id(reader)]
                    if all(r is not None and r.op == "attention" and kinds(r) is not None for r in turned):
                        continue
            return False
        return bool(read_by[id(made)])

    for node in graph.nodes:
        own = kind(node)
        if own is not None and taken(node):
            node.named = {**node.named, "narrow": own}
        if node.op in ("rms_norm", "layer_norm") and (into := kinds(node)) is not None:
            node.named = {**node.named, "narrow": into}
        if node.op == "part" and node.bound == (1,) and (into := kinds(node)) is not None:
            both = node.inputs[0].maker
            assert both is not None
            both.named = {**both.named, "narrow": into}


def _fuse_norms(graph: Graph) -> None:
    """A norm of a sum is computed with the sum. Both stay readable: as two parts of what the kernel gives."""
    for node in list(graph.nodes):
        x = node.inputs[0] if node.inputs else None
        total = None if x is None else x.maker
        if node.op not in ("rms_norm", "layer_norm") or total is None or total.op != "add" or x is None:
            continue
        assert total.out is not None
        flat_weights = all(w is None or w.ndim == 1 for w in node.bound[:-1])
        at, end = graph.nodes.index(total), graph.nodes.index(node)
        if x.heads is not None or not x.same(total.out) or not flat_weights or (at < graph.head) != (end < graph.head):
            continue
        both = Node(f"add_{node.op}", total.inputs, node.bound, label=node.label, weights=node.weights,
                    layer=total.layer)  # fmt: skip
        both.out = Value(both, total.out.width, total.out.rows, name=f"{total.out.name}+")
        graph.nodes.insert(at, both)
        graph.nodes.remove(node)
        graph.nodes.insert(at + 2, node)
        graph.head += at < graph.head
        for part, which in ((total, 0), (node, 1)):
            part.op, part.inputs, part.bound, part.label = "part", [both.out], (which,), str(which)


def _head_dim(node: Node) -> int:
    """Of what is turned: an indexer's keys may be narrower than the keys it chooses among."""
    x = node.inputs[0]
    return x.width // (x.heads or 1)


def _fuse_rotations(graph: Graph) -> None:
    """Queries and keys that are turned by the same angles, with the write of these keys and their values."""
    counts = readers(graph)
    for write in [node for node in graph.nodes if node.op == "write_kv" and not node.named.get("bounds")]:
        at = graph.nodes.index(write)
        k, v = write.inputs
        keys = k.maker
        if keys is None or keys.op != "rope" or counts[id(keys)] != 1 or v.heads is None:
            continue
        _, angles = keys.inputs
        queries = next((node for node in reversed(graph.nodes[:at]) if node.op == "rope" and node is not keys
                        and node.bound == keys.bound and node.inputs[1].same(angles)
                        and node.layer == write.layer and _head_dim(node) == _head_dim(keys)), None)  # fmt: skip
        if queries is None or any(v.maker is queries for node in graph.nodes[:at] for v in inputs_of(node)):
            continue
        queries.op, queries.inputs = "rope_write", [queries.inputs[0], keys.inputs[0], v, angles]
        queries.takes, queries.bound = write.takes, (*write.bound, *keys.bound)
        queries.label = ", ".join([write.label, queries.label])
        graph.nodes[at] = queries
        graph.nodes = [
            node for i, node in enumerate(graph.nodes) if node is not keys and (node is not queries or i == at)
        ]
        graph.head -= 2
