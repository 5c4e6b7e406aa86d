"""Whether adapters lie in the KV pool, and how many of their numbers a block holds."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config import EngineConfig
from penstock.core.adapter import UNIT_BYTES
from penstock.core.cache_spec import CacheGroup
from penstock.core.events import Decision
from penstock.core.matrix_format import is_product
from penstock.core.model_spec import ModelSpec, weight_shapes
from penstock.plan.memory import gib

_NUMBER_BYTES = 4
_OPS = ("native", "ref", "blas")
"""Those whose adapters may lie anywhere."""


def units_of_slab(group: CacheGroup, block_size: int) -> int:
    """Units that a slab holds: whole ones of each plane, whose slabs lie apart."""
    slab_bytes = (p.num_bytes * block_size * len(group.layers) for p in group.spec.planes)
    return sum(num_bytes // UNIT_BYTES for num_bytes in slab_bytes)


def adapter_units(config: EngineConfig, groups: Sequence[CacheGroup], block_size: int) -> int:
    """Of a block, a slab of every full group; 0: adapters have memory of their own, or there are none."""
    return 0 if _own_memory(config, groups, block_size) else _units(groups, block_size)


def pool_blocks(config: EngineConfig, spec: ModelSpec, groups: Sequence[CacheGroup], block_size: int) -> int:
    """Blocks that `max_loras` adapters of the largest rank on all of the products take; 0 where they take none."""
    units = adapter_units(config, groups, block_size) if config.lora.enable_lora else 0
    if not units:
        return 0
    shapes = weight_shapes(spec).items()
    columns = sum(sum(s) for name, s in shapes if name.startswith("layers.") and is_product(name, s))
    num_bytes = config.lora.max_lora_rank * columns * _NUMBER_BYTES
    return config.lora.max_loras * -(-num_bytes // (units * UNIT_BYTES))


def adapter_decision(config: EngineConfig, groups: Sequence[CacheGroup], block_size: int) -> Decision:
    """Where the numbers of adapters are."""
    own = _own_memory(config, groups, block_size)
    if own:
        return Decision("lora_memory", gib(config.lora.max_bytes), own)
    units = _units(groups, block_size)
    return Decision("lora_memory", "blocks of KV", f"a block holds {gib(units * UNIT_BYTES)} of an adapter")


def _units(groups: Sequence[CacheGroup], block_size: int) -> int:
    return sum(units_of_slab(g, block_size) for g in groups if g.spec.kind == "paged")


def _own_memory(config: EngineConfig, groups: Sequence[CacheGroup], block_size: int) -> str:
    """Why adapters have memory of their own; empty: they have none."""
    if not config.lora.enable_lora or config.lora.lora_memory is not None:
        return "it was given"
    if config.execution.tensor_parallel_size > 1:
        return "each rank has its part of adapters beside its part of the weights"
    if config.execution.device not in ("auto", "cpu") or config.execution.ops not in _OPS:
        return "adapters share blocks with keys and values on the CPU's own kernels alone"
    if config.cache.kv_allocator != "paged":
        return f"kv_allocator {config.cache.kv_allocator} has no blocks that belong to nobody"
    if config.selection is not None:
        return "sequences that give up keys and values on their way leave no bound of what an adapter may take"
    if not any(g.spec.kind == "paged" for g in groups):
        return "this model keeps no tokens in blocks that stay"
    return (
        ""
        if _units(groups, block_size)
        else f"a block of {block_size} tokens is too small to hold any; raise block_size"
    )
