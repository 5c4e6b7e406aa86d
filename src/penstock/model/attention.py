"""The operations of one attention half."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from penstock.core.cache_spec import HIDDEN
from penstock.core.model_spec import Attention, Indexer, Latent, QkNorm, QueryScale
from penstock.core.selection import BOUNDS
from penstock.model.emitter import Emitter, Place
from penstock.model.rehearsal import keep_part, rehearse_next
from penstock.ops.ref.rotary import rope_table


def attention(
    b: Emitter, p: str, m: Attention, place: Place, x: str, y: str,
    product: Callable[[str, str, str], None] | None = None,
) -> None:  # fmt: skip
    """Register x -> register y; `p`: prefix of the layer's weights. Keys and values that another layer keeps are there
    already. `product`: what multiplies a register, to another, with the matrix `q`, `k`, `v` or `o`, if they are not
    the layer's own."""
    if product is None:
        product = partial(_product, b, p)
    rehearse_next(b, place)
    made = ("q", "k", "v") if m.kv_from is None else ("q",)
    for name, heads in zip(made, (m.num_heads, m.num_kv_heads, m.num_kv_heads), strict=False):
        if name == "v" and m.v_from_k:
            b.values["v"] = b.values["k"]
        else:
            product(x, name, name)
        if name != "v" and m.qk_norm is not None and m.qk_norm.over == "all":
            _qk_norm(b, p, name, m.qk_norm)
        if m.clip is not None:
            b.emit("clip", (name,), name, bound=(m.clip,))
        if name == "v":
            b.scale("v", m.value_scale)
        b.emit("heads", (name,), name, bound=(heads,))
    if m.v_norm is not None and m.kv_from is None:
        b.raw_norm("v", "v", "", "rms", m.v_norm)
    if m.key_bias:
        b.emit("flat", ("v",), "bias")
        b.linear("bias", "bias", p + "bias_dt")
    per_head = m.qk_norm if m.qk_norm is not None and m.qk_norm.over != "all" else None
    for name in made[:2]:
        if per_head is not None and not per_head.after_rope:
            _qk_norm(b, p, name, per_head)
        if m.rope is not None and not (name == "k" and b.reading.raw_keys):
            b.rope(name, m.rope)
        if per_head is not None and per_head.after_rope:
            _qk_norm(b, p, name, per_head)
    if m.query_scale is not None:
        _grow(b, m.query_scale)
    kept, turned = b.kept.get(b.layer), b.rotation == "hadamard"
    for name in made if turned else ():
        b.emit("hadamard", (name,), name)
    scale = m.head_dim**-0.5 if m.scale is None else m.scale
    if m.key_bias:
        b.emit("biased_heads", ("k", "bias"), "k", bound=(b.array(p + "bias_a"), 1.0 / scale))
        b.emit("biased_heads", ("q", "q"), "q", bound=(None, 1.0))
    # Pages have bounds where the layer that keeps them chooses among them.
    keeper = b.layer if m.kv_from is None else m.kv_from
    reads = b.reading.pages if b.reading.pages is not None and keeper >= b.reading.pages.dense_layers else None
    bounded: dict[str, Any] = {} if reads is None else {"bounds": BOUNDS}
    if m.kv_from is not None:
        pass
    elif kept is None:
        b.emit("write_kv", ("step", "k", "v"), "", bound=(*place, ("k", "v")), **bounded)
    else:
        b.emit("write_kept", ("step", "k", "v"), "", bound=(*place, kept))
    if b.reading.hidden:
        # One plane is written where the operation takes two: the same rows twice.
        b.emit("heads", (x,), "hidden", bound=(1,))
        b.emit("write_kv", ("step", "hidden", "hidden"), "", bound=(*place, (HIDDEN, HIDDEN)))
    chosen = keep_part(b, m, place)
    if b.reading.observe and m.kv_from is None:
        b.emit("observe", ("q", "step"), "", bound=place)
    more: dict[str, Any] = {} if reads is None else {"pages": reads}
    if chosen is not None:
        more["chosen"] = chosen
    if kept is not None:
        more["kept"] = kept
    if b.reading.raw_keys and m.rope is not None:
        more["rotation"] = (rope_table(m.rope, b.max_model_len), m.rope.interleaved, 0)
    slopes = None if m.alibi is None else np.array(m.alibi.slopes(m.num_heads), np.float32)
    b.emit(
        "attention", ("q", "step"), "a", bound=place, keys=("k",), value="v", scale=scale,
        window=m.window, chunk=m.chunk, soft_cap=m.soft_cap,
        slopes=slopes, sinks=b.vector(p + "sinks"), width=m.num_heads * m.value_dim, **more,
    )  # fmt: skip
    if turned:
        b.emit("hadamard", ("a",), "a")
    if m.head_gate:
        _gate_heads(b, p, x, m.num_heads, m.gate)
    b.emit("flat", ("a",), "a")
    if m.output_gate:
        b.linear(x, "gate", p + "o_gate")
        b.emit("gate_rows", ("a", "gate"), "a", bound=(m.gate,))
    if m.o_norm is not None:
        b.raw_norm("a", "a", p + "o_norm", "rms", m.o_norm)
    product("a", y, "o")


