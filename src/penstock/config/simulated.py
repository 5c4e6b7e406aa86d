"""Which settings go together with a simulated device."""

from __future__ import annotations

from typing import Any

from penstock.base.errors import ConfigError


def check_simulated(config: Any) -> None:
    """`config`: an EngineConfig with a `simulated_device`. Raises ConfigError for settings about what is computed."""
    run, cache = config.execution, config.cache
    given = {
        "tensor_parallel_size": run.num_ranks > 1, "nnodes": run.nnodes > 1,
        "device": run.device not in ("auto", "cpu"),
        "speculative_config": run.speculative_config is not None, "memory_bytes": run.memory_bytes is not None,
        "weight_memory_bytes": run.weight_memory_bytes is not None,
        "expert_memory_bytes": run.expert_memory_bytes is not None, "kv_selector": cache.kv_selector != "none",
        "kv_offload": cache.kv_offload != "none", "enable_lora": config.lora.enable_lora,
        "finetune_root": config.lora.finetune_root is not None, "executor": run.executor != "inproc",
        "depth": run.depth != 1,
    }  # fmt: skip
    for name in (name for name, is_given in given.items() if is_given):
        raise ConfigError(
            f"{name}: a simulated_device computes nothing and keeps no keys and values; leave one of both away",
            field=name,
        )
