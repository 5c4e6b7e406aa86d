"""From a model's graph the part that makes keys and values out of the hidden states that pages keep of their tokens.

Source: HCache, Gao et al., arXiv 2410.05004, section 3: layers do not wait for each other, for what each one reads is
there. Here it is what the layer reads behind its norm, so that it need not be normed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.core.cache_spec import HIDDEN, CacheGroup
from penstock.model.graph import SELECTED, TOKENS, Graph, Node, Value
from penstock.ops.plan import Planes


def restoring(graph: Graph, groups: Sequence[CacheGroup], planes: Sequence[Planes]) -> Graph:
    """A graph over `planes`, which token ids are places in: token `o` of the slab that begins at page p is p * S + o.
    It writes keys and values to the tokens' positions, and its logits are of no use.

    `graph`: unfused, built with `Reading.hidden`; of one cache group.
    """
    nodes: list[Node] = []
    angles: dict[int, Node] = {}
    value = None
    for tap in graph.nodes:
        if tap.op != "write_kv" or HIDDEN not in tap.bound[2]:
            continue
        group, layer, _ = tap.bound
        (write,) = (n for n in graph.nodes if n.op == "write_kv" and n.bound[:2] == (group, layer) and n is not tap)
        plane = planes[group][HIDDEN]
        # The same token of the group's layers is one page further each, as the pages of a slab are.
        table = plane[layer:].reshape(-1, plane.shape[-1])
        read = Node("embed", [], (table,), {}, (f"layers.{tap.layer}.{HIDDEN}",), ("token_ids", 0), layer=tap.layer)
        read.label = f"{read.weights[0]} {list(table.shape)}"
        read.out = Value(read, table.shape[1], TOKENS, name=HIDDEN)
        nodes.append(read)
        source = tap.inputs[0]
        nodes += _between(graph, source, read, write, angles)
        value = read.out
    assert value is not None, "pages have hidden states"
    # A model ends in rows that are asked for; of these there are none.
    last, head = Node("select", [value], takes=("rows", 1)), Node("scale", [], (1.0,))
    last.out = Value(last, value.width, SELECTED, name=HIDDEN)
    head.inputs, head.out = [last.out], Value(head, value.width, SELECTED, name="logits")
    return replace(
        graph, nodes=[*nodes, last, head], head=len(nodes) + 1, hidden=last.out, logits=head.out, residuals=()
    )  # fmt: skip


def _between(graph: Graph, source: Value, read: Node, write: Node, angles: dict[int, Node]) -> list[Node]:
    """Copies of what leads from `source`, which `read` makes now, to `write`. Mutates: `angles`, which layers share."""
    needed, todo = {id(write)}, [write]
    while todo:
        for v in todo.pop().inputs:
            if v.maker is not None and v.maker is not source.maker and id(v.maker) not in needed:
                needed.add(id(v.maker))
                todo.append(v.maker)
    made: dict[int, Node] = {id(source.maker): read}
    out: list[Node] = []
    for node in graph.nodes:
        if id(node) not in needed:
            continue
        assert node is write or node.op != "embed", "keys and values are made of what the layer reads alone"
        if id(node) in angles:
            made[id(node)] = angles[id(node)]
            continue
        copied = replace(
            node, inputs=[replace(v, maker=made[id(v.maker)]) for v in node.inputs], more=dict(node.more)
        )  # fmt: skip
        if node.out is not None:
            copied.out = replace(node.out, maker=copied)
        made[id(node)] = copied
        if node.op == "rope_angles":
            angles[id(node)] = copied
        out.append(copied)
    return out
