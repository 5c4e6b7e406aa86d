"""Fields of families that mix attention with states or convolutions, and of experts beside a shared one, from the
metadata of a GGUF file; see `readers`."""

from __future__ import annotations

from typing import Any

from penstock.base.errors import ModelError
from penstock.families.gguf import readers as r
from penstock.families.gguf.header import Header
from penstock.families.gguf.rope import rope
from penstock.families.reading import MAX_EXPERTS, MAX_SIZE
from penstock.formats.files import quoted


def rows_of(h: Header, ending: str) -> int:
    """Rows of the first tensor of this name in any block; 0 if there is none. What the metadata say of a shared
    expert's width differs between versions of the converter."""
    for i in range(h.num_layers):
        found = h.tensors.get(f"blk.{i}.{ending}")
        if found is not None:
            return found.shape[0]
    return 0


def shared_width(h: Header) -> int:
    """Width of what all tokens pass through beside the experts; 0 if there is nothing."""
    for name in ("expert_shared_feed_forward_length", "expert_shared_count"):
        h.fields.raw(name)
    return rows_of(h, "ffn_up_shexp.weight")


def num_shared(h: Header) -> int:
    """How many experts wide that is."""
    width = h.fields.integer("expert_feed_forward_length", high=MAX_SIZE)
    if shared_width(h) % width:
        raise ModelError(f"{quoted(h.path)} has a shared expert that is not some experts of width {width}")
    return shared_width(h) // width


def kinds(attends: str, other: str) -> r.Read:
    """The kind of every layer: those with kv heads attend."""
    return lambda h: [attends if n else other for n in h.per_layer("attention.head_count_kv")]


def experts_or_none(h: Header) -> int:
    """Granite 4 has models without experts; their files say nothing, or 0."""
    return h.fields.integer("expert_count", low=0, high=MAX_EXPERTS, default=0)


def hybrid_width(h: Header) -> int:
    """`shared_intermediate_size` of Granite 4: what all tokens pass through is all there is without experts."""
    return shared_width(h) if experts_or_none(h) else rows_of(h, "ffn_up.weight")


def hybrid_rope(h: Header) -> dict[str, Any]:
    h.fields.flag("rope.scaling.finetuned")
    return rope(h)


def positions(h: Header) -> str:
    """Granite 4 attends without positions, unless its file says that it was trained with them (Bamba was)."""
    return "rope" if h.fields.flag("rope.scaling.finetuned") else "nope"
