"""Operations of a graph that one kernel does become one: see `kernel_ops.KernelTable`, which has them.

This module can be imported without torch.
"""

from __future__ import annotations

from penstock.model.fuse import inputs_of, readers
from penstock.model.graph import Graph, Node, Value


def fuse_for_kernels(graph: Graph) -> Graph:
    """A copy with the fused operations of `KernelTable`: a sum with the norm of it, rotations with the cache write."""
    graph = graph.copy()
    _fuse_norms(graph)
    _fuse_rotations(graph)
    return graph


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
                        and node.layer == write.layer), None)  # fmt: skip
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
