"""One file per KV selector. See `core.selection.KVSelector`; an entry names `make(SelectionBench) -> KVSelector`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from penstock.base.registry import Registry
from penstock.core.selection import Drops, KVSelector, Watches

if TYPE_CHECKING:
    from penstock.select.bench import SelectionBench


class Traits(NamedTuple):
    """What must be known of a selector before a weight is read; the same as its attributes."""

    drops: Drops = "tokens"
    watches: Watches = "nothing"
    per_head: bool = True
    cache_positions: bool = False
    always: bool = False
    """Whether it chooses even where the budget would hold everything: it has a measure of its own."""
    aside: bool = False
    halves: bool = False
    ahead: bool = False
    """Whether it reads single tokens, chosen a layer ahead (`core.selection.TokenReads`)."""


KV_SELECTORS: Registry[Callable[[SelectionBench], KVSelector], Traits] = Registry("kv_selector")
KV_SELECTORS.add("streaming", "penstock.select.streaming:make", Traits("blocks", per_head=False, cache_positions=True))
KV_SELECTORS.add("window", "penstock.select.window:make", Traits(per_head=False))
KV_SELECTORS.add("random", "penstock.select.chance:make", Traits())
KV_SELECTORS.add("h2o", "penstock.select.h2o:make", Traits(watches="all"))
KV_SELECTORS.add("scissorhands", "penstock.select.scissorhands:make", Traits(watches="all"))
KV_SELECTORS.add("snapkv", "penstock.select.snapkv:make", Traits(watches="recent"))
KV_SELECTORS.add("pyramidkv", "penstock.select.pyramidkv:make", Traits(watches="recent"))
KV_SELECTORS.add("adakv", "penstock.select.adakv:make", Traits(watches="recent"))
KV_SELECTORS.add("alisa", "penstock.select.alisa:make", Traits(watches="recent", aside=True))
KV_SELECTORS.add("leankv", "penstock.select.leankv:make", Traits(watches="recent", halves=True))
KV_SELECTORS.add("fastgen", "penstock.select.fastgen:make", Traits(watches="recent", always=True))
KV_SELECTORS.add("retrieval", "penstock.select.retrieval:make", Traits())
KV_SELECTORS.add("quest", "penstock.select.quest:make", Traits("nothing", per_head=False))
KV_SELECTORS.add("infinigen", "penstock.select.infinigen:make", Traits("nothing", per_head=False, ahead=True))
