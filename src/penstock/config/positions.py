"""What `rope_scaling` holds: a JSON object, as in vLLM and in a config.json, checked key by key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ConfigError

EXAMPLE = '{"rope_type": "yarn", "factor": 4.0}'
KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", "start_tokens"),
}
"""Kind -> the keys that it has of its own; what they mean is said by `core.mixers.rope.Rope`."""
COMMON = ("rope_type", "type", "rope_theta", "original_max_position_embeddings", "head_factors")


def parse_rope_scaling(given: str | None) -> dict[str, Any] | None:
    """`rope_scaling` as an object whose kind and keys are known and whose factor makes sense.

    `type`, the older name of the kind, becomes `rope_type`. Raises ConfigError naming the key that is wrong.
    """
    if given is None:
        return None
    try:
        found = json.loads(given)
    except ValueError as error:
        raise wrong(f"is not JSON: {error}; for example {EXAMPLE}") from None
    if not isinstance(found, dict):
        raise wrong(f"must be an object, as {EXAMPLE}")
    kind = _kind(found)
    known = (*COMMON, *KEYS[kind])
    for name in found:
        if name not in known:
            raise wrong(f"{name}: unknown for the kind {kind}; known: {', '.join(known)}")
    if kind != "default":
        _check_factor(kind, found.get("factor"))
    return {name: value for name, value in found.items() if name != "type"} | {"rope_type": kind}


def wrong(text: str) -> ConfigError:
    return ConfigError(f"rope_scaling: {text}", field="rope_scaling")


def _kind(found: Mapping[str, Any]) -> str:
    given = [found[name] for name in ("rope_type", "type") if name in found]
    if not given:
        raise wrong(f"rope_type is missing; for example {EXAMPLE}")
    kind = given[0]
    if given[-1] != kind:
        raise wrong("rope_type and type, its older name, differ; give one of them")
    if not isinstance(kind, str) or kind not in KEYS:
        raise wrong(f"rope_type: must be one of {', '.join(KEYS)}, not {json.dumps(kind)}")
    return kind


def _check_factor(kind: str, factor: object) -> None:
    """Times as many positions as the model was made for."""
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not 1 <= factor < math.inf or (kind == "dynamic" and factor == 1):  # type: ignore[operator]
        least = "above 1" if kind == "dynamic" else "of at least 1"
        raise wrong(
            f"factor: must be a number {least}, how many times as long contexts become, not {json.dumps(factor)}"
        )
