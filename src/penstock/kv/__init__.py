"""L3: who owns which page of the caches. Integers only: it decides copies and zeroing, the runner carries them out."""

from penstock.base.registry import Registry

KV_MANAGERS = Registry("KV allocator")
KV_MANAGERS.add("paged", "penstock.kv.allocators:paged")
KV_MANAGERS.add("contiguous", "penstock.kv.allocators:contiguous")
KV_MANAGERS.add("contiguous-pow2", "penstock.kv.allocators:contiguous_pow2")
KV_MANAGERS.add("contiguous-oracle", "penstock.kv.allocators:contiguous_oracle")
KV_MANAGERS.add("virtual", "penstock.kv.allocators:virtual")
