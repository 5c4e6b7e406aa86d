"""L3: who owns which page of the caches. Integers only: it decides copies and zeroing, the runner carries them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.base.registry import Registry

if TYPE_CHECKING:
    from penstock.kv.manager import KVManager

KV_MANAGERS: Registry[Callable[..., KVManager], None] = Registry("KV allocator")
KV_MANAGERS.add("paged", "penstock.kv.allocators:paged")
KV_MANAGERS.add("contiguous", "penstock.kv.allocators:contiguous")
KV_MANAGERS.add("contiguous-pow2", "penstock.kv.allocators:contiguous_pow2")
KV_MANAGERS.add("contiguous-oracle", "penstock.kv.allocators:contiguous_oracle")
KV_MANAGERS.add("contiguous-predicted", "penstock.kv.allocators:contiguous_predicted")
KV_MANAGERS.add("layerkv", "penstock.kv.allocators:layerkv")
KV_MANAGERS.add("modules", "penstock.kv.allocators:modules")
KV_MANAGERS.add("virtual", "penstock.kv.allocators:virtual")
KV_MANAGERS.add("vtensor", "penstock.kv.allocators:vtensor")
