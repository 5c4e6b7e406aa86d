"""Rotary positions of a config.json, in both layouts that transformers has used, and for layers of several kinds.

Before version 5 of transformers: `rope_theta` beside `rope_scaling`. Since then: all of it in `rope_parameters`, which
may hold one object per kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import ModelError, UnsupportedError
from penstock.core.model_spec import Rope
from penstock.families.fields import Fields
from penstock.families.reading import MAX_POSITION, WHERE
from penstock.formats.files import quoted

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def read_rope(
    fields: Fields, head_dim: int, max_position: int, *, theta: float = 10000.0, partial: float | None = None,
    interleaved: bool = False, layer_kind: str | None = None, partial_name: str = "partial_rotary_factor",
) -> Rope:  # fmt: skip
    """The rope of a config, or of its layers of `layer_kind`. `theta`, `partial`: the family's defaults; without the
    latter the family rotates whole heads.

    `max_position`: the config's own longest context; what a missing original context or YaRN factor follow from.
    Raises ModelError if fields are missing or contradict each other, UnsupportedError for other kinds of scaling.
    """
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    if new is not None and layer_kind is not None and (inner := new.section(layer_kind)) is not None:
        new = inner
    if old is not None and new is not None:
        raise ModelError(f"{WHERE} gives both rope_scaling and rope_parameters; leave one out")
    outer_theta = fields.number("rope_theta") if "rope_theta" in fields else None
    outer_partial = fields.number(partial_name) if partial_name in fields else None
    scaling = new or old or Fields({}, WHERE)
    found_theta = scaling.number("rope_theta", default=theta if outer_theta is None else outer_theta)
    if outer_theta is not None and found_theta != outer_theta:
        raise ModelError(f"{WHERE} gives rope_theta twice, as {outer_theta:g} and as {found_theta:g}")
    part = scaling.number(partial_name, default=(partial or 1.0) if outer_partial is None else outer_partial)
    if outer_partial is not None and part != outer_partial:
        raise ModelError(f"{WHERE} gives {partial_name} twice, as {outer_partial:g} and as {part:g}")
    if partial is None and part != 1.0:
        raise UnsupportedError(f"{WHERE} sets {partial_name} to {part:g}, but this family rotates whole heads")
    dim = int(head_dim * part)
    if part > 1.0 or dim < 2 or dim % 2:
        raise ModelError(f"{WHERE}: {partial_name} {part:g} of a head dimension {head_dim} leaves no whole pairs")
    rope = read_scaling(scaling, fields, Rope(dim=dim, theta=found_theta, interleaved=interleaved), max_position)
    scaling.refuse_unread()
    return rope


def read_ropes(
    fields: Fields, head_dim: int, max_position: int, thetas: Mapping[str, tuple[str, float]], *,
    scaled: str = "full_attention",
) -> dict[str, Rope]:  # fmt: skip
    """Kind of layer -> rope, for families where each kind has its own.

    `thetas`: for each kind the field that held its theta before `rope_parameters`, and the default. `rope_scaling`,
    the old layout, is about layers of the kind `scaled`. Raises as `read_rope`.
    """
    old, new = fields.section("rope_scaling"), fields.section("rope_parameters")
    if old is not None and new is not None:
        raise ModelError(f"{WHERE} gives both rope_scaling and rope_parameters; leave one out")
    out = {}
    for kind, (name, default) in thetas.items():
        section = (old if kind == scaled else None) if new is None else new.section(kind)
        section = section or Fields({}, WHERE)
        given = fields.number(name) if name in fields else None
        theta = section.number("rope_theta", default=default if given is None else given)
        if given is not None and theta != given:
            raise ModelError(f"{WHERE} gives two thetas for {kind}: {name} {given:g} and rope_theta {theta:g}")
        out[kind] = read_scaling(section, fields, Rope(dim=head_dim, theta=theta), max_position)
        section.refuse_unread()
    if new is not None:
        new.refuse_unread()
    return out


def one_axis(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json whose positions have three axes, for images, as that of a text: there a token stands at the same
    position on each, so that heads turn as with plain rotary positions (Wang et al., arXiv 2409.12191, section 2.1)."""
    out = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(given := out.get(key), Mapping):
            rope = {name: value for name, value in given.items() if name not in ("mrope_section", "mrope_interleaved")}
            out[key] = rope | {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
    return out


def read_scaling(scaling: Fields, outer: Fields, rope: Rope, max_position: int) -> Rope:
    """The plain `rope`, stretched as `scaling` says; `outer` is the object around it. See `read_rope`."""
    kind = scaling.string("rope_type", default=scaling.string("type", default="default"))
    if scaling.string("type", default=kind) != kind:
        raise ModelError(f"{WHERE} gives two kinds of rope scaling, {quoted(kind)} and another under type")
    kind = {"su": "longrope"}.get(kind, kind)  # the name in the first Phi-3 configs
    common = {"dim": rope.dim, "theta": rope.theta, "interleaved": rope.interleaved}
    match kind:
        case "default":
            return rope
        case "linear":
            return Rope(kind="linear", factor=scaling.number("factor"), **common)  # type: ignore[arg-type]
        case "dynamic":
            if rope.dim < 4:
                raise ModelError(f"{WHERE}: dynamic rope scaling needs at least two pairs")
            factor = scaling.number("factor", above=1.0)
            return Rope(kind="dynamic", factor=factor, original_max_position=max_position, **common)  # type: ignore[arg-type]
        case "llama3":
            low = scaling.number("low_freq_factor")
            high = scaling.number("high_freq_factor")
            if high < low:
                raise ModelError(f"{WHERE} gives high_freq_factor {high:g}, below low_freq_factor {low:g}")
            return Rope(
                kind="llama3", factor=scaling.number("factor"), low_freq_factor=low,
                high_freq_factor=high,
                original_max_position=scaling.integer("original_max_position_embeddings", high=MAX_POSITION),
                **common,  # type: ignore[arg-type]
            )  # fmt: skip
        case "yarn":
            return _yarn(scaling, rope, max_position)
        case "proportional":
            return Rope(
                kind="proportional", factor=scaling.number("factor", default=1.0),
                part=scaling.number("partial_rotary_factor", default=1.0), **common,  # type: ignore[arg-type]
            )  # fmt: skip
        case "longrope":
            return _longrope(scaling, outer, rope, max_position)
    raise UnsupportedError(f"{WHERE} asks for rope scaling of the kind {quoted(kind)}; known kinds: {', '.join(KINDS)}")


def mscale(factor: float, by: float = 1.0) -> float:
    """YaRN's growth of attention with the context. Source: Peng et al., arXiv 2309.00071, section 3.4."""
    return 1.0 if factor <= 1.0 else 0.1 * by * math.log(factor) + 1.0


def _yarn(scaling: Fields, rope: Rope, max_position: int) -> Rope:
    original = scaling.integer("original_max_position_embeddings", high=MAX_POSITION)
    factor = scaling.number("factor", default=max_position / original)
    given = scaling.number("attention_factor") if "attention_factor" in scaling else None
    by, by_all = (
        scaling.number("mscale", default=0.0, above=-1.0),
        scaling.number("mscale_all_dim", default=0.0, above=-1.0),
    )
    attention = (
        given if given is not None else mscale(factor, by) / mscale(factor, by_all) if by and by_all else mscale(factor)
    )
    return Rope(
        kind="yarn", dim=rope.dim, theta=rope.theta, interleaved=rope.interleaved, factor=factor,
        original_max_position=original, attention_factor=attention,
        beta_fast=scaling.number("beta_fast", default=32.0), beta_slow=scaling.number("beta_slow", default=1.0),
        truncate=scaling.flag("truncate", default=True),
    )  # fmt: skip


def _longrope(scaling: Fields, outer: Fields, rope: Rope, max_position: int) -> Rope:
    """`original_max_position_embeddings` stands beside the section in Phi-3's files and inside it elsewhere."""
    name = "original_max_position_embeddings"
    source = scaling if name in scaling else outer
    original = source.integer(name, high=MAX_POSITION, default=max_position)
    if name in outer:
        outer.integer(name, high=MAX_POSITION)
    factor = scaling.number("factor", default=max_position / original)
    attention = 1.0 if factor <= 1.0 or original < 2 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Rope(
        kind="longrope", dim=rope.dim, theta=rope.theta, interleaved=rope.interleaved, original_max_position=original,
        attention_factor=scaling.number("attention_factor", default=attention),
        short_factor=_factors(scaling, "short_factor", rope.dim),
        long_factor=_factors(scaling, "long_factor", rope.dim),
    )  # fmt: skip


def _factors(scaling: Fields, name: str, dim: int) -> tuple[float, ...]:
    values: Sequence[float] = scaling.numbers(name)
    if len(values) != dim // 2:
        raise ModelError(f"{WHERE} gives {len(values)} numbers as {name}, but {dim // 2} pairs are rotated")
    return tuple(values)
