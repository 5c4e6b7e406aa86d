"""Prefix caches: full blocks, found again by the tokens that led to them.

Laws, held by every implementation and tested in `tests/conformance/test_prefix_cache.py`:

- A block is found only after exactly the tokens, in exactly the namespace, under which it was inserted.
- What a holder of an entry (between `acquire` or `share` and `release`) stands on is never evicted.
- `evict` gives up exactly min(n, num_evictable) blocks, each one the last block of a path nobody stands on.
- Entries stay valid while they are held, whatever else is inserted, split or evicted.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.registry import Registry
from penstock.core.protocols import EvictionPolicy, PrefixCache

PREFIX_CACHES: Registry[Callable[[int, EvictionPolicy | None], PrefixCache], None] = Registry("prefix cache")
PREFIX_CACHES.add("radix", "penstock.kv.prefix.radix:RadixCache")
PREFIX_CACHES.add("hash", "penstock.kv.prefix.hash_chain:HashChain")
PREFIX_CACHES.add("none", "penstock.kv.prefix.none:NoCache")
