"""A layer's attention, rehearsed in the layer before it: which tokens it will read is known before it runs.

The residual stream changes slowly, so a layer's query weights on what the layer *before* reads give nearly its queries;
and some components of keys, the leading ones once heads are turned, give nearly their products.

Source: InfiniGen, Lee et al., arXiv 2406.19707, sections 4.2 (skewing) and 4.3 (rehearsal). Other than there the turn
comes behind the rotary positions, with which it does not commute.
"""

from __future__ import annotations

import numpy as np

from penstock.core.mixers.attention import Attention
from penstock.core.selection import PARTIAL, TokenReads
from penstock.model.emitter import Emitter, Place


def rehearse_next(b: Emitter, place: Place) -> None:
    """For the layer behind this one, whose residual is in register x: register `aheadN`, and its choice of tokens."""
    n = b.layer + 1
    reads = _reads(b, n)
    if reads is None or n >= len(b.spec.layers):
        return
    layer, ahead = b.spec.layers[n], f"ahead{n}"
    m = layer.mixer
    assert isinstance(m, Attention), "plan.keeping has looked"
    b.norm("x", ahead, f"layers.{n}.attn_norm", layer.norm)
    b.linear(ahead, ahead, f"layers.{n}.q")
    b.emit("heads", (ahead,), ahead, bound=(m.num_heads,))
    if m.rope is not None:
        b.rope(ahead, m.rope)
    _turn(b, n, ahead, ahead, m.num_heads)
    _rehearse(b, m, Place(place.group, place.layer + 1), ahead, reads, late=False)


def keep_part(b: Emitter, m: Attention, place: Place) -> TokenReads | None:
    """Keep those components of this layer's keys, in register k, that rehearsals read; and choose for those tokens
    whose predecessors run in the same step, which have their keys only now. Returns what the layer reads, if it was
    rehearsed."""
    reads = _reads(b, b.layer)
    if reads is None:
        return None
    _turn(b, b.layer, "k", "part", m.num_kv_heads)
    b.emit("write_kv", ("step", "part", "part"), "", bound=(*place, (PARTIAL, PARTIAL)))
    _rehearse(b, m, place, f"ahead{b.layer}", reads, late=True)
    return reads


def _reads(b: Emitter, n: int) -> TokenReads | None:
    reads = b.reading.tokens
    return reads if reads is not None and n >= reads.dense_layers else None


def _turn(b: Emitter, n: int, x: str, out: str, num_heads: int) -> None:
    if b.reading.turns is None:
        b.values[out] = b.values[x]
        return
    turns = b.reading.turns[n]  # [G, D, R]
    b.emit("latent_query", (x,), out, bound=(np.repeat(turns, num_heads // len(turns), axis=0),))


def _rehearse(b: Emitter, m: Attention, place: Place, ahead: str, reads: TokenReads, *, late: bool) -> None:
    scale = m.head_dim**-0.5 if m.scale is None else m.scale
    b.emit("rehearse", (ahead, "step"), "", bound=(*place, PARTIAL, scale, reads, late))
