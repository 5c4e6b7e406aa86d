"""Whether a model and the other settings can have the keys and values that kv_cache_dtype and kv_rotation ask for."""

from __future__ import annotations

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.kv_codec import KV_CODECS, codecs_by_token
from penstock.core.kv_format import KvFormat, LayerFormat, parse_kv_format, wrong
from penstock.core.model_spec import Attention, BlockAttention, EntryAttention, Latent, ModelSpec, cache_spec

LEAST_CHANNEL_BLOCK = 16
"""Tokens of a block that make scales of channels worth their bytes."""


def check_kv_format(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError for the first thing that does not fit, and says what to use instead."""
    given = config.cache.kv_cache_dtype
    if config.cache.kv_rotation != "none":
        _check_rotation(spec)
    if given == "auto":
        return
    kv = parse_kv_format(given)
    short = given if not given.lstrip().startswith("{") else "what it says"
    traits = [KV_CODECS.traits(codec) for how in kv.every for codec in (*how.keys, *how.values)]
    if not any(each.quantises for each in traits) and kv.default.plain and not kv.layers:
        return
    if not any(c.per_token for layer in spec.layers if (c := cache_spec(layer, spec.dtype)) is not None):
        raise wrong(
            f"{short} is for keys and values, of which this model keeps none (recurrent states are always float32); "
            "use auto"
        )
    _check_layers(kv, spec)
    if any(each.scales == "block" for each in traits) and config.cache.block_size < LEAST_CHANNEL_BLOCK:
        raise wrong(
            f"keys by channel share their scales over the tokens of a block, and block_size {config.cache.block_size} "
            f"would make the scales as large as the keys; use a block_size of at least {LEAST_CHANNEL_BLOCK}"
        )
    if all(how.plain for how in kv.every):
        return
    if config.speculation is not None and any(how.recent for how in kv.every):
        raise wrong(
            f"{short} encodes blocks as a whole and cannot take back rejected drafts; leave speculative_config away "
            "or use int8, int4"
        )
    if config.cache.kv_selector != "none" and (kv.layers or not kv.default.pair):
        raise wrong(
            f"{short} is kept in several caches or planes, from which kv_selector {config.cache.kv_selector} cannot "
            "drop tokens; use a plain one such as int4, or kv_selector none"
        )


def _check_layers(kv: KvFormat, spec: ModelSpec) -> None:
    beyond = [n for n in kv.layers if n >= len(spec.layers)]
    if beyond:
        raise wrong(f"layers: {beyond[0]} is named, but this model has layers 0 to {len(spec.layers) - 1}")
    reaching = False
    for n, layer in enumerate(spec.layers):
        how, m = kv.of(n), layer.mixer
        if layer.kv_from is not None:
            if how != kv.of(layer.kv_from) and n in kv.layers:
                raise wrong(f"layers: {n} reads the keys and values of layer {layer.kv_from}; name that one alone")
            continue
        if isinstance(m, Attention):
            for dim in {m.head_dim, m.value_dim}:
                _check_dims(how, n, dim)
            _check_heads(how, n, m.num_kv_heads)
            reaching = reaching or m.reach is None
        elif isinstance(m, Latent):
            if how.plain is None:
                raise wrong(
                    f"layer {n} keeps latents, not keys and values of heads, and has no k, v, heads, newest or first "
                    "tokens of its own; use a name such as int8 or int4"
                )
            _check_dims(how, n, m.kv_rank)
            _check_dims(how, n, m.rope_dim)
        elif isinstance(m, BlockAttention):
            if how.plain is None:
                raise wrong(
                    f"layer {n} chooses blocks by keys of their own, and has no heads, newest or first tokens apart; "
                    "use a name such as int8 or int4"
                )
            for dim in (m.head_dim, m.index_dim):
                _check_dims(how, n, dim)
        elif isinstance(m, EntryAttention):
            if how.plain is None:
                raise wrong(
                    f"layer {n} keeps one vector as key and value, and entries of several tokens, and has no k, v, "
                    "heads, newest or first tokens of its own; use a name such as int8 or int4"
                )
            for dim in (m.head_dim, m.head_dim if m.indexer is None else m.indexer.head_dim):
                _check_dims(how, n, dim)
    if any(how.recent for how in kv.every) and not reaching:
        raise wrong(
            "newest tokens are kept beside codes only in layers that see the whole context, and all layers of this "
            "model see a window; use int8 or int4"
        )


def _check_dims(how: LayerFormat, layer: int, dim: int) -> None:
    for codec in (*how.keys, *how.values):
        per = KV_CODECS.traits(codec).per_element
        if dim % per:
            others = ((name, KV_CODECS.traits(name)) for name in codecs_by_token())
            fit = [name for name, traits in others if traits.quantises and dim % traits.per_element == 0]
            raise wrong(
                f"{codec} packs {per} numbers into a byte, and vectors of layer {layer} have {dim}; use "
                f"{' or '.join(fit)}"
            )


def _check_heads(how: LayerFormat, layer: int, heads: int) -> None:
    for name, codecs in (("k", how.keys), ("v", how.values)):
        if len(codecs) not in (1, heads):
            raise wrong(f"{name}: {len(codecs)} codecs for the {heads} kv heads of layer {layer}; give one for each")


def _check_rotation(spec: ModelSpec) -> None:
    mixers = [layer.mixer for layer in spec.layers]
    dims = [dim for m in mixers if isinstance(m, Attention) for dim in (m.head_dim, m.value_dim)]
    if not dims or any(isinstance(m, Latent | BlockAttention) for m in mixers) or any(dim % 2 for dim in dims):
        why = "an odd number of components" if any(dim % 2 for dim in dims) else "no heads of keys and values"
        raise ConfigError(
            f"kv_rotation: hadamard turns the heads of keys and values, and this model has {why}; use none",
            field="kv_rotation",
        )
