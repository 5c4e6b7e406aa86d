"""Single cases of KV selectors: budgets that only just suffice, and shapes of two layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.select.pyramidkv import falling
from penstock.select.snapkv import smoothed
from tests.selecting import at, config_of, kept, line, selector
from tests.unit.select.test_kv_selectors_heads import profile, sizes_by_head


@pytest.mark.parametrize(("budget", "full"), [(41, 2), (42, 3), (60, 3)])
def test_a_head_keeps_everything_if_there_is_just_room_for_it(budget: int, full: int, tmp_path: Path) -> None:
    """Each of 18 heads keeps 10 tokens; 190 more make one whole, and 576 are left of 42 for each."""
    lines = [line(range(200), layer=n, head=g) for n in range(6) for g in range(3)]
    given = {"profile": str(profile(tmp_path)), "heads": 3 / 18, "sinks": 2, "recent": 8}
    sizes = sizes_by_head(kept("retrieval", 200, budget, lines, **given))
    assert sorted(sizes.values())[-3:].count(200) == full
    assert sum(sizes.values()) == budget * 18


@pytest.mark.parametrize("slope", [1.0, 1.5, 1.95])
def test_of_two_layers_the_lower_has_the_slope_and_the_higher_the_rest(slope: float) -> None:
    assert falling([3, 3, 7], slope) == pytest.approx([slope, slope, 2 - slope])
    assert falling([7], slope) == pytest.approx([1.0])


@pytest.mark.parametrize("width", [1, 2, 5, 9])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_votes_are_as_many_as_tokens(count: int, width: int) -> None:
    assert smoothed(np.ones(count, np.float32), width).shape == (count,)


@pytest.mark.parametrize(("threshold", "chosen"), [(0.5, "special"), (0.51, "local")])
def test_a_policy_that_recovers_just_the_threshold_is_enough(threshold: float, chosen: str) -> None:
    """Half of the attention goes to the special tokens and the newest two, all of it to these and the last 40."""
    seen = np.zeros((1, 100), np.float32)
    seen[0, [0, 10]] = 0.25
    seen[0, 70] = 0.5
    one = line(range(100), seen)
    made = selector(config_of("fastgen", "100%", sinks=0, recent=2, local=0.4, frequent=0.0, threshold=threshold))
    tokens = [1 if i in (0, 10) else 5 for i in range(100)]
    (slots,) = made.select(at(100, 100, tokens=tokens), [one])
    want = {0, 10, *range(98, 100)} if chosen == "special" else {0, 10, *range(60, 100)}
    assert set(slots.tolist()) == want
