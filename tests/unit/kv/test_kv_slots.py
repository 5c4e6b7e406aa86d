"""Recurrent states: where checkpoints stand, and who gives way to whom."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import EngineError
from penstock.core.batch import TableUpdate
from penstock.core.page_ops import PageOp
from penstock.core.sequence import Sequence
from penstock.kv.manager import KVManager
from tests.unit.kv.test_kv_manager import CACHES, make_kv
from tests.unit.kv.test_kv_model import computed, make_groups, make_seq, run, start, started


def make_slot_kv(num_slots: int = 4, checkpoint: int = 8, **kwargs: Any) -> KVManager:
    return KVManager(make_groups(2, 0, 1), [16, num_slots], 4, slot_checkpoint_tokens=checkpoint, **kwargs)


def test_chunks_end_where_checkpoints_stand() -> None:
    kv = make_slot_kv(checkpoint=11)  # rounded down to 8
    seq = make_seq(0, list(range(31)))  # its last whole block that can be found again ends at 28
    ends = []
    at = 0
    while at < 31:
        n = kv.cut(seq, at, 100)
        assert n > 0
        at += n
        ends.append(at)
    assert ends[:4] == [8, 16, 24, 28]
    assert kv.cut(seq, 0, 3) == 3
    assert kv.cut(make_seq(1, [1, 2]), 0, 2) == 2
    assert make_kv().cut(seq, 0, 100) == 100
    assert make_slot_kv(prefix_cache="none").cut(seq, 0, 100) == 100


@pytest.mark.parametrize("cache", CACHES)
def test_slots_are_hit_only_where_a_checkpoint_stands(cache: str) -> None:
    kv = make_slot_kv(prefix_cache=cache)
    a = started(kv, 0, list(range(15)))
    tables, ops = kv.drain()
    assert TableUpdate(0, 1, 0, a.tables[1].ids) in tables
    assert PageOp(1, -1, a.tables[1].ids[0], 1) in ops
    run(kv, a)
    _, ops = kv.drain()
    assert [op.src for op in ops if op.group == 1] == a.tables[1].ids * 2  # at 8 and at 12
    for known, hit in [(15, 12), (12, 8), (9, 8), (8, 0)]:
        assert kv.match(make_seq(9, list(range(known)))).num_tokens == hit
    b = started(kv, 1, list(range(15)))
    assert b.num_computed == 12
    _, ops = kv.drain()
    copies = [op for op in ops if op.group == 1]
    assert len(copies) == 1
    assert copies[0].dst == b.tables[1].ids[0]
    assert copies[0].src not in a.tables[1].ids
    kv.check_invariants([a, b])


def test_checkpoints_give_way_to_sequences() -> None:
    kv = make_slot_kv(3)
    a = computed(kv, 0, list(range(15)))
    assert kv.stats().groups[1].evictable == 2
    b = started(kv, 1, list(range(15)))  # takes the slab of the older checkpoint, not of the one it matched
    assert b.num_computed == 12
    assert kv.stats().groups[1].evictable == 1
    child = make_seq(2, list(range(15)))
    assert kv.fork(b, child)  # takes the last one
    assert kv.stats().groups[1].evictable == 0
    assert not kv.fork(b, make_seq(3, list(range(15))))
    c = make_seq(4, [77])
    assert not kv.can_admit(c, kv.match(c), 1)
    with pytest.raises(EngineError):
        kv.admit(c, kv.match(c))
    kv.check_invariants([a, b, child])
    assert kv.grow(child, 15)
    run(kv, child)  # no room for checkpoints: skipped without error
    kv.check_invariants([a, b, child])


def test_a_checkpoint_is_caught_between_two_steps_in_flight() -> None:
    """At depth 2 the slots have moved on when a chunk is committed: the copy is planned with the next chunk."""
    kv = make_slot_kv()
    seq = started(kv, 0, list(range(15)), num_tokens=8)
    kv.drain()
    kv.submitted(0)
    seq.num_inflight = 8
    assert kv.grow(seq, 12)
    _, ops = kv.drain()
    assert [op.src for op in ops if op.group == 1] == seq.tables[1].ids
    kv.submitted(1)
    seq.num_inflight = 12
    assert kv.stats().num_checkpoints == 0  # not before it is committed
    kv.check_invariants([seq])
    kv.retired(0)
    seq.num_computed, seq.num_inflight = 8, 4
    kv.commit(seq)
    assert kv.drain()[1] == []
    assert kv.match(make_seq(1, list(range(15)))).num_tokens == 8
    kv.check_invariants([seq])
    kv.release(seq)
    kv.retired(1)
    kv.check_invariants([])
    assert kv.stats().groups[1].used == 0


def staged_at(seq: Sequence) -> int | None:
    return None if seq.node.staged is None else int(seq.node.staged[0])


def test_a_checkpoint_that_could_not_be_caught_is_not_taken_later() -> None:
    """Three steps deep: no slab at 8, one at 16. Nothing may be attached at 8, where the slots stood long ago."""
    kv = make_slot_kv(3)
    a, b, c = make_seq(0, list(range(30))), make_seq(1, [50]), make_seq(2, [51])
    assert start(kv, a, 8)
    assert start(kv, b)
    assert start(kv, c)
    kv.drain()
    kv.submitted(0)
    a.num_inflight = 8
    assert kv.grow(a, 16)
    assert staged_at(a) is None
    kv.release(b)
    kv.release(c)
    kv.submitted(1)
    a.num_inflight = 16
    kv.retired(0)
    assert kv.grow(a, 20)
    assert staged_at(a) == 16
    a.num_computed, a.num_inflight = 8, 8
    kv.commit(a)
    assert kv.stats().num_checkpoints == 0
    assert staged_at(a) == 16
    a.num_inflight = 12
    kv.check_invariants([a])
    kv.submitted(2)
    kv.retired(1)
    a.num_computed, a.num_inflight = 16, 4
    kv.commit(a)
    assert kv.stats().num_checkpoints == 1
    kv.check_invariants([a])


def test_a_staged_checkpoint_goes_with_its_sequence() -> None:
    kv = make_slot_kv()
    seq = started(kv, 0, list(range(15)), num_tokens=8)
    kv.submitted(0)
    seq.num_inflight = 8
    assert kv.grow(seq, 12)
    assert seq.node.staged is not None
    kv.release(seq)
    kv.retired(0)
    kv.check_invariants([])
    assert kv.stats().groups[1].free == 4


def test_models_of_slots_only() -> None:
    kv = KVManager(make_groups(0, 0, 2), [3], 4, slot_checkpoint_tokens=4)
    a = computed(kv, 0, list(range(10)))
    b = started(kv, 1, list(range(10)))
    assert b.num_computed == 8
    kv.check_invariants([a, b])
    assert not kv.make_ragged(b, 0)
