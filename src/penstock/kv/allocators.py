"""The names of `kv_allocator`: one way to make each, whatever it needs to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.cache_spec import CacheGroup
from penstock.kv.contiguous import ContiguousManager, Reserve
from penstock.kv.layerkv import LayerKVManager
from penstock.kv.manager import KVManager
from penstock.kv.modules import ModuleKVManager
from penstock.kv.placed import PlacedManager
from penstock.kv.virtual import VirtualManager
from penstock.kv.vtensor import VTensorManager


def paged(
    groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *,
    max_model_len: int, max_num_seqs: int, **options: Any,
) -> KVManager:  # fmt: skip
    """Blocks on demand; everything else in this file is a baseline. `options`: those of KVManager."""
    make = PlacedManager if any(group.spec.whole for group in groups) else KVManager
    return make(groups, num_slabs, block_size, **options)


_OF_SHARING = (
    "prefix_cache", "eviction", "slot_checkpoint_rule", "step_tokens", "keeping", "offload", "store", "events",
    "pin_share",
)  # fmt: skip
"""Options of KVManager that say how blocks are kept and shared, which a baseline does not do."""


def _own(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _OF_SHARING}


def _contiguous(
    reserve: Reserve, groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *,
    max_model_len: int, max_num_seqs: int, **options: Any,
) -> KVManager:  # fmt: skip
    own = _own(options)
    return ContiguousManager(groups, num_slabs, block_size, max_model_len=max_model_len, reserve=reserve, **own)


def contiguous(*args: Any, **options: Any) -> KVManager:
    """A run of max_model_len tokens for every sequence: FasterTransformer, Orca (Max)."""
    return _contiguous("max", *args, **options)


def contiguous_pow2(*args: Any, **options: Any) -> KVManager:
    """A run of the next power of two, moved when outgrown: after Orca (Pow2)."""
    return _contiguous("pow2", *args, **options)


def contiguous_oracle(*args: Any, **options: Any) -> KVManager:
    """A run of prompt + max_tokens: Orca (Oracle), if answers run to their limit."""
    return _contiguous("oracle", *args, **options)


def contiguous_predicted(*args: Any, **options: Any) -> KVManager:
    """A run of prompt + predicted length, a longer one when that is outgrown: S3. Needs `length_predictor`."""
    return _contiguous("predicted", *args, **options)


def layerkv(
    groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *,
    max_model_len: int, max_num_seqs: int, layer_tpot: float | None = None,
    column: tuple[int, int] = (0, 0), **options: Any,
) -> KVManager:  # fmt: skip
    """Blocks on demand, of some layers only where memory is short: LayerKV."""
    return LayerKVManager(groups, num_slabs, block_size, most_s=layer_tpot, column=column, **_own(options))


def modules(
    groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *,
    max_model_len: int, max_num_seqs: int, **options: Any,
) -> KVManager:  # fmt: skip
    """Blocks on demand, of texts that may stand anywhere in a prompt: Prompt Cache."""
    return ModuleKVManager(groups, num_slabs, block_size, **options)


def virtual(
    groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *, max_model_len: int, max_num_seqs: int,
    **options: Any,
) -> KVManager:  # fmt: skip
    """Addresses for max_model_len, memory for what was written: vAttention."""
    own = _own(options)
    return VirtualManager(groups, num_slabs, block_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs, **own)


def vtensor(
    groups: Sequence[CacheGroup], num_slabs: Sequence[int], block_size: int, *, max_model_len: int, max_num_seqs: int,
    **options: Any,
) -> KVManager:  # fmt: skip
    """The same, with memory in chunks that go from one sequence to the next: vTensor."""
    own = _own(options)
    return VTensorManager(groups, num_slabs, block_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs, **own)
