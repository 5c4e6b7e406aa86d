"""One file per KV selector. See `core.selection.KVSelector`; an entry names `make(SelectionBench) -> KVSelector`."""

from __future__ import annotations

from penstock.base.registry import Registry

KV_SELECTORS = Registry("kv_selector")
KV_SELECTORS.add("streaming", "penstock.select.streaming:make")
KV_SELECTORS.add("window", "penstock.select.window:make")
KV_SELECTORS.add("random", "penstock.select.chance:make")
KV_SELECTORS.add("h2o", "penstock.select.h2o:make")
KV_SELECTORS.add("scissorhands", "penstock.select.scissorhands:make")
KV_SELECTORS.add("snapkv", "penstock.select.snapkv:make")
KV_SELECTORS.add("pyramidkv", "penstock.select.pyramidkv:make")
KV_SELECTORS.add("adakv", "penstock.select.adakv:make")
KV_SELECTORS.add("fastgen", "penstock.select.fastgen:make")
KV_SELECTORS.add("retrieval", "penstock.select.retrieval:make")
KV_SELECTORS.add("quest", "penstock.select.quest:make")
