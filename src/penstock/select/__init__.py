"""One file per KV selector. See `core.selection.KVSelector`; an entry names `make(SelectionBench) -> KVSelector`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.base.registry import Registry
from penstock.core.selection import Drops, KVSelector, Watches

if TYPE_CHECKING:
    from penstock.select.bench import SelectionBench

KV_SELECTORS: Registry[Callable[[SelectionBench], KVSelector], Traits] = Registry("kv_selector")
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


class Traits(NamedTuple):
    """What must be known of a selector before a weight is read; the same as its attributes."""

    drops: Drops = "tokens"
    watches: Watches = "nothing"
    per_head: bool = True
    cache_positions: bool = False
    always: bool = False
    """Whether it chooses even where the budget would hold everything: it has a measure of its own."""


TRAITS: dict[str, Traits] = {
    "streaming": Traits("blocks", per_head=False, cache_positions=True),
    "window": Traits(per_head=False),
    "random": Traits(),
    "h2o": Traits(watches="all"),
    "scissorhands": Traits(watches="all"),
    "snapkv": Traits(watches="recent"),
    "pyramidkv": Traits(watches="recent"),
    "adakv": Traits(watches="recent"),
    "fastgen": Traits(watches="recent", always=True),
    "retrieval": Traits(),
    "quest": Traits("nothing", per_head=False),
}
