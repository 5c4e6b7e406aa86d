"""Which models' blocks can be written as hidden states, what of, and what that takes (`core.block_codec.HIDDEN`)."""

from __future__ import annotations

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.offload import offload_of
from penstock.core.block_codec import HIDDEN
from penstock.core.cache_spec import DTYPE_BYTES
from penstock.core.events import Decision
from penstock.core.mixers.attention import Attention
from penstock.core.model_spec import ModelSpec, cache_groups


def keeps_hidden(config: EngineConfig) -> bool:
    """Whether pages have hidden states, which go to the store in place of keys and values."""
    return config.cache.kv_offload_format == HIDDEN and offload_of(config.cache.kv_offload) is not None


def hidden_decision(config: EngineConfig, spec: ModelSpec, kv_dtype: str) -> Decision | None:
    """What it takes; None: blocks are written otherwise. Raises ConfigError, with what to change, where it cannot be
    done, or would save nothing."""
    if not keeps_hidden(config):
        return None
    problem = _problem(config, spec, kv_dtype)
    if not problem:
        (group,) = cache_groups(spec, kv_dtype)
        ours, theirs = spec.hidden_size * DTYPE_BYTES[kv_dtype], group.spec.num_bytes
        if ours < theirs:
            exact = "" if kv_dtype == "float32" else f" where products round what they read to {kv_dtype}"
            return Decision(
                "kv_offload_format", HIDDEN,
                f"a token of a layer takes {ours:,} bytes in the store in place of the {theirs:,} of its keys and "
                f"values ({ours / theirs:.2f} of them), and {ours + theirs:,} in memory; what comes back is the "
                f"same{exact}",
            )  # fmt: skip
        problem = (
            f"would write {ours:,} bytes per token and layer, and keys and values are {theirs:,}, since few heads "
            "share them among many queries"
        )
    raise ConfigError(f"kv_offload_format: hidden {problem}; use plain or cachegen", field="kv_offload_format")


def _problem(config: EngineConfig, spec: ModelSpec, kv_dtype: str) -> str:
    if kv_dtype not in DTYPE_BYTES:
        return f"writes {', '.join(DTYPE_BYTES)}, and kv_cache_dtype is {kv_dtype}"
    if config.execution.device not in ("auto", "cpu"):
        return f"is for the CPU, and device is {config.execution.device}"
    for n, layer in enumerate(spec.layers):
        m = layer.mixer
        if not isinstance(m, Attention) or m.reach is not None or m.kv_from is not None or layer.beside:
            return f"is for models whose layers all keep keys and values of all of their context, unlike layer {n}"
        if layer.streams is not None or layer.altup is not None:
            return f"is for models whose layers read one hidden state, and layer {n} reads several"
    if len(cache_groups(spec, kv_dtype)) > 1:
        return "is for models whose layers all have as many heads of keys and values, and this one's differ"
    return ""
