"""Single cases of the cache: how long an entry is retained, and what of a pool is in use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.kv.contiguous import ContiguousManager
from penstock.kv.eviction.priority import MAX_DOUBLINGS, RETAIN_LEVEL, RETAIN_USE, Priority
from penstock.kv.manager import KVManager
from penstock.kv.virtual import VirtualManager
from tests.unit.test_kv_contiguous import GROUP, sequence


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
