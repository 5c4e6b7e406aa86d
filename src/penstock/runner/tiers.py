"""What ranks keep outside the device: one store of bytes for each tier of `kv.tiers`, under the same name."""

from __future__ import annotations

from collections.abc import Callable

from penstock.base.registry import Registry
from penstock.core.protocols import PageStore

PAGE_STORES: Registry[Callable[..., PageStore], None] = Registry("page store")
PAGE_STORES.add("disk", "penstock.runner.disk_pages:DiskPages")
PAGE_STORES.add("fastswitch", "penstock.runner.beside_pages:BesidePages")
PAGE_STORES.add("host", "penstock.runner.host_pages:HostPages")
