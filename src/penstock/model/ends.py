"""What stands before the first layer of a decoder and behind its last: embedding, norm, output matrix."""

from __future__ import annotations

from penstock.model import residuals
from penstock.model.emitter import Emitter
from penstock.model.encoder import pooled_head


def embedding(b: Emitter) -> None:
    types = b.spec.token_types
    b.emit("embed", ("token_ids",), "x", "embed", bound=("word", b.spec.vocab_size) if types else ())
    b.scale("x", b.spec.embed_scale)
    if types:
        b.emit("embed", ("token_ids",), "y", "token_types", bound=("type", b.spec.vocab_size))
        b.emit("add", ("x", "y"), "x")
    if b.spec.embed_size is not None:
        b.linear("x", "x", "embed_in")
    if b.spec.positions:
        b.emit("embed", ("positions",), "y", "positions")
        b.emit("add", ("x", "y"), "x")
    if b.spec.embed_norm is not None:
        b.norm("x", "x", "embed_norm", b.spec.embed_norm)
    b.values["embedded"] = b.values["x"]
    residuals.begin(b)


def last(b: Emitter) -> None:
    """The hidden state of the rows that somebody wants."""
    spec = b.spec
    b.emit("select", ("x", "rows"), "x")
    residuals.end(b)
    if spec.final_norm is not None:
        b.norm("x", "x", "final_norm", spec.final_norm)
    if spec.embed_size is not None and spec.pair is None:
        b.linear("x", "x", "embed_out")


def head(b: Emitter) -> None:
    spec = b.spec
    if not spec.has_head:
        pooled_head(b, spec.pooler)
        return
    if spec.pair is not None:  # its logits are made by the model that it hangs on
        b.emit("scale", ("x",), "logits", bound=(1.0,))
        return
    bias = ("lm_head.bias",) if spec.lm_head_bias else ()
    b.emit("linear", ("x",), "logits", "embed" if spec.tie_embeddings else "lm_head", *bias)
    b.scale("logits", spec.logit_scale)
    if spec.logit_soft_cap is not None:
        b.emit("soft_cap", ("logits",), "logits", bound=(spec.logit_soft_cap,))
