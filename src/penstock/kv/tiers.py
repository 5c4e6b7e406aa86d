"""Where blocks may wait outside the device: who has which id there. A rank has the bytes (`runner.tiers`)."""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.registry import Registry
from penstock.core.protocols import IdTier

BLOCK_TIERS: Registry[Callable[..., IdTier], None] = Registry("block tier")
BLOCK_TIERS.add("disk", "penstock.kv.host:DiskTier")
BLOCK_TIERS.add("fastswitch", "penstock.kv.fast_switch:FastSwitchTier")
BLOCK_TIERS.add("host", "penstock.kv.host:HostTier")
