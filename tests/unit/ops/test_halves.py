"""Row B26: pages at half the bits, two tokens in the room of one, beside whole ones of the same pool."""

from __future__ import annotations

import numpy as np

from penstock.ops.plan import Planes
from penstock.ops.ref.codecs.halves import read_halves, store_halves
from penstock.ops.ref.storage import read_kv, store
from penstock.runner.levels import Levels
from penstock.runner.storage import planes_of
from tests.engine.harness import Knobs, plan_for, tiny

SIZE, LEAN = 4, '{"dtype": {"k": "int8", "v": "int4"}}'


def planes(num_pages: int) -> Planes:
    spec, _ = tiny("llama_gqa")
    (group,) = plan_for(spec, Knobs(kv_dtype=LEAN, selector="leankv", selector_config="{}")).groups
    return planes_of(group, num_pages, SIZE, True, lambda shape, dtype, fill: np.full(shape, fill, dtype))


def test_B26_two_tokens_of_half_the_bits_stand_in_the_room_of_one() -> None:
    rng = np.random.default_rng(1)
    held = planes(6)
    heads, dim = held["k"].shape[2:]
    pages = np.array([4, 1], np.int32)
    for name, steps in (("k", 15), ("v", 3)):
        x = rng.normal(size=(2 * SIZE * len(pages), heads, dim)).astype(np.float32)
        x[:3] = 0
        store_halves(held, name, pages, x)
        got = read_halves(held, name, pages)
        assert got.shape == x.shape
        # Two neighbours share a step, which is their range in so many parts.
        pairs = x.reshape(-1, 2, heads, dim)
        reach = (pairs.max(axis=(1, 3)) - pairs.min(axis=(1, 3)))[:, None, :, None]
        assert (np.abs(got.reshape(pairs.shape) - pairs) <= reach / steps * 0.51 + 1e-2).all(), name
        assert np.abs(got - x).max() > 1e-3, "they are rounded"
    untouched = [p for p in range(6) if p not in pages]
    assert np.isnan(read_kv(held, "k", np.array(untouched, np.int32), 0, SIZE)).any(), "others' pages are as they were"


def test_B26_what_stays_whole_is_moved_bit_by_bit_and_what_is_coarse_is_read_in_order() -> None:
    rng = np.random.default_rng(2)
    held = planes(12)
    heads, dim = held["k"].shape[2:]
    n = 5 * SIZE - 2
    x = {name: rng.normal(size=(n, heads, dim)).astype(np.float32) for name in ("k", "v")}
    old = np.array([9, 2, 7, 0, 5], np.int32)
    for name, numbers in x.items():
        store(held, name, (old[np.arange(n) // SIZE], np.arange(n) % SIZE), numbers)
    none = np.zeros(0, np.int32)
    before = Levels(none, np.arange(n, dtype=np.int32))
    assert np.array_equal(before.read(held, "k", old), read_kv(held, "k", old, 0, n))
    whole, middle = np.array([0, 3, 16, 17], np.int32), np.array([5, 1, 12, 8, 2, 9, 15, 4, 11, 6], np.int32)
    after = before.cut(whole, middle, SIZE)
    assert after.low.tolist() == sorted([5, 1, 12, 8, 2, 9, 15, 4]), "the best of them, as many as fill a page"
    assert after.num_slots() == SIZE + 4
    exact = {name: before.read(held, name, old) for name in x}
    new = np.array([2, 11], np.int32)  # one of them is an old one
    after.put(held, new, *before.take(held, old, after))
    for name, numbers in exact.items():
        got = after.read(held, name, new)
        coarse = after.coarse
        assert np.array_equal(got[~coarse], numbers[after.positions][~coarse])
        assert np.abs(got[coarse] - numbers[after.positions][coarse]).max() < 1.5
        assert np.corrcoef(got[coarse].ravel(), numbers[after.positions][coarse].ravel())[0, 1] > 0.8
