"""Policies that order what the prefix cache gives up first."""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.registry import Registry
from penstock.core.protocols import EvictionPolicy

EVICTION_POLICIES: Registry[Callable[[], EvictionPolicy], None] = Registry("eviction policy")
EVICTION_POLICIES.add("lru", "penstock.kv.eviction.lru:LRU")
EVICTION_POLICIES.add("fifo", "penstock.kv.eviction.fifo:FIFO")
EVICTION_POLICIES.add("lfu", "penstock.kv.eviction.lfu:LFU")
EVICTION_POLICIES.add("flops", "penstock.kv.eviction.flops:Flops")
EVICTION_POLICIES.add("priority", "penstock.kv.eviction.priority:Priority")
