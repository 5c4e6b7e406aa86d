"""What layers that are away (`kv.layerkv`) can be combined with."""

from __future__ import annotations

from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.core.cache_spec import CacheGroup


def check_layerkv(config: EngineConfig, groups: tuple[CacheGroup, ...], num_layers: int) -> None:
    """Raises ConfigError, with what to change, where layers of a sequence cannot be away."""
    problem = ""
    if config.cache.kv_allocator != "layerkv":
        return
    if config.cache.swap_space <= 0:
        problem = "needs host memory for the layers that are away; give swap_space (GiB)"
    elif config.cache.swap_tier == "fastswitch":
        problem = "does not go together with swap_tier fastswitch; use host or disk"
    elif config.speculation is not None:
        problem = "does not go together with speculative_config; use one of them"
    elif len(groups) != 1 or groups[0].spec.kind != "paged" or groups[0].layers != tuple(range(num_layers)):
        problem = "is for models whose layers all keep their whole context in one way, unlike this one's; use paged"
    if problem:
        raise ConfigError(f"kv_allocator: layerkv {problem}", field="kv_allocator")
