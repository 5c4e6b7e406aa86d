"""How memory is shared out between weights and sequences (row B19)."""

from __future__ import annotations

import random

import pytest

from penstock.base.errors import ConfigError
from penstock.plan.offload import (
    OffloadModel,
    OffloadPlan,
    OffloadRates,
    best_plan,
    kept_layers,
    offload_plans,
    step_seconds,
    window_bytes,
)


def test_layers_that_stay_use_all_of_the_limit_and_are_spread() -> None:
    rng = random.Random(1)
    for _ in range(300):
        sizes = [rng.choice([3, 3, 3, 5]) for _ in range(rng.randrange(1, 12))]
        prefetch, beside = rng.randrange(0, 3), rng.randrange(0, 4)
        limit = rng.randrange(0, sum(sizes) + 6)
        try:
            keeps = kept_layers(sizes, limit, prefetch, beside=beside)
        except ConfigError:
            assert limit < beside + min(sum(sizes), (1 + prefetch) * max(sizes))
            continue
        others = [size for size, stays in zip(sizes, keeps, strict=True) if not stays]
        taken = beside + sum(sizes) - sum(others) + window_bytes(others, prefetch)
        assert taken <= limit
        if len(set(sizes)) == 1:
            assert not others or limit - taken < sizes[0], "one more could stay"
            places = [i for i, stays in enumerate(keeps) if not stays]
            gaps = (
                [b - a for a, b in zip(places, [*places[1:], places[0] + len(sizes)], strict=True)] if places else [1]
            )
            assert max(gaps) - min(gaps) <= 1


LAYERS = (10,) * 8
RATES = OffloadRates(read=100.0, step_s=0.8, row_s=0.08, layers_share=1.0)
"""A layer takes 0.1 s to read, as long as it computes for one row, more for more."""


def test_a_step_takes_what_the_disk_or_the_layers_take_whichever_is_longer() -> None:
    model = OffloadModel(LAYERS, 0, 1)
    none, some = [False] * 8, [True, False] * 4
    assert step_seconds(model, [True] * 8, 1, RATES, 1) == pytest.approx(0.88)
    assert step_seconds(model, none, 1, RATES._replace(read=50.0), 1) == pytest.approx(8 * 0.2), "the disk"
    assert step_seconds(model, none, 1, RATES, 40) == pytest.approx(4.0), "the layers"
    assert step_seconds(model, none, 0, RATES, 1) == pytest.approx(8 * 0.1 + 0.88), "one after the other"
    assert step_seconds(model, some, 0, RATES._replace(read=50.0), 1) == pytest.approx(4 * 0.2 + 4 * 0.11)
    assert step_seconds(model, none, 1, RATES._replace(read_load=0.005), 40) == pytest.approx(4.4)


def test_B19_keys_and_values_on_the_disk_are_read_for_each_layer_while_the_one_before_computes() -> None:
    model = OffloadModel(LAYERS, 0, 80, moved=80)
    assert model.sets == 20
    stay, come = [True] * 8, [False] * 8
    fast = RATES._replace(read=1e9)
    assert step_seconds(model, stay, 0, fast, 1, 1) == pytest.approx(0.88, rel=1e-3), "hidden"
    assert step_seconds(model, stay, 0, fast._replace(kv_read=100.0), 1, 4) == pytest.approx(8 * 0.4, rel=0.01)
    assert step_seconds(model, come, 1, RATES, 1, 4) == pytest.approx(8 * 0.1 + 8 * 0.4, rel=0.05), "one disk"


def test_B19_keys_and_values_go_to_the_disk_where_memory_holds_too_few_sequences() -> None:
    model = OffloadModel(LAYERS, 20, 80, moved=88, least_kv=80)
    plans = offload_plans(model, 180, RATES._replace(read=1000.0), (1, 2, 4, 8))
    chosen = best_plan(plans)
    assert chosen is not None
    assert (chosen.rows, chosen.away > 0) == (4, True), "memory for whole ones is there for one"
    assert chosen.weight_bytes + chosen.kv_bytes == 180
    assert chosen.tokens_s > max(plan.tokens_s for plan in plans if not plan.away)
    ample = best_plan(offload_plans(model, 1000, RATES, (1, 2, 4, 8)))
    assert ample is not None
    assert (ample.rows, ample.away, ample.weight_bytes) == (8, 0, 360)
    alike = [OffloadPlan(8, 0, 1, 1.0, 8), OffloadPlan(8, 1, 1, 1.01, 0), OffloadPlan(4, 1, 1, 0.505, 0)]
    assert best_plan(alike) == alike[2], "as good, but for what nobody can tell"
    assert best_plan([]) is None


def test_what_is_behind_the_layers_is_hidden_by_a_longer_way_ahead() -> None:
    model, rates = OffloadModel(LAYERS, 0, 1), RATES._replace(read=50.0, layers_share=0.5)
    short, long = (step_seconds(model, [False] * 8, prefetch, rates, 1) for prefetch in (0, 2))
    assert long < short
    assert long == pytest.approx(8 * 0.2, rel=0.01)


def test_B19_the_first_plan_is_the_best_of_all_that_fit() -> None:
    """Memory for weights and for sequences is one: more of these share what is read, more layers are read for them."""
    rng = random.Random(3)
    seen = set()
    for _ in range(60):
        model = OffloadModel((rng.randrange(5, 20),) * rng.randrange(3, 12), rng.randrange(0, 30), rng.randrange(1, 9))
        memory = rng.randrange(30, 260)
        rates = OffloadRates(
            rng.uniform(20, 400), rng.uniform(0.1, 1), rng.uniform(0.001, 0.2), rng.uniform(0.5, 1), 0.0
        )
        plans = offload_plans(model, memory, rates, range(1, 33))
        best = 0.0
        for rows in range(1, 33):
            for prefetch in range(4):
                limit = memory - rows * model.row
                least = model.beside + window_bytes(model.layers, prefetch)
                if limit < min(least, model.beside + sum(model.layers)):
                    continue
                try:
                    keeps = kept_layers(model.layers, limit, prefetch, beside=model.beside)
                except ConfigError:
                    continue
                best = max(best, rows / step_seconds(model, keeps, prefetch, rates, rows))
        assert (plans[0].tokens_s if plans else 0.0) == best
        for plan in plans:
            assert plan.weight_bytes + plan.rows * model.row == memory
        if plans:
            seen.add((plans[0].rows > 1, plans[0].prefetch > 0, plans[0].rows < 32))
    assert len(seen) > 3, "they differ"


def test_B19_a_column_of_sequences_shares_what_is_read() -> None:
    """Where the disk is the limit, sixteen rows through a layer before the next one comes are near sixteen times as
    many tokens/s as one after the other."""
    model, rates = OffloadModel(LAYERS, 0, 1), RATES._replace(read=10.0, row_s=0.001)
    one, column = (step_seconds(model, [False] * 8, 1, rates, rows) for rows in (1, 16))
    assert 16 / column > 15 * (1 / one)
