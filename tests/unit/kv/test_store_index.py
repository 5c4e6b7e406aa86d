"""The books of a store: names, what goes first, holds, bytes; against a plain model of them."""

from __future__ import annotations

import random

import pytest

from penstock.kv.store_index import FoundBlock, StoreIndex, depth_of, names_after, root_name


def later(index: StoreIndex) -> int:
    index.tick += 1
    return index.tick


def stored(index: StoreIndex, *paths: str, tick: int = 0) -> None:
    for path in paths:
        wanted, _ = index.prepare_store(path, 10, tick or later(index))
        assert wanted
        index.complete_store(path, good=True)


def test_a_name_stands_for_all_of_the_text_before_it() -> None:
    secret, tokens = b"s" * 32, bytes(range(64))
    root = root_name(secret, "model", b"tenant")
    names = names_after(secret, root, tokens, 16)
    assert len(set(names)) == 4
    assert names_after(secret, names[1], tokens[32:], 16) == names[2:]
    assert names_after(secret, root, tokens[:47], 16) == names[:2], "whole blocks alone"
    changed = names_after(secret, root, b"\xff" + tokens[1:], 16)
    assert not set(changed) & set(names)
    for other in (
        root_name(b"t" * 32, "model", b"tenant"), root_name(secret, "model2", b"tenant"),
        root_name(secret, "model", b""),
    ):  # fmt: skip
        assert not set(names_after(secret, other, tokens, 16)) & set(names)


def test_ends_of_texts_go_before_their_beginnings() -> None:
    index = StoreIndex(60)
    index.keeps_changes = True
    for text in ("a", "b"):
        tick = later(index)
        stored(index, *(f"{text}-{n:x}" for n in range(3)), tick=tick)
    index.touch(["a-0", "a-1", "a-2"], later(index))
    wanted, gone = index.prepare_store("c-0", 30, later(index))
    assert (wanted, gone) == (True, ["b-2", "b-1", "b-0"])
    assert index.num_bytes == 60
    index.complete_store("c-0", good=False)
    assert index.num_bytes == 30, "what was not written takes no room"
    came = [(f"{text}-{n}", True) for text in "ab" for n in range(3)]
    assert index.take_changes() == [*came, ("b-2", False), ("b-1", False), ("b-0", False)]
    assert index.take_changes() == []


def test_what_is_read_stays() -> None:
    index = StoreIndex(30)
    stored(index, "a-0", "b-0", "c-0")
    index.prepare_load(["a-0"])
    index.prepare_load(["b-0"])
    assert index.prepare_store("d-0", 10, 9) == (True, ["c-0"])
    assert index.prepare_store("e-0", 10, 9) == (False, []), "nothing may go"
    index.complete_load(["a-0"], good=False)
    assert "a-0" not in index, "what could not be read is forgotten"
    assert index.prepare_store("a-0", 10, 9) == (True, [])
    index.complete_load(["b-0"], good=True)
    assert index.prepare_store("e-0", 10, 9) == (True, ["b-0"])
    index.check_invariants()


def test_what_cannot_be_read_is_forgotten_whoever_else_reads_it() -> None:
    """Two who read it would else find it again and again, each because the other holds it."""
    index = StoreIndex(30)
    stored(index, "a-0")
    index.prepare_load(["a-0"])
    index.prepare_load(["a-0"])
    index.complete_load(["a-0"], good=False)
    assert index.lookup(["a-0"]) == 0
    stored(index, "a-0")
    assert index.prepare_store("b-0", 30, 9) == (False, []), "the other still reads what has this name"
    index.complete_load(["a-0"], good=True)
    assert index.prepare_store("b-0", 30, 9) == (True, ["a-0"])
    index.check_invariants()


def test_who_may_not_make_room_stores_nothing_in_a_full_store() -> None:
    index = StoreIndex(20, evicts=False)
    stored(index, "a-0", "b-0")
    assert index.prepare_store("c-0", 10, 5) == (False, [])
    index.evicts = True
    assert index.prepare_store("c-0", 10, 5) == (True, ["a-0"])
    assert index.prepare_store("d-0", 21, 5) == (False, []), "it would never fit"


def test_what_others_do() -> None:
    index = StoreIndex(100)
    index.found([FoundBlock("x/a-1", 10, 7), FoundBlock("x/a-0", 10, 7), FoundBlock("old-0", 10, 1)])
    assert index.lookup(["x/a-0", "x/a-1", "x/a-2"]) == 2
    index.found([FoundBlock("x/a-0", 10, 8)], gone=["x/a-1", "never"])
    assert index.lookup(["x/a-0", "x/a-1"]) == 1
    assert index.num_bytes == 20
    wanted, gone = index.prepare_store("y-0", 90, later(index))
    assert (wanted, gone) == (True, ["old-0"])
    index.check_invariants()


@pytest.mark.parametrize("name", ["f/t/abc-1f", "abc-0", "nothing", "f/t/x-", "f-3/t/x-zz"])
def test_the_depth_is_told_by_the_name(name: str) -> None:
    assert depth_of(name) == {"f/t/abc-1f": 31}.get(name, 0)