def _product(b: Emitter, p: str, x: str, y: str, name: str) -> None:
    b.linear(x, y, p + name)


def _grow(b: Emitter, s: QueryScale) -> None:
    b.emit("scale_queries", ("q", "positions"), "q", bound=(s.beta, s.floor, s.shift))


def _gate_heads(b: Emitter, p: str, x: str, heads: int, by: str = "sigmoid") -> None:
    b.linear(x, "gate", p + "o_gate")
    b.emit("heads", ("gate",), "gate", bound=(heads,))
    b.emit("gate_rows", ("a", "gate"), "a", bound=(by,))


def _qk_norm(b: Emitter, p: str, name: str, norm: QkNorm) -> None:
    weights = f"{p}{name}_norm"
    if norm.over == "split":
        num_heads = sum(key.startswith(weights + ".") for key in b.weights)
        weight: Any = np.stack([b.array(f"{weights}.{i}") for i in range(num_heads)]) + np.float32(norm.offset)
        if norm.kind == "layer":
            b.emit("layer_norm", (name,), name, bound=(weight, None, norm.eps))
        else:
            b.emit("rms_norm", (name,), name, bound=(weight, norm.eps))
        return
    if norm.in_query:
        weight = None if name == "k" else b.array(p + "q_norm") * b.array(p + "k_norm")
        b.emit("rms_norm", (name,), name, bound=(weight, norm.eps))
        return
    b.raw_norm(name, name, weights, norm.kind, norm.eps, norm.offset)


def latent(b: Emitter, p: str, m: Latent, place: Place, x: str, y: str) -> None:
    """See `attention`. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C."""
    if m.q_rank is None:
        b.linear(x, "q", p + "q")
    else:
        b.linear(x, "q", p + "q_a")
        b.raw_norm("q", "q", p + "q_a_norm", "rms", m.eps)
        if m.indexer is not None:
            _choice(b, p, m.indexer, place, x, "q")
        b.linear("q", "q", p + "q_b")
    b.emit("heads", ("q",), "q", bound=(m.num_heads,))
    if m.rope is not None:
        b.rope("q", m.rope, first=m.nope_dim)
    if m.query_scale is not None:
        _grow(b, m.query_scale)
    b.linear(x, "kv", p + "kv_a")
    b.emit("columns", ("kv",), "latent", bound=(0, m.kv_rank))
    b.raw_norm("latent", "latent", p + "kv_a_norm", "rms", m.eps)
    b.emit("heads", ("latent",), "latent", bound=(1,))
    b.emit("columns", ("kv",), "k_rope", bound=(m.kv_rank, m.kv_rank + m.rope_dim))
    b.emit("heads", ("k_rope",), "k_rope", bound=(1,))
    if m.rope is not None:
        b.rope("k_rope", m.rope)
    b.emit("write_kv", ("step", "latent", "k_rope"), "", bound=(*place, ("latent", "k_rope")))
    if m.split:
        k_b, v_b = (b.of_heads(p + name, m.num_heads) for name in ("k_b", "v_b"))
    else:
        kv_b = b.of_heads(p + "kv_b", m.num_heads)
        k_b, v_b = kv_b[:, : m.nope_dim], kv_b[:, m.nope_dim :]
    b.emit("latent_query", ("q",), "q", bound=(k_b,))
    sparse = m.indexer is not None or m.reads_choice
    op, inputs = ("attend_chosen", ("q", "chosen", "step")) if sparse else ("attention", ("q", "step"))
    b.emit(
        op, inputs, "a", bound=place, keys=("latent", "k_rope"), value="latent",
        scale=(m.nope_dim + m.rope_dim) ** -0.5 if m.scale is None else m.scale, width=m.num_heads * m.kv_rank,
    )  # fmt: skip
    b.emit("latent_output", ("a",), "a", bound=(v_b,))
    if m.head_gate:
        _gate_heads(b, p, x, m.num_heads)
    b.emit("flat", ("a",), "a")
    b.linear("a", y, p + "o")


def _choice(b: Emitter, p: str, m: Indexer, place: Place, x: str, q: str) -> None:
    """Register "chosen", which later layers find, too. `x`: the layer's input, `q`: the query's normed latent."""
    b.linear(q, "index_q", p + "index_q")
    b.emit("heads", ("index_q",), "index_q", bound=(m.num_heads,))
    b.rope("index_q", m.rope)
    b.linear(x, "index_k", p + "index_k")
    b.raw_norm("index_k", "index_k", p + "index_k_norm", "layer", m.eps)
    b.emit("heads", ("index_k",), "index_k", bound=(1,))
    b.rope("index_k", m.rope)
    # One plane is written where the operation takes two: the same rows twice.
    b.emit("write_kv", ("step", "index_k", "index_k"), "", bound=(*place, ("index", "index")))
    b.linear(x, "index_weights", p + "index_weights")
    b.scale("index_weights", m.num_heads**-0.5)
    b.emit(
        "choose_tokens", ("index_q", "index_weights", "step"), "chosen",
        bound=(*place, "index", m.top_k, m.head_dim**-0.5), width=m.top_k,
    )  # fmt: skip
