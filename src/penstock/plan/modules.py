"""What texts that stand anywhere (`kv.modules`) can be combined with."""

from __future__ import annotations

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup
from penstock.core.mixers.attention import Attention
from penstock.core.model_spec import ModelSpec


def check_modules(config: EngineConfig, spec: ModelSpec, groups: tuple[CacheGroup, ...]) -> None:
    """Raises ConfigError, with what to change, where the pages of a text depend on its place."""
    cache = config.cache
    if cache.module_recompute and not cache.module_chunk_tokens:
        raise ConfigError("module_recompute is for the modules that module_chunk_tokens makes; add it, or say "
                          "recompute in prompt_cache", field="module_recompute")  # fmt: skip
    if cache.kv_allocator != "modules":
        if cache.module_chunk_tokens:
            raise ConfigError("module_chunk_tokens is for kv_allocator modules; add it, or leave this away",
                              field="module_chunk_tokens")  # fmt: skip
        return
    if cache.module_chunk_tokens % cache.block_size:
        raise ConfigError(f"module_chunk_tokens is {cache.module_chunk_tokens}; modules are whole blocks of "
                          f"block_size {cache.block_size} tokens", field="module_chunk_tokens")  # fmt: skip
    problem = ""
    if config.speculation is not None:
        problem = "does not go together with speculative_config; use one of them"
    elif config.lora.enable_lora:
        problem = "computes texts again with the model's own products, without adapters (enable_lora); use one of them"
    elif config.cache.kv_rotation != "none":
        problem = f"turns keys when they are read, and kv_rotation {config.cache.kv_rotation} before; leave it away"
    elif spec.positions:
        problem = "is for models without learned positions, which are in all that this one computes; use paged"
    elif len(groups) != 1 or groups[0].spec.kind != "paged" or groups[0].layers != tuple(range(len(spec.layers))):
        problem = "is for models whose layers all keep their whole context in one way, unlike this one's; use paged"
    else:
        wrong = [n for n, layer in enumerate(spec.layers) if not _turns_when_read(layer.mixer)]
        if wrong:
            problem = (
                f"keeps keys as they are before their rotation, and layer {wrong[0]} does more behind it; use paged"
            )
    if problem:
        raise ConfigError(f"kv_allocator: modules {problem}", field="kv_allocator")


def _turns_when_read(mixer: object) -> bool:
    if not isinstance(mixer, Attention):
        return False
    norm, rope = mixer.qk_norm, mixer.rope
    return not (rope is not None and rope.head_factors) and not (norm is not None and norm.after_rope)
