"""The names of `kv_allocator`: one way to make each, whatever it needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.cache_spec import CacheGroup
from penstock.kv.contiguous import ContiguousManager, Reserve
from penstock.kv.manager import KVManager
from penstock.kv.virtual import VirtualManager
from penstock.kv.vtensor import VTensorManager


def paged(
    groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *,
    max_model_len: int, max_num_seqs: int, **options: Any,
) -> KVManager:  # fmt: skip
    """Blocks on demand; everything else in this file is a baseline. `options`: those of KVManager."""
    return KVManager(groups, num_slabs, block_size, **options)


def _contiguous(
    reserve: Reserve, groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *,
    max_model_len: int, max_num_seqs: int, prefix_cache: str = "none", eviction: str = "lru",
    slot_checkpoint_rule: str = "distance", step_tokens: int | None = None, keeping: None = None,
    offload: bool = False, store: None = None, events: None = None, pin_share: float = 0.0,
    **options: Any,
) -> KVManager:  # fmt: skip
    return ContiguousManager(groups, num_slabs, block_size, max_model_len=max_model_len, reserve=reserve, **options)


def contiguous(*args: Any, **options: Any) -> KVManager:
    """A run of max_model_len tokens for every sequence: FasterTransformer, Orca (Max)."""
    return _contiguous("max", *args, **options)


def contiguous_pow2(*args: Any, **options: Any) -> KVManager:
    """A run of the next power of two, moved when outgrown: after Orca (Pow2)."""
    return _contiguous("pow2", *args, **options)


def contiguous_oracle(*args: Any, **options: Any) -> KVManager:
    """A run of prompt + max_tokens: Orca (Oracle), if answers run to their limit."""
    return _contiguous("oracle", *args, **options)


def virtual(
    groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *,
    max_model_len: int, max_num_seqs: int, prefix_cache: str = "none", eviction: str = "lru",
    slot_checkpoint_rule: str = "distance", step_tokens: int | None = None, keeping: None = None,
    offload: bool = False, store: None = None, events: None = None, pin_share: float = 0.0,
    **options: Any,
) -> KVManager:  # fmt: skip
    """Addresses for max_model_len, memory for what was written: vAttention."""
    return VirtualManager(
        groups, num_slabs, block_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs, **options
    )


def vtensor(
    groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *,
    max_model_len: int, max_num_seqs: int, prefix_cache: str = "none", eviction: str = "lru",
    slot_checkpoint_rule: str = "distance", step_tokens: int | None = None, keeping: None = None,
    offload: bool = False, store: None = None, events: None = None, **options: Any,
) -> KVManager:  # fmt: skip
    """The same, with memory in chunks that go from one sequence to the next: vTensor."""
    return VTensorManager(
        groups, num_slabs, block_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs, **options
    )
