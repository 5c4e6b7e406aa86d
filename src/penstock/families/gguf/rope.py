"""Positions of a GGUF file in the words of a config.json.

What scales them: metadata under `rope.`, and tensors with a divisor per pair. Source: `llama_model::load_hparams` and
`llama_context` of github.com/ggml-org/llama.cpp (which factor YaRN's growth comes to), convert_hf_to_gguf.py.
"""

from __future__ import annotations

from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.families.gguf.header import Header
from penstock.families.reading import MAX_POSITION, MAX_SIZE
from penstock.formats.files import quoted

_FREQUENCIES = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = frozenset({_FREQUENCIES, _SHORT, _LONG})
"""Tensors of positions: they are read with the metadata and are no weights."""


def head_dim(h: Header) -> int:
    """Components of a head, of which keys and values have the same number."""
    heads = max(h.per_layer("attention.head_count"))
    size = h.fields.integer("attention.key_length", high=MAX_SIZE, default=max(h.hidden_size // max(heads, 1), 1))
    values = h.fields.integer("attention.value_length", high=MAX_SIZE, default=size)
    if values != size:
        raise UnsupportedError(
            f"{quoted(h.path)} has keys of {size} and values of {values} components; one number for both is what "
            "Penstock computes"
        )
    return size


def rotated(h: Header) -> int:
    """Leading components of a head that are rotated."""
    return h.fields.integer("rope.dimension_count", high=MAX_SIZE, default=head_dim(h))


def rope(h: Header, **more: Any) -> dict[str, Any]:
    """`rope_parameters`; `more`: what the family has besides."""
    size, dim = head_dim(h), rotated(h)
    if dim != size:
        more["partial_rotary_factor"] = (dim + 0.5) / size  # families round the product down
    return scaled(h, dim, **more)


def part(h: Header) -> float:
    """`partial_rotary_factor` of a family that has it beside its positions."""
    size, dim = head_dim(h), rotated(h)
    return 1.0 if dim == size else (dim + 0.5) / size


def scaled(h: Header, dim: int, **more: Any) -> dict[str, Any]:
    """`rope_parameters` for `dim` rotated components."""
    f = h.fields
    theta = f.number("rope.freq_base", default=10000.0)
    factor = f.number("rope.scaling.factor", default=f.number("rope.scale_linear", default=1.0))
    kind = f.string("rope.scaling.type", default="linear" if factor != 1.0 else "none")
    length = f.integer("context_length", high=MAX_POSITION)
    original = f.integer("rope.scaling.original_context_length", high=MAX_POSITION, default=length)
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": theta, **more}
    if h.has(*FACTORS):
        if kind not in ("none", "longrope"):
            name = min(FACTORS & h.tensors.keys())
            raise UnsupportedError(f"{quoted(h.path)} has both {name} and rope scaling {quoted(kind)}")
        return out | _divisors(h, dim // 2, original)
    match kind:
        case "linear" if factor != 1.0:
            return out | {"rope_type": "linear", "factor": factor}
        case "none" | "linear":
            return out
        case "yarn":
            return out | _yarn(h, factor, original)
    raise UnsupportedError(
        f"{quoted(h.path)} asks for rope scaling {quoted(kind)}; known: none, linear, yarn, and longrope with the "
        "tensors of its factors"
    )


def _divisors(h: Header, pairs: int, original: int) -> dict[str, Any]:
    """LongRoPE's two lists; or one, worked out by the converter from other scalings, which holds at every length."""
    if h.has(_FREQUENCIES):
        divisors = h.numbers(_FREQUENCIES, pairs)
        return {
            "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0,
            "original_max_position_embeddings": original,
        }  # fmt: skip
    if not (h.has(_SHORT) and h.has(_LONG)):
        raise ModelError(f"{quoted(h.path)} holds only one of {_SHORT} and {_LONG}")
    out = {
        "rope_type": "longrope", "short_factor": h.numbers(_SHORT, pairs), "long_factor": h.numbers(_LONG, pairs),
        "original_max_position_embeddings": original,
    }  # fmt: skip
    if "rope.scaling.attn_factor" in h.fields:
        out["attention_factor"] = h.fields.number("rope.scaling.attn_factor")
    return out


def _yarn(h: Header, factor: float, original: int) -> dict[str, Any]:
    out: dict[str, Any] = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name, key in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
        if f"rope.scaling.yarn_{key}" in h.fields:
            out[name] = h.fields.number(f"rope.scaling.yarn_{key}")
    return out
