"""Settings of an engine that runs an encoder: a text goes through it whole, in one step, and nothing of it is kept."""

from __future__ import annotations

from dataclasses import replace

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.config.kv_events import parse_kv_events
from penstock.config.offload import offload_of
from penstock.core.events import Decision
from penstock.core.model_spec import ModelSpec


def choose_encoding(config: EngineConfig, spec: ModelSpec) -> tuple[EngineConfig, tuple[Decision, ...]]:
    """`config` as an encoder needs it, and why; as it is for every other model.

    Raises: ConfigError for a setting about what is kept of texts, or about text that is written.
    """
    if not spec.is_encoder:
        return config, ()
    cache = config.cache
    asked = {
        "speculative_config": config.speculation is not None, "kv_selector": config.selection is not None,
        "kv_offload": offload_of(cache.kv_offload) is not None,
        "enable_hierarchical_cache": cache.enable_hierarchical_cache,
        "kv_events_config": parse_kv_events(cache.kv_events_config) is not None,
    }  # fmt: skip
    for field in (name for name, given in asked.items() if given):
        raise ConfigError(f"{field}: this model is an encoder, which keeps nothing and writes no text; leave it off",
                          field=field)  # fmt: skip
    made = replace(
        config, cache=replace(cache, enable_prefix_caching=False),
        scheduler=replace(config.scheduler, enable_chunked_prefill=False, long_prefill_token_threshold=0),
    )  # fmt: skip
    why = "an encoder: every token sees those behind it, too, so a text is in one step, whole, and nothing is cached"
    return made, (Decision("enable_chunked_prefill", False, why),)
