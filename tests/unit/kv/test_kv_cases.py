"""Single cases of the cache: how long an entry is retained, and what of a pool is in use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.config.selection import Keeping, SelectionConfig, SelectionOptions, parse_budget
from penstock.core.events import PoolGrowth
from penstock.kv.backing import Backing
from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.contiguous import ContiguousManager
from penstock.kv.eviction.priority import MAX_DOUBLINGS, RETAIN_LEVEL, RETAIN_USE, Priority
from penstock.kv.manager import KVManager
from penstock.kv.outbox import Outbox
from penstock.kv.room import Room, Want
from penstock.kv.selection import Selections
from penstock.kv.virtual import VirtualManager
from tests.unit.kv.test_kv_contiguous import GROUP, sequence


def test_an_entry_is_retained_longer_per_doubling_of_its_uses() -> None:
    """Used once: as long as it is recent. Twice, four times, eight times: once, twice, three times the retention."""
    policy, entry = Priority(), SimpleNamespace(tick=None)
    policy.on_insert(entry, 100)
    retained = [policy.key(entry) - 100]
    for _ in range(200):
        policy.on_hit(entry, 100)
        retained.append(policy.key(entry) - 100)
    uses = {1: 0, 2: 1, 3: 1, 4: 2, 7: 2, 8: 3, 16: 4, 200: MAX_DOUBLINGS}
    assert {n: retained[n - 1] for n in uses} == {n: RETAIN_USE * doublings for n, doublings in uses.items()}


@pytest.mark.parametrize(("priority", "levels"), [(0, 0), (-1, 1), (3, -3), (-100, 8), (100, -8)])
def test_an_entry_of_an_important_request_is_retained_per_level(priority: int, levels: int) -> None:
    policy, entry = Priority(), SimpleNamespace(tick=None)
    policy.request_priority = priority
    policy.on_insert(entry, 7)
    assert policy.key(entry) == 7 + RETAIN_LEVEL * levels
    policy.request_priority = 9  # the best request counts, not the last one
    policy.on_hit(entry, 7)
    assert policy.key(entry) == 7 + RETAIN_USE + RETAIN_LEVEL * max(levels, -8)


MANAGERS: dict[str, Any] = {
    "paged": lambda: KVManager([GROUP], [10], 4),
    "contiguous": lambda: ContiguousManager([GROUP], [10], 4, max_model_len=40),
    "virtual": lambda: VirtualManager([GROUP], [10], 4, max_model_len=40, max_num_seqs=2),
}


@pytest.mark.parametrize("name", MANAGERS)
def test_a_sequence_holds_blocks_from_its_admission_to_its_release(name: str) -> None:
    kv = MANAGERS[name]()
    seq = sequence(0, 8, 5)
    assert kv.num_held(seq) == 0
    kv.admit(seq, kv.match(seq))
    assert kv.grow(seq, 8)
    assert kv.num_held(seq) >= 2
    kv.release(seq)
    assert kv.num_held(seq) == 0


def test_memory_that_is_short_is_shared_in_proportion_and_nobody_loses_any() -> None:
    """Both want `MIN_AHEAD` slabs beyond what they use; there is memory for half of that."""
    pools = [BlockPool(1000, 1), BlockPool(1000, 1)]
    backing = Backing([GROUP, replace(GROUP, index=1)], pools, 4)
    backing._ahead = [8, 4]
    size = backing.slab_bytes[0]
    growth = backing.grown(12 * size)
    assert growth == PoolGrowth(num_slabs=[8, 4], is_short=False)
    backing.apply(growth)
    for pool in pools:
        assert pool.alloc_slabs(8)
    short = backing.grown(6 * size)
    assert short == PoolGrowth(num_slabs=[8 + 4, 8 + 2], is_short=True), "of 8 and 4 more each gets half"
    assert backing.grown(0) == PoolGrowth(num_slabs=[8, 8], is_short=True)


class Held:
    """A prefix cache with two blocks that nobody stands on, whose slabs somebody holds all the same."""

    num_evictable = 2

    def __init__(self, slabs: list[int]) -> None:
        self.left = slabs

    def evict(self, count: int) -> tuple[list[tuple[int]], list[tuple[int]]]:
        gone, self.left = self.left[:count], self.left[count:]
        self.num_evictable = len(self.left)
        return [(slab,) for slab in gone], []


@pytest.mark.parametrize(("held", "want"), [(False, True), (True, False)])
def test_blocks_that_are_held_elsewhere_give_no_room(held: bool, want: bool) -> None:
    pool = BlockPool(4, 1)
    taken = pool.alloc_run(0, 4)
    if held:
        pool.ref_slabs(taken[:2])
    cache: Any = Held(taken[:2])
    room = Room((0,), (), [pool], cache)
    assert room.reserve([Want(0, 2, 0)]) is want
    assert pool.num_free == (2 if want else 0)


def keeping(name: str, drops: Any, watches: Any, **options: Any) -> Keeping:
    config = SelectionConfig(name, parse_budget("8"), SelectionOptions(**options))
    return Keeping(config, drops, watches, per_head=False, cache_positions=False)


def selections(kept: Keeping, pool: BlockPool) -> tuple[Selections, Outbox]:
    outbox = Outbox([pool])
    room: Any = None
    return Selections(kept, 0, pool, room, outbox, 4, lambda seq: None), outbox


@pytest.mark.parametrize(("prompt", "observe", "want"), [(12, 16, 0), (40, 16, 24), (4, 16, 3)])
def test_a_match_ends_before_the_tokens_whose_attention_decides(prompt: int, observe: int, want: int) -> None:
    """Of 12 tokens the window of 16 is all: nothing may be skipped. Of 40 it is 24 to 39. A prompt of 4 is not cut."""
    chosen, _ = selections(keeping("snapkv", "tokens", "recent", observe=observe, interval=64), BlockPool(8, 1))
    assert chosen.limit(sequence(0, prompt, 5), prompt - 1) == want


def test_blocks_that_are_kept_and_shared_are_copied_before_they_are_given_back() -> None:
    """Sinks in block 0, the newest 4 tokens in block 5; both are the prefix cache's too, which keeps its own."""
    pool = BlockPool(12, 1)
    chosen, outbox = selections(keeping("streaming", "blocks", "nothing", sinks=4, interval=8), pool)
    seq = sequence(0, 24, 9)
    table = BlockTable(pool.alloc_run(0, 6))
    pool.ref_slabs([0, 5])
    table.spare = pool.alloc_run(6, 2)
    seq.tables, seq.num_computed, seq.next_selection = [table], 24, 24
    assert chosen.passed(seq)
    assert (len(table.ids), table.dropped, table.spare) == (2, [16], [])
    tables, ops = outbox.drain()
    assert sorted((op.src, op.dst) for op in ops) == sorted(zip([0, 5], table.ids, strict=True))
    assert {pool.refs[0], pool.refs[5]} == {1}
    assert all(pool.refs[slab] == 0 for slab in range(1, 5))
    assert [update.ids for update in tables] == [table.ids]
