"""Other rotary positions than a checkpoint's own: what `rope_scaling` and `rope_theta` make of a model.

Training free, or what the checkpoint was fine-tuned with: linear interpolation (Chen et al., arXiv 2306.15595),
NTK-aware and YaRN (Peng et al., arXiv 2309.00071), LongRoPE (Ding et al., arXiv 2402.13753), and factors per head
(Ms-PoE: Zhang et al., arXiv 2403.04797) on top of any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.base.errors import ConfigError, ModelError, UnsupportedError
from penstock.config import ModelConfig
from penstock.config.positions import parse_rope_scaling, wrong
from penstock.core.events import Decision
from penstock.core.model_spec import Attention, Latent, Layer, ModelSpec, Rope
from penstock.families.fields import Fields
from penstock.families.positions import read_scaling
from penstock.families.reading import MAX_POSITION

WHERE = "rope_scaling"
_ORIGINAL = "original_max_position_embeddings"


def stretched(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    """`spec` with the positions that the settings ask for; `spec` itself if they ask for none.

    Layers that look back a bounded way, in a model whose layers have ropes of several kinds, keep theirs: no distance
    in them grows. All others get the kind that is asked for, in place of what the checkpoint has.

    Raises ConfigError for a model without rotary positions, and for numbers that do not fit the model.
    """
    given = parse_rope_scaling(config.rope_scaling)
    if given is None and config.rope_theta is None:
        return spec
    field = "rope_theta" if given is None else WHERE
    chosen = _chosen(spec, field)
    theta = config.rope_theta
    if given is None:
        assert theta is not None
        ropes = {n: msgspec.structs.replace(_rope(spec.layers[n]), theta=theta) for n in chosen}
        return _with_ropes(spec, ropes)
    inner = given.pop("rope_theta", None)
    if theta is not None and inner is not None and theta != inner:
        raise wrong(f"rope_theta: is {inner!r} here and {theta:g} beside it; give it once")
    original = _original(spec, given, chosen)
    factors = _head_factors(spec, given.pop("head_factors", None), chosen)
    try:
        ropes = {n: _stretch(_rope(spec.layers[n]), given, theta or inner, original) for n in chosen}
    except (ModelError, UnsupportedError) as error:
        # They were written for a config.json; here it is the setting that gives or lacks something.
        text = str(error).removeprefix("config.json").removeprefix(WHERE)
        raise wrong(text.removeprefix(":").strip()) from None
    ropes = {n: msgspec.structs.replace(rope, head_factors=factors.get(n, ())) for n, rope in ropes.items()}
    longest = int(original * given.get("factor", 1.0))
    if longest > MAX_POSITION:
        raise wrong(f"factor: makes a context of {longest} positions; at most {MAX_POSITION} are possible")
    keeps_length = given["rope_type"] == "default" and _ORIGINAL not in given
    return _with_ropes(spec, ropes, spec.max_position if keeps_length else longest)


def stretch_decision(before: ModelSpec, after: ModelSpec) -> tuple[Decision, ...]:
    """For `--explain`: what was changed; nothing if nothing was."""
    if before is after:
        return ()
    n = next(i for i, (a, b) in enumerate(zip(before.layers, after.layers, strict=True)) if a is not b)
    rope = _rope(after.layers[n])
    longer = f", so a context of {before.max_position} positions becomes one of {after.max_position}"
    why = f"settings replace the checkpoint's {_rope(before.layers[n]).kind} positions"
    return (Decision("rope", rope.kind, why + longer * (before.max_position != after.max_position)),)


def _chosen(spec: ModelSpec, field: str) -> list[int]:
    """The layers whose rope changes."""
    with_rope = [n for n, layer in enumerate(spec.layers) if getattr(layer.mixer, "rope", None) is not None]
    if not with_rope:
        raise ConfigError(
            f"{field}: this model has no rotary positions (its family is {spec.family}); leave {field} away",
            field=field,
        )
    if len({_rope(spec.layers[n]) for n in with_rope}) == 1:
        return with_rope
    return [n for n in with_rope if spec.layers[n].mixer.reach is None] or with_rope  # type: ignore[union-attr]


def _rope(layer: Layer) -> Rope:
    assert isinstance(layer.mixer, Attention | Latent)
    assert layer.mixer.rope is not None
    return layer.mixer.rope


def _original(spec: ModelSpec, given: Mapping[str, Any], chosen: list[int]) -> int:
    """The context that the weights were trained for."""
    kinds = {_rope(spec.layers[n]).kind for n in chosen} - {"default"}
    if _ORIGINAL not in given and kinds:
        raise wrong(
            f"{_ORIGINAL}: is missing; the checkpoint's own positions are stretched already ({min(kinds)}), so the "
            "context before that has to be said"
        )
    if kinds and any(isinstance(spec.layers[n].mixer, Latent) for n in chosen):
        raise wrong("latent attention whose checkpoint stretches its positions keeps the checkpoint's own")
    original = given.get(_ORIGINAL, spec.max_position)
    if type(original) is not int or not 0 < original <= MAX_POSITION:
        raise wrong(f"{_ORIGINAL}: must be an integer from 1 to {MAX_POSITION}, not {original!r}")
    return original


def _stretch(plain: Rope, given: Mapping[str, Any], theta: Any, original: int) -> Rope:
    """`plain` is only asked for its shape and its theta. Raises ModelError, UnsupportedError."""
    kind, pairs = given["rope_type"], plain.dim // 2
    if kind == "ntk" and pairs < 2:
        raise ModelError(f"{WHERE} of the kind ntk needs at least two pairs")
    read = dict(given)
    if kind in ("llama3", "yarn", "longrope"):
        read[_ORIGINAL] = original
    else:
        read.pop(_ORIGINAL, None)
    if kind == "longrope":
        read.setdefault("short_factor", [1.0] * pairs)
    fields = Fields(read | {"rope_theta": plain.theta if theta is None else theta}, WHERE)
    rope = Rope(dim=plain.dim, theta=fields.number("rope_theta"), interleaved=plain.interleaved)
    if kind == "ntk":
        return msgspec.structs.replace(rope, kind="ntk", factor=fields.number("factor"))
    start = fields.integer("start_tokens", low=0, high=original, default=0)
    rope = read_scaling(fields, Fields({}, WHERE), rope, original)
    fields.refuse_unread()
    return msgspec.structs.replace(rope, start_tokens=start)


def _head_factors(spec: ModelSpec, given: Any, chosen: list[int]) -> dict[int, tuple[float, ...]]:
    """Layer -> a number for each kv head. `given`: a list per layer, null for one that keeps its positions."""
    if given is None:
        return {}
    name = "head_factors"
    if not isinstance(given, list) or len(given) != len(spec.layers):
        raise wrong(f"{name}: must be a list with an entry for each of the {len(spec.layers)} layers")
    out: dict[int, tuple[float, ...]] = {}
    for n, row in enumerate(given):
        if row is None:
            continue
        mixer = spec.layers[n].mixer
        if n not in chosen or not isinstance(mixer, Attention):
            raise wrong(f"{name}: layer {n} has no heads whose positions could be rescaled; put null there")
        good = isinstance(row, list) and all(type(r) in (int, float) and 1 <= r < float("inf") for r in row)
        if not good or len(row) != mixer.num_kv_heads:
            raise wrong(
                f"{name}: layer {n} needs {mixer.num_kv_heads} numbers of at least 1, one for each key-value head (the "
                "query heads that share it share the number)"
            )
        out[n] = tuple(float(r) for r in row)
    return out


def _with_ropes(spec: ModelSpec, ropes: Mapping[int, Rope], max_position: int | None = None) -> ModelSpec:
    layers = list(spec.layers)
    for n, rope in ropes.items():
        mixer = layers[n].mixer
        assert isinstance(mixer, Attention | Latent)
        if isinstance(mixer, Latent) and rope.attention_factor != 1.0:
            # Here q and k are rotated in part, but the temperature is one of whole scores: q.k grows by its square.
            plain = (mixer.nope_dim + mixer.rope_dim) ** -0.5 if mixer.scale is None else mixer.scale
            mixer = msgspec.structs.replace(mixer, scale=plain * rope.attention_factor**2)
            rope = msgspec.structs.replace(rope, attention_factor=1.0)
        layers[n] = msgspec.structs.replace(layers[n], mixer=msgspec.structs.replace(mixer, rope=rope))
    return msgspec.structs.replace(spec, layers=tuple(layers), max_position=max_position or spec.max_position)