def test_the_books_hold_whatever_comes() -> None:
    rng = random.Random(5)
    for _ in range(40):
        limit = rng.choice([30, 70, 200])
        index = StoreIndex(limit, evicts=rng.random() < 0.9)
        there: dict[str, bool] = {}  # whether it has come
        reading: list[list[str]] = []
        for _ in range(300):
            path = f"{rng.choice('abc')}-{rng.randrange(8):x}"
            order = rng.random()
            if order < 0.4:
                wanted, gone = index.prepare_store(path, 10, rng.choice([later(index), index.tick]))
                for other in gone:
                    assert there.pop(other)
                    assert not any(other in held for held in reading)
                assert not (wanted and path in there)
                if wanted:
                    there[path] = False
            elif order < 0.6 and (coming := sorted(p for p, here in there.items() if not here)):
                good = rng.random() < 0.8
                index.complete_store(coming[0], good=good)
                if good:
                    there[coming[0]] = True
                else:
                    del there[coming[0]]
            elif order < 0.75:
                paths = [f"a-{n:x}" for n in range(8)]
                num = index.lookup(paths)
                assert num == next((n for n, p in enumerate(paths) if not there.get(p)), 8)
                if num:
                    index.prepare_load(paths[:num])
                    reading.append(paths[:num])
            elif order < 0.9 and reading:
                held, good = reading.pop(rng.randrange(len(reading))), rng.random() < 0.7
                index.complete_load(held, good=good)
                for p in held:
                    if not good and there.get(p):
                        del there[p]
            elif order < 0.95:
                index.found([], gone=[path])
                if there.get(path):
                    del there[path]
            else:
                index.touch([path], later(index))
            index.check_invariants()
            assert index.num_bytes == 10 * len(there) <= limit
            assert {p for p, here in there.items() if here} == set(index._entries)


def test_what_a_look_finds_stays_whatever_becomes_of_our_own() -> None:
    """A server of blocks that comes back has what is just being written again, and refuses that."""
    for good in (False, True):
        index = StoreIndex(100)
        assert index.prepare_store("a-0", 10, 1) == (True, [])
        index.found([FoundBlock("a-0", 10, 0)])
        assert index.lookup(["a-0"]) == 0, "not before it is known to be whole"
        index.complete_store("a-0", good=good)
        assert index.lookup(["a-0"]) == 1
        index.check_invariants()
    index = StoreIndex(100)
    index.prepare_store("a-0", 10, 1)
    index.found([FoundBlock("a-0", 8, 0)])
    index.found([], ["a-0"])
    index.complete_store("a-0", good=False)
    assert len(index) == index.num_bytes == 0
    index.check_invariants()


def test_ages_of_what_this_process_has_used() -> None:
    index = StoreIndex(30)
    index.expire(100.0)
    stored(index, "a-0", "b-0")
    index.found([FoundBlock("c-0", 10, 0)])
    index.expire(105.0)
    index.touch(["a-0", "c-0"], later(index))
    assert (sum(index.found_ages.counts), index.found_ages.sum_s) == (1, 5.0), "of c-0 nobody knows"
    index.expire(107.0)
    index.touch(["c-0"], later(index))
    assert (sum(index.found_ages.counts), index.found_ages.sum_s) == (2, 7.0)
    assert index.prepare_store("d-0", 20, later(index)) == (True, ["b-0", "a-0"])
    assert (sum(index.left_ages.counts), index.left_ages.sum_s) == (2, 7.0 + 2.0)


def test_what_is_kept_leaves_after_all_others_until_its_time_is_over() -> None:
    index = StoreIndex(50)
    stored(index, "m/a/a-0", "m/a/a-1", "m/b/b-0", "m/b/b-1", "m/b/b-2")
    assert index.keep(["m/a/a-0", "m/a/a-1", "m/a/x-0"], 10.0, 20) == ["m/a/a-0", "m/a/a-1"]
    assert index.keep(["m/a/a-0"], 9.0) == [], "for longer already"
    assert index.keep(["m/b/b-2", "m/a/a-0"], 20.0, 20) == [], "no room, and behind it nothing"
    assert index.keep(["m/a/a-0"], 20.0, 20) == ["m/a/a-0"]
    index.share("a", 0.01)  # who has most for its part gives up no kept ones while others have what is not
    assert index.prepare_store("m/c/c-0", 30, later(index)) == (True, ["m/b/b-0", "m/b/b-1", "m/b/b-2"])
    index.complete_store("m/c/c-0", good=True)
    index.check_invariants()
    index.expire(15.0)
    index.check_invariants()
    assert index.num_kept == 1
    assert index.prepare_store("m/d/d-0", 20, later(index)) == (True, ["m/a/a-1", "m/c/c-0"])
    index.complete_store("m/d/d-0", good=True)
    for _ in range(2):
        assert index.demote(["m/d/d-0", "m/x/x-0"]) == ["m/d/d-0"]
        assert index.keep(["m/d/d-0"], 40.0) == ["m/d/d-0"]
    assert index.demote(["m/d/d-0"]) == ["m/d/d-0"]
    index.check_invariants()
    assert index.prepare_store("m/e/e-0", 30, later(index)) == (True, ["m/d/d-0"])
    index.keep(["m/e/e-0"], 30.0)
    index.complete_store("m/e/e-0", good=False)
    assert index.num_kept == 1, "what was not written is not kept"
    index.found([], ["m/a/a-0"])
    assert index.num_kept == 0
    index.check_invariants()
