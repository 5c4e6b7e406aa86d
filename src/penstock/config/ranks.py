"""Which settings go together with a model that several ranks have parts of, and with several engines of one model."""

from __future__ import annotations

from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.offload import offload_of

_MOST_RANKS = 64
_READ_LAYERS = ("early-exit", "self-draft", "medusa", "eagle", "mtp", "specinfer")
"""Drafters that run some of the model's layers, or read what is between them."""


def check_ranks(config: Any) -> None:
    """`config`: an EngineConfig. What one rank does beside its steps, by a clock of its own, others would not do in the
    same step. Raises: ConfigError."""
    if config.execution.tensor_parallel_sums and config.lora.enable_lora:
        raise ConfigError(
            "tensor_parallel_sums: adapters change whole outputs of products, and ranks would have sums of parts; "
            "leave one of both away",
            field="tensor_parallel_sums",
        )
    if config.execution.tensor_parallel_sums and config.model.quantization != "none":
        raise ConfigError(
            f"tensor_parallel_sums: it is for plain weights, and quantization {config.model.quantization} rounds "
            "rows that ranks have parts of; leave one of both away",
            field="tensor_parallel_sums",
        )
    if config.execution.context_parallel_size > 1:
        _check_tokens(config)
        if config.execution.context_parallel_placement == "home":
            _check_homes(config)
    run, cache = config.execution, config.cache
    offload = offload_of(cache.kv_offload)
    given = {
        "memory_bytes": run.memory_bytes is not None, "expert_memory_bytes": run.expert_memory_bytes is not None,
        "kv_offload": offload is not None and bool(offload.remotes),
        "kv_allocator": cache.kv_allocator != "paged", "finetune_root": config.lora.finetune_root is not None,
        "device": run.device not in ("auto", "cpu"),
    }  # fmt: skip
    if run.pipeline_parallel_size > 1:
        wanted = config.speculation
        given |= {
            "kv_offload": offload is not None, "context_parallel_size": run.context_parallel_size > 1,
            "kv_selector": cache.kv_selector != "none",
            "kv_rotation": cache.kv_rotation != "none", "weight_memory_bytes": run.weight_memory_bytes is not None,
            "packed_weights": run.packed_weights == "streamed",
            "speculative_config": wanted is not None and wanted.method in _READ_LAYERS,
        }  # fmt: skip
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f"{name}: it does not go together with {run.ranks_field} {getattr(run, run.ranks_field)} yet; leave "
            "one of both away",
            field=name,
        )
    if run.num_ranks > _MOST_RANKS:
        raise ConfigError(
            f"pipeline_parallel_size: {run.pipeline_parallel_size} stages of {run.tensor_parallel_size} ranks are "
            f"more than {_MOST_RANKS} ranks; use fewer",
            field="pipeline_parallel_size",
        )


def _check_tokens(config: Any) -> None:
    """A rank that has some of a sequence's tokens can do nothing that needs them all but attend to them."""
    size, cache = config.execution.context_parallel_size, config.cache
    if config.execution.tensor_parallel_size != size:
        raise ConfigError(
            f"context_parallel_size: tokens are shared out over all ranks, and there are "
            f"{config.execution.tensor_parallel_size} (tensor_parallel_size), not {size}; give the same number, or "
            "only one of both",
            field="context_parallel_size",
        )
    needs = {
        "kv_selector": (cache.kv_selector, "none", "chooses among all tokens of a sequence"),
        "kv_rotation": (cache.kv_rotation, "none", "turns keys where they are read"),
        "kv_offload_format": (cache.kv_offload_format, "plain", "codes whole blocks"),
    }
    for name, (value, plain, does) in needs.items():
        if value != plain:
            raise ConfigError(
                f"{name}: {value} {does}, and with context_parallel_size {size} each rank has some of the tokens; "
                "leave one of both away",
                field=name,
            )


def _check_homes(config: Any) -> None:
    """A block that lies on one rank stays there: what leaves the device would have to find its way back."""
    cache = config.cache
    given = {
        "preemption_mode": config.scheduler.preemption_mode == "swap",
        "enable_hierarchical_cache": cache.enable_hierarchical_cache,
        "kv_offload": offload_of(cache.kv_offload) is not None,
    }  # fmt: skip
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f"{name}: blocks leave the ranks that have them, which context_parallel_placement home does not go with; "
            "leave one of both away",
            field=name,
        )


def check_replicas(config: Any) -> None:
    """`config`: an EngineConfig of several engines of one server. Raises: ConfigError."""
    size, most = config.execution.data_parallel_size, config.execution.max_replicas
    if most is not None and most < size:
        raise ConfigError(
            f"max_replicas: {most} are fewer than the {size} engines of data_parallel_size that the server begins "
            f"with; give {size} or more",
            field="max_replicas",
        )
    run, local = config.execution, config.execution.data_parallel_size_local
    if local is not None and local > size:
        raise ConfigError(
            f"data_parallel_size_local: {local} engines here are more than the {size} of data_parallel_size; give "
            f"{size} or fewer",
            field="data_parallel_size_local",
        )
    if not run.is_replicated:
        return
    given = {"finetune_root": config.lora.finetune_root is not None, "nnodes": run.nnodes > 1}
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f"{name}: engines of one server do not share it yet; leave it away, or {config.execution.replicas_field}",
            field=name,
        )
    if run.num_elsewhere:
        there = {"enable_lora": config.lora.enable_lora, "plugin": run.plugin is not None}
        for name in (name for name, is_given in there.items() if is_given):
            raise ConfigError(
                f"{name}: it names files that engines on other hosts would not have; leave it away, or "
                f"data_parallel_size_local {size}",
                field=name,
            )
