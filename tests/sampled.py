"""Grids of cases that repeat one proof: what of them every run tries.

`PENSTOCK_TESTS=all` tries all of them, and as many draws as `draws` names last.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

ALL = os.environ.get("PENSTOCK_TESTS") == "all"


def draws(few: int, many: int) -> int:
    """How many drawn runs a test makes."""
    return many if ALL else few


def grid(*axes: Iterable[Any]) -> list[Any]:
    """Every value of one axis with every value of the others; a `pytest.param` brings its marks."""
    rows = [[v if hasattr(v, "marks") else pytest.param(v) for v in row] for row in product(*axes)]
    return [pytest.param(*(v.values[0] for v in row), marks=[m for v in row for m in v.marks]) for row in rows]


def some(cases: Iterable[Any], least: int = 1, *, pairs: bool = False) -> list[Any]:
    """At least so many of the cases, in their order, the same on every machine: such that each value of each axis is
    tried, and with `pairs` each two values of two axes that meet in any case. A case is a value, a tuple with one of
    each axis, or a `pytest.param`."""
    cases = list(cases)
    if ALL:
        return cases
    untried = [_shown(case, pairs) for case in cases]
    order = list(range(len(cases)))
    random.Random(len(cases)).shuffle(order)
    taken: set[int] = set()
    tried: set[tuple[Any, ...]] = set()
    while len(taken) < len(cases):
        # The one that shows most that was not shown yet; among equals, the first of the shuffled.
        best = max((i for i in order if i not in taken), key=lambda i: len(untried[i] - tried))
        if untried[best] <= tried and len(taken) >= least:
            break
        taken.add(best)
        tried |= untried[best]
    return [case for i, case in enumerate(cases) if i in taken]


def _shown(case: Any, pairs: bool) -> set[tuple[Any, ...]]:
    values = getattr(case, "values", case)
    if not isinstance(values, tuple) or len(values) == 1:
        return set()  # one axis: a draw is all that is wanted
    placed = [(axis, repr(value)) for axis, value in enumerate(values)]
    return set(combinations(placed, 2)) if pairs else {(place,) for place in placed}
