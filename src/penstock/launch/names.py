"""Whether the parts exist that settings name. Registries alone are imported: a front end asks before an engine does."""

from __future__ import annotations

import re

from penstock.backends import BACKENDS
from penstock.base.errors import ConfigError
from penstock.config import EngineConfig, SpeculativeConfig
from penstock.core.matrix_format import parse_scheme
from penstock.drafters import DRAFTERS, branches
from penstock.executor import EXECUTORS
from penstock.kv import KV_MANAGERS
from penstock.kv.checkpoints import CHECKPOINT_RULES
from penstock.kv.eviction import EVICTION_POLICIES
from penstock.kv.prefix import PREFIX_CACHES
from penstock.launch.plugins import load_plugins
from penstock.ops.attention import ATTENTION_BACKENDS, DEVICE_ATTENTION
from penstock.sched.policy import make_offline_policy, make_policy
from penstock.select import KV_SELECTORS


def check_names(config: EngineConfig) -> None:
    """Raises ConfigError, naming the choices, for a part that does not exist: before anything is opened.

    Plugins are imported, since they add names, and so are the scheduling policy and the length predictor, whose knobs
    are looked at; no other part is.
    """
    load_plugins(config.execution.plugin)
    PREFIX_CACHES.target(config.cache.prefix_cache)
    EVICTION_POLICIES.target(config.cache.eviction)
    CHECKPOINT_RULES.target(config.cache.slot_checkpoint_rule)
    KV_MANAGERS.target(config.cache.kv_allocator)
    make_policy(config.scheduler.scheduling_policy)
    make_offline_policy(config.scheduler.offline_policy)
    if config.scheduler.adaptive:
        from penstock.launch.adaptive import check_adaptive  # nobody else needs it

        check_adaptive(config)
    if config.scheduler.length_predictor is not None:
        from penstock.lengths import make_predictor  # nobody else needs it

        make_predictor(config.scheduler.length_predictor)
    place = config.execution.device
    if not re.fullmatch(r"auto|cpu|cpu-torch|cuda(:\d{1,3})?", place):
        raise ConfigError(f"device: {place!r} is none of auto, cpu, cuda, cuda:N, cpu-torch", field="device")
    if config.execution.ops != "auto":
        BACKENDS.target(config.execution.ops)
    parse_scheme(config.model.quantization)
    if config.selection is not None:
        KV_SELECTORS.target(config.selection.method)
    _check_attention(config.execution.attention_backend, place)
    EXECUTORS.target(config.execution.executor)
    if config.speculation is not None:
        DRAFTERS.target(config.speculation.method)
        check_method(config.speculation)
        if config.execution.context_parallel_size > 1 and branches(config.speculation):
            raise ConfigError(
                f"speculative_config: {config.speculation.method} drafts trees (tree {config.speculation.tree}), and "
                "context_parallel_size needs chains, for a token's rank goes by its place; use ngram, or tree chain",
                field="speculative_config",
            )


def _check_attention(name: str, place: str) -> None:
    if name not in DEVICE_ATTENTION.names():
        ATTENTION_BACKENDS.target(name)
    elif place in ("auto", "cpu"):
        raise ConfigError(
            f"attention_backend: {name} runs by torch, and device is {place}; set device to cuda or cpu-torch",
            field="attention_backend",
        )


def check_method(config: SpeculativeConfig) -> None:
    """Raises ConfigError for a draft model that the method cannot use, and for one that it lacks."""
    method, most = config.method, DRAFTERS.traits(config.method).most_models
    parts = _parts(config)
    if parts and not most:
        raise wrong_draft(f"the method {method} takes no draft model; leave it away, or use the method draft-model")
    if most and not parts:
        raise wrong_draft(
            f"is missing: the method {method} needs a draft model's folder, file or id; for example "
            f'{{"method": "{method}", "model": "pico"}}'
        )
    if len(parts) > most and most == 1:
        raise wrong_draft(f"the method {method} takes one draft model, not {len(parts)}; use the method specinfer")
    if len(parts) > most > 1:
        raise wrong_draft(f"the method {method} takes at most {most} drafters, not {len(parts)}")
    nested = [part for part in parts if part in DRAFTERS.names() and DRAFTERS.traits(part).most_models]
    if nested:
        raise wrong_draft(f"{nested[0]} is a method that needs a draft model; name that model itself")


def model_names(config: EngineConfig) -> list[str]:
    """The draft models that `speculative_config` names, in order; drafters of other kinds (specinfer) left out."""
    if config.speculation is None or not DRAFTERS.traits(config.speculation.method).most_models:
        return []
    return [part for part in _parts(config.speculation) if part not in DRAFTERS.names()]


def _parts(config: SpeculativeConfig) -> list[str]:
    return [part.strip() for part in (config.model or "").split(",") if part.strip()]


def wrong_draft(text: str) -> ConfigError:
    """About the draft models of `speculative_config`."""
    return ConfigError(f"speculative_config: model: {text}", field="speculative_config")
