"""Policies that order what the prefix cache gives up first."""

from penstock.base.registry import Registry

EVICTION_POLICIES = Registry("eviction policy")
EVICTION_POLICIES.add("lru", "penstock.kv.eviction.lru:LRU")
EVICTION_POLICIES.add("fifo", "penstock.kv.eviction.fifo:FIFO")
