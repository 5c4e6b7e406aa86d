"""What ranks keep outside the device: one store of bytes for each tier of `kv.tiers`, under the same name."""

from penstock.base.registry import Registry

PAGE_STORES = Registry("page store")
PAGE_STORES.add("host", "penstock.runner.host_pages:HostPages")
