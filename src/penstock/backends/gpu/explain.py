"""Which operations of a model run by which kernels, and how its stored weights are multiplied: for `--explain`.

This module can be imported without torch.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from penstock.backends.gpu.fused import fuse_for_kernels
from penstock.backends.gpu.held import is_paired, product_why_not
from penstock.core.cache_spec import group_layers
from penstock.core.events import Decision
from penstock.core.held_weights import HeldWeights
from penstock.core.matrix_format import row_matrices
from penstock.core.model_spec import ModelSpec, cache_spec, weight_shapes
from penstock.model.builder import build

BY_KERNELS = ("add_rms_norm", "add_layer_norm", "rms_norm", "layer_norm", "rope_write", "activate_gated")
_UNSEEN = ("part", "heads", "flat", "columns")
"""Nothing, or next to nothing, is computed by them."""


def kernel_decisions(
    spec: ModelSpec, held: HeldWeights, *, kernels: bool, attention: str, why: str
) -> tuple[Decision, ...]:
    """`kernels`: Triton's are used; `attention`: who computes it; `why`: what decides that."""
    counts = _operations(spec, fused=kernels)
    decoded = _decoded(spec, held, kernels=kernels)
    own = {op: counts.pop(op) for op in BY_KERNELS if op in counts and kernels}
    attentions = counts.pop("attention", 0)
    products = sum(n for (who, _), n in decoded.items() if who.startswith("product_"))
    if products:
        counts["linear"] -= products
    said = []
    if own or products:
        listed = [*(f"{op} {n}" for op, n in own.items()), *([f"products with codes {products}"] if products else [])]
        said.append(f"by Triton: {', '.join(listed)}")
    said.append(f"by torch: {', '.join(f'{op} {n}' for op, n in sorted(counts.items()) if n > 0)}")
    if attentions:
        said.insert(0, f"attention {attentions} by {attention}")
    out = [Decision("kernels", "triton" if kernels else "torch", f"{why}; {'; '.join(said)}")]
    if decoded:
        lines = [f"{n} {who}{f' ({reason})' if reason else ''}" for (who, reason), n in sorted(decoded.items())]
        out.append(Decision("stored_weights", f"{sum(decoded.values())} matrices", "; ".join(lines)))
    return tuple(out)


def _operations(spec: ModelSpec, *, fused: bool) -> Counter[str]:
    """Calls of a step, by operation. `fused`: of the graph that kernels are given."""
    element = np.zeros((), np.uint16)  # weights of the right shapes that take no memory
    weights = {name: np.broadcast_to(element, shape) for name, shape in weight_shapes(spec).items()}
    groups = group_layers([cache_spec(layer, "bfloat16") for layer in spec.layers])
    graph = build(spec, weights, groups, max_model_len=1)
    graph = fuse_for_kernels(graph, products=False) if fused else graph
    return Counter(node.op for node in graph.nodes if node.op not in _UNSEEN)


def _decoded(spec: ModelSpec, held: HeldWeights, *, kernels: bool) -> Counter[tuple[str, str]]:
    """How many matrices are multiplied in which way, and why in parts."""
    found: Counter[tuple[str, str]] = Counter()
    for name, shape in row_matrices(spec).items():
        form = held.matrices.get(name)
        if form is None:
            continue
        reason = product_why_not(form, shape)
        if form.code == "grid" or form.bits > 8:
            found["decoded when they are loaded", str(form)] += 1
        elif not kernels:
            found["decoded in parts at every step", "no kernels here"] += 1
        elif reason is None:
            found[f"product_int{4 if is_paired(form, shape[1]) else 8}", ""] += 1
        else:
            found["decoded in parts at every step", reason] += 1
    return found
