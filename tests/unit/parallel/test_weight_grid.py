"""Layouts of weights in one and two dimensions, counted on a grid of four processes (catalogue row H02)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.studies.weight_grid import LAYOUTS, Case, choose, counted, flips, given_bytes

from penstock.parallel.team import RankTeam


@pytest.fixture(scope="module")
def team() -> Iterator[RankTeam]:
    with RankTeam(4) as four:
        yield four


@pytest.mark.parametrize("layout", LAYOUTS)
def test_H02_counted_bytes_are_those_of_the_model(team: RankTeam, layout: str) -> None:
    for case in (Case(8, 16, 64), Case(24, 32, 48), Case(64, 16, 16), Case(4, 8, 8)):
        given, difference = counted(team, case, layout)
        assert given == given_bytes(case, layout)
        assert difference < 1e-5


@pytest.mark.parametrize(("hidden", "width"), [(16, 64), (32, 48)])
def test_H02_the_choice_flips_where_it_is_predicted(team: RankTeam, hidden: int, width: int) -> None:
    """One dimension or two for few rows, by the shape; then weights are gathered over a line, then over all."""
    at = flips(hidden, width)
    assert len(at) == 2
    first = "stationary-1d" if width > 2 * hidden else "stationary-2d"
    for flip, before, after in zip(at, (first, "gathered-part"), ("gathered-part", "gathered"), strict=True):
        for rows, want in ((flip - 4, before), (flip + 4, after)):
            case = Case(int(rows) // 4 * 4, hidden, width)
            found = {layout: counted(team, case, layout)[0] for layout in LAYOUTS}
            assert min(found, key=lambda layout: found[layout]) == want == choose(case)
