"""Each KV selector on attention whose right answer is known (catalogue rows F01, F03, F04, F06, F22, F23)."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.select.adakv import AdaKV
from penstock.select.pyramidkv import falling
from penstock.select.slots import allot
from penstock.select.snapkv import smoothed, votes
from penstock.select.streaming import gap
from tests.selecting import BARE, GROUP, at, config_of, kept, line, selector


def spikes(n: int, **heights: float) -> list[float]:
    """Attention of n slots: p3=0.5 is half of it at slot 3; what is left is spread out."""
    rest = (1 - sum(heights.values())) / (n - len(heights))
    out = [rest] * n
    for key, height in heights.items():
        out[int(key[1:])] = height
    return out


def test_F01_streaming_keeps_sinks_and_the_most_recent() -> None:
    assert kept("streaming", 20, 8, [line(range(20))], sinks=3) == [[0, 1, 2, 15, 16, 17, 18, 19]]
    assert kept("streaming", 20, 8, [line([0, 1, 2, *range(14, 20)])], sinks=3) == [[0, 1, 2, 15, 16, 17, 18, 19]]
    made = selector(config_of("streaming"))
    assert (made.drops, made.watches, made.cache_positions) == ("blocks", "nothing", True)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize(("budget", "sinks"), [(8, 3), (8, 0), (1, 4), (3, 8)])
def test_F01_the_gap_leaves_the_budget(num_tokens: int, budget: int, sinks: int) -> None:
    lost = gap(num_tokens, budget, sinks)
    assert num_tokens - len(lost) == min(num_tokens, budget)
    assert num_tokens == 0 or num_tokens - 1 not in lost


def test_window_keeps_no_sinks() -> None:
    assert kept("window", 10, 3, [line(range(10))], sinks=2) == [[7, 8, 9]]


def test_random_gives_every_token_the_same_chance_and_every_head_its_own() -> None:
    lines = [line(range(1000), layer=n, head=g) for n in range(10) for g in range(4)]
    found = kept("random", 1000, 250, lines, **BARE)
    counts = np.bincount(np.concatenate(found), minlength=1000)[:999]
    assert abs(counts.mean() - 10) < 0.1
    assert abs(counts.std() - (40 * 0.25 * 0.75) ** 0.5) < 0.3, "as of 40 independent draws"
    first, last = counts[:500].mean(), counts[500:].mean()
    assert abs(first - last) < 0.7
    assert found[0] != found[1]
    assert found == kept("random", 1000, 250, lines, **BARE)
    assert found != kept("random", 1000, 250, lines, seed=1, **BARE)


def test_random_does_not_gamble_twice_for_a_token() -> None:
    """What stays of a cut cache is what would have stayed of a whole one: no preference for old or new."""
    (early,) = kept("random", 500, 300, [line(range(500))], **BARE)
    cut = [*early, *range(500, 600)]
    assert kept("random", 600, 200, [line(cut)], **BARE) == kept("random", 600, 200, [line(range(600))], **BARE)


def test_F03_h2o_keeps_heavy_hitters_and_a_recent_half() -> None:
    one = line(range(40))
    made = selector(config_of("h2o", sinks=0, recent=1))
    weights = np.zeros((40, GROUP, 40), np.float32)
    for t in range(40):
        weights[t, :, t] = 0.5
        weights[t, 0, min(7, t)] += 0.25
        weights[t, 0, min(11, t)] += 0.25
        weights[t, 1, min(19, t)] += 0.5
    made.watch(one, weights, 0)
    assert np.isclose(one.stats["mass"].sum(), 40 * GROUP)
    (slots,) = made.select(at(40, 6), [one])
    assert slots.tolist() == [7, 11, 19, 37, 38, 39]
    (slots,) = selector(config_of("h2o", sinks=1, recent=1)).select(at(40, 6), [one])
    assert slots.tolist() == [0, 7, 11, 19, 38, 39], "the sink is of the recent half"


@pytest.mark.parametrize(("heavy", "recents"), [(0.0, 20), (0.25, 15), (1.0, 2)])
def test_F03_the_share_of_heavy_hitters_is_an_option(heavy: float, recents: int) -> None:
    one = line(range(100), mass=np.arange(100)[::-1])
    (found,) = kept("h2o", 100, 20, [one], sinks=0, recent=2, heavy=heavy)
    assert found == [*range(20 - recents), *range(100 - recents, 100)]


def test_F04_scissorhands_drops_what_a_window_of_history_did_not_look_at() -> None:
    """Token 3 was looked at long ago, token 5 lately: only the window counts."""
    made = selector(config_of("scissorhands", history=16, **BARE))
    one = line(range(64))
    weights = np.zeros((64, GROUP, 64), np.float32)
    for t in range(64):
        weights[t, :, t] = 0.6
        weights[t, :, min(t, 3 if t < 32 else 5)] += 0.4
    made.watch(one, weights, 0)
    counts = np.sum([one.stats[f"below.{i}"] for i in range(4)], axis=0)
    assert counts[5] == 0
    assert counts[3] == counts[20] == 16, "every token of the window"
    assert counts[63] == 0
    assert counts[60] == 3, "it was not there before"
    (slots,) = made.select(at(64, 2), [one])
    assert slots.tolist() == [5, 63]


def test_F04_less_than_average_is_less_than_one_over_the_tokens_there() -> None:
    """Of ten tokens, 0.06 of the attention is less than average and 0.11 is more; below half of it none would be."""
    made = selector(config_of("scissorhands", history=16, **BARE))
    one = line(range(10))
    weights = np.zeros((10, GROUP, 10), np.float32)
    weights[9, :, :] = 0.09
    weights[9, :, 2], weights[9, :, 7] = 0.06, 0.11
    made.watch(one, weights, 0)
    counts = np.sum([one.stats[f"below.{i}"] for i in range(4)], axis=0) - 9 + np.arange(10)
    assert counts[2] == 1, "0.06 of ten"
    assert counts[7] == 0, "0.11 of ten"


def test_F04_the_window_moves_by_quarters() -> None:
    made = selector(config_of("scissorhands", history=16))
    one = line(range(100))
    never = np.zeros((100, GROUP, 100), np.float32)
    never[:, :, 0] = 1
    seen = []
    for t in range(100):
        made.watch(one, never[t : t + 1], t)
        seen.append(float(np.sum([one.stats[f"below.{i}"] for i in range(4)], axis=0)[1]))
    assert seen[:17] == [0, *range(1, 13), *(13, 14, 15, 13)], "1 to 15, then what 4 of them said is forgotten"
    assert set(seen[20:]) == {13, 14, 15, 16}


def test_F06_snapkv_keeps_what_the_last_tokens_voted_for() -> None:
    votes_of = np.mean([spikes(40, p9=0.4), spikes(40, p22=0.5)], axis=0)
    (found,) = kept("snapkv", 40, 4, [line(range(40), votes_of)], pool=1, sinks=1, recent=1)
    assert found == [0, 9, 22, 39]


def test_F06_votes_are_smoothed_over_neighbours_but_not_over_the_recent_tokens() -> None:
    one = line(range(20), spikes(20, p6=0.5, p16=0.3))
    options = config_of("snapkv", pool=3, sinks=0, recent=4).options
    points = votes(one, at(20, 8), options)
    assert np.allclose(points[5:8], points[6])
    assert points[15] < points[9] * 1.01, "a recent token's attention is its own"
    (found,) = kept("snapkv", 20, 7, [one], pool=3, sinks=0, recent=4)
    assert found == [5, 6, 7, 16, 17, 18, 19]


@pytest.mark.parametrize("width", [1, 2, 5, 9])
@pytest.mark.parametrize("n", [0, 1, 4, 30])
def test_F06_smoothing_is_a_mean_with_zeros_beyond_the_ends(n: int, width: int) -> None:
    x = np.random.default_rng(0).random(n, np.float32)
    around = np.concatenate([np.zeros(width // 2), x, np.zeros(width)])
    assert np.allclose(smoothed(x, width), [around[i : i + width].mean() for i in range(n)])


def test_F06_query_heads_that_share_keys_vote_together() -> None:
    one = line(range(10))
    rows = np.zeros((2, 2, 10), np.float32)
    rows[:, 0, 2], rows[:, 1, 5] = 0.6, 0.9
    one.recent = lambda: rows
    assert np.allclose(votes(one, at(10, 3), config_of("snapkv", pool=1).options)[[2, 5]], [0.3, 0.45])


@pytest.mark.parametrize("slope", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("budget", [30, 37, 50])
def test_F22_budgets_fall_arithmetically_and_add_up(slope: float, budget: int) -> None:
    lines = [line(range(100), [0.01] * 100, layer=2 * n, head=g) for n in range(5) for g in range(3)]
    given = {"slope": slope, "sinks": 2, "recent": 8}
    found = kept("pyramidkv", 100, budget, lines, **given)
    sizes = [len(x) for x in found]
    assert sum(sizes) == budget * len(lines)
    free = budget - 10
    for n in range(5):
        expected = 10 + free * (slope - 2 * (slope - 1) * n / 4)
        assert all(abs(size - expected) <= 1 for size in sizes[3 * n : 3 * n + 3])


def test_F22_what_a_layer_has_no_use_for_goes_to_others() -> None:
    lines = [line(range(n), [1 / n] * n, layer=i) for i, n in enumerate((40, 60, 100))]
    sizes = [len(x) for x in kept("pyramidkv", 100, 50, lines, slope=2.0, **BARE)]
    assert sum(sizes) == 150
    assert sizes[0] == 40, "it would have got twice the mean"
    assert [len(x) for x in kept("pyramidkv", 100, 67, lines, **BARE)] == [40, 60, 100]


def test_F22_weights_are_of_layers_that_have_lines() -> None:
    assert falling([3, 3, 5, 9], 2.0).tolist() == [2.0, 2.0, 1.0, 0.0]
    assert falling([4, 4], 2.0).tolist() == [1.0, 1.0]


def test_F23_adakv_gives_wide_heads_more() -> None:
    sharp = line(range(100), spikes(100, p5=0.9, p50=0.09), head=0)
    wide = line(range(100), np.linspace(2, 0, 100) / 100, head=1)
    found = kept("adakv", 100, 20, [sharp, wide], pool=1, floor=0.2, **BARE)
    assert len(found[0]) == 4, "its floor"
    assert {5, 50} < set(found[0])
    assert len(found[1]) == 36
    assert found[1][:35] == list(range(35))
    assert [len(x) for x in kept("adakv", 100, 20, [sharp, wide], pool=1, floor=1.0, **BARE)] == [20, 20]


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("pool", [1, 5])
@pytest.mark.parametrize("seed", range(3))
def test_F23_votes_kept_are_never_less_than_with_equal_shares(floor: float, pool: int, seed: int) -> None:
    """In every layer, by the votes that both go by."""
    rng = np.random.default_rng(seed)
    lines = []
    for n in range(4):
        for g in range(3):
            size = int(rng.integers(30, 200))
            rows = rng.random((8, size)) ** float(rng.integers(1, 30))
            lines.append(line(sorted(rng.choice(200, size, False)), rows / rows.sum(1, keepdims=True), n, g))
    given = {"pool": pool, "sinks": 2, "recent": 8, "observe": 8}
    made = selector(config_of("adakv", floor=floor, **given))
    assert isinstance(made, AdaKV)
    where = at(200, 40)
    ours, equal = made.select(where, lines), selector(config_of("snapkv", **given)).select(where, lines)
    gains = []
    for n in range(4):
        sums = [
            sum(votes(lines[i], where, made.options)[found[i]].sum() for i in range(3 * n, 3 * n + 3))
            for found in (ours, equal)
        ]
        assert sum(len(ours[i]) for i in range(3 * n, 3 * n + 3)) <= 120
        gains.append(sums[0] - sums[1])
    assert min(gains) > -1e-5
    assert floor == 1.0 or max(gains) > 1e-3


def test_of_equals_the_newest_stay() -> None:
    assert kept("snapkv", 30, 5, [line(range(30), [1 / 30] * 30)], pool=1, **BARE) == [[25, 26, 27, 28, 29]]


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up_and_stay_below_their_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    most, weights = rng.integers(0, 50, 12), rng.random(12) * rng.integers(0, 2, 12)
    total = int(rng.integers(0, 400))
    found = allot(total, weights, most)
    assert found.sum() == min(total, most.sum())
    assert (found <= most).all()
    assert (found >= 0).all()
    if total < 12:
        return
    free = (found < most) & (weights > 0)
    worth = found[free] / weights[free]
    for a in np.flatnonzero(free):  # nobody with room has less than its part
        assert found[a] + 1 >= weights[a] * min(worth, default=0) - 1
