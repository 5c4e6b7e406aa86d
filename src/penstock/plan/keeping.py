"""What a KV selector can be combined with, and what it changes about the caches."""

from __future__ import annotations

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.selection import Keeping
from penstock.core.cache_spec import CacheGroup
from penstock.core.kv_codec import KV_CODECS
from penstock.core.kv_format import parse_kv_format
from penstock.core.mixers.attention import Attention
from penstock.core.model_spec import Layer, ModelSpec, cache_groups

HALVED = '{"dtype":{"k":"int8","v":"int4"}}'
"""The one kv_cache_dtype of selectors that halve bits."""


def check_keeping(config: EngineConfig, spec: ModelSpec, keeping: Keeping) -> None:
    """Raises: ConfigError, with what to change, if the selector cannot serve this model or these settings."""
    name = keeping.config.method

    def wrong(why: str) -> ConfigError:
        return ConfigError(f"kv_selector: {name} {why}", field="kv_selector")

    if config.cache.kv_allocator != "paged":
        raise wrong(f"gives pages back one by one, and kv_allocator {config.cache.kv_allocator} has none; use paged")
    if config.speculation is not None:
        raise wrong("cannot be combined with speculative_config: drafts are verified against the whole context")
    given = config.cache.kv_cache_dtype
    if keeping.drops == "nothing" and given != "auto":
        codecs = [how.plain for how in parse_kv_format(given).every]
        if not all(codec is not None and KV_CODECS.traits(codec).bounds for codec in codecs):
            raise wrong(f"keeps bounds of keys, and {given} has none of its own; use int8 or auto")
    if keeping.halves and given.replace(" ", "") != HALVED:
        raise wrong(f"halves 8-bit keys and 4-bit values; use kv_cache_dtype '{HALVED}'")
    if keeping.ahead and config.cache.kv_rotation != "none":
        raise wrong(f"rehearses keys as they are, and kv_rotation {config.cache.kv_rotation} turns them; leave it away")
    if keeping.cache_positions and config.cache.kv_rotation != "none":
        raise wrong(f"turns keys when they are read, and kv_rotation {config.cache.kv_rotation} before; leave it away")
    for n, layer in enumerate(spec.layers):
        mixer = layer.mixer
        if not isinstance(mixer, Attention):
            raise wrong(f"needs keys and values in every layer, and layer {n} has none of its own kind; use none")
        if mixer.window is not None or mixer.chunk is not None:
            raise wrong(f"is for layers that see all of their context, and layer {n} has a window; use none")
        if mixer.alibi is not None:
            raise wrong(f"moves tokens within the cache, and layer {n} scores by distance (ALiBi); use none")
        if keeping.cache_positions:
            _check_positions(n, mixer, wrong)
        if keeping.ahead and not _can_rehearse(layer, mixer):
            raise wrong(f"works out layer {n}'s queries in the layer before, and it makes them otherwise; use quest")
    if len({layer.mixer.num_kv_heads for layer in spec.layers if isinstance(layer.mixer, Attention)}) > 1:
        raise wrong("needs as many kv heads in every layer; use none")


def _can_rehearse(layer: Layer, mixer: Attention) -> bool:
    """Whether queries are a norm of the residual, a product and a rotation, and no more."""
    plain = (mixer.qk_norm, mixer.kv_from, mixer.clip, mixer.query_scale, layer.streams) == (None,) * 5
    inside = layer.placement in ("pre", "both") and layer.mixer_scale == 1.0 and not layer.beside
    return plain and inside and not mixer.key_bias


def _check_positions(n: int, mixer: Attention, wrong: object) -> None:
    rope, norm = mixer.rope, mixer.qk_norm
    assert callable(wrong)
    if rope is None:
        raise wrong(f"gives tokens rotary positions inside the cache, and layer {n} has none; use another selector")
    if rope.head_factors or (norm is not None and norm.after_rope):
        raise wrong(f"keeps keys as they are before their rotation, and layer {n} does more behind it; use another")


def groups_of(
    spec: ModelSpec, kv_dtype: str, keeping: Keeping | None, *, hidden: bool = False
) -> tuple[CacheGroup, ...]:
    """The cache groups of a model whose cache is cut, or read in part. `hidden`: see `core.model_spec.cache_specs`."""
    reads = keeping is not None and keeping.drops == "nothing"
    ahead = keeping is not None and keeping.ahead
    part = keeping.config.options.rank if keeping is not None and ahead else 0.0
    lanes = lanes_of(spec, keeping)
    return cache_groups(spec, kv_dtype, lanes, bounds=reads and not ahead, part=part, hidden=hidden)


def lanes_of(spec: ModelSpec, keeping: Keeping | None) -> int:
    """Runs of kv heads with pages of their own: one per kv head where heads may keep different tokens."""
    if keeping is None or not keeping.per_head or keeping.drops != "tokens":
        return 1
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, Attention), "check_keeping has looked"
    return mixer.num_kv_heads
