"""The operations of attention over a window and over entries of several tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.core.model_spec import EntryAttention
from penstock.model.emitter import Emitter, Place


def compressed(b: Emitter, p: str, m: EntryAttention, place: Place, x: str, y: str) -> None:
    """See `model.attention.attention`. Source: DeepSeek-V4 (2026), section 2.3."""
    first = m.head_dim - m.rope.dim
    b.linear(x, "q_latent", p + "q_a")
    b.raw_norm("q_latent", "q_latent", p + "q_a_norm", "rms", m.eps)
    b.linear("q_latent", "q", p + "q_b")
    b.emit("heads", ("q",), "q", bound=(m.num_heads,))
    b.raw_norm("q", "q", "", "rms", m.eps)
    b.rope("q", m.rope, first)
    b.linear(x, "kv", p + "kv")
    b.raw_norm("kv", "kv", p + "kv_norm", "rms", m.eps)
    b.emit("heads", ("kv",), "kv", bound=(1,))
    b.rope("kv", m.rope, first)
    # One plane is written where the operation takes two: the same rows twice.
    b.emit("write_kv", ("step", "kv", "kv"), "", bound=(*place, ("kv", "kv")))
    scale, sinks = m.head_dim**-0.5, b.vector(p + "sinks")
    if m.every is None:
        b.emit(
            "attention", ("q", "step"), "a", bound=place, keys=("kv",), value="kv", scale=scale, window=m.window,
            chunk=None, soft_cap=None, slopes=None, sinks=sinks, width=m.num_heads * m.head_dim,
        )  # fmt: skip
    else:
        far, chosen = _entries(b, p, m, m.every, x)
        b.emit(
            "attend_entries", ("q", "step", *chosen), "a", bound=(*place, *far, "kv", "entry"), every=m.every,
            window=m.window, scale=scale, sinks=sinks,
        )  # fmt: skip
    b.rope("a", msgspec.structs.replace(m.rope, backwards=True), first)
    b.emit("flat", ("a",), "a")
    b.emit("heads", ("a",), "a", bound=(m.out_groups,))
    b.emit("latent_output", ("a",), "a", bound=(b.of_heads(p + "o_a", m.out_groups),))
    b.emit("flat", ("a",), "a")
    b.linear("a", y, p + "o")


def _entries(b: Emitter, p: str, m: EntryAttention, every: int, x: str) -> tuple[Place, tuple[str, ...]]:
    """Make the entries that end in this step. Where they are, and the register of those that queries choose."""
    far, waiting = b.further[b.layer]
    _pool(b, p + "pool", m, every, x, (far, waiting), "entry")
    if m.indexer is None:
        return far, ()
    index = m.indexer
    _pool(b, p + "index", m, every, x, (far, waiting), "index")
    b.linear("q_latent", "index_q", p + "index_q")
    b.emit("heads", ("index_q",), "index_q", bound=(index.num_heads,))
    b.rope("index_q", m.rope, index.head_dim - m.rope.dim)
    b.linear(x, "index_weights", p + "index_weights")
    b.scale("index_weights", index.num_heads**-0.5)
    b.emit(
        "choose_entries", ("index_q", "index_weights", "step"), "chosen",
        bound=(*far, "index", index.top_k, index.head_dim**-0.5, every), width=index.top_k,
    )  # fmt: skip
    return far, ("chosen",)


def _pool(b: Emitter, p: str, m: EntryAttention, every: int, x: str, places: tuple[Place, Place], plane: str) -> None:
    far, waiting = places
    b.linear(x, "pool_value", p + "_kv")
    b.linear(x, "pool_score", p + "_gate")
    named: dict[str, Any] = {
        "bias": b.array(p + ".bias"), "weight": b.array(p + "_norm"),
        "table": b.table(m.rope), "interleaved": m.rope.interleaved,
    }  # fmt: skip
    b.emit(
        "write_entries", ("step", "pool_value", "pool_score"), "", bound=(*waiting, *far, plane), every=every,
        overlap=m.overlap, eps=m.eps, **named,
    )  # fmt: skip
