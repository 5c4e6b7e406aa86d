"""Where blocks may wait outside the device: who has which id there. A rank has the bytes (`runner.tiers`)."""

from penstock.base.registry import Registry

BLOCK_TIERS = Registry("block tier")
BLOCK_TIERS.add("host", "penstock.kv.host:HostTier")
