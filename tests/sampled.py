"""Grids of cases that repeat one proof: what of them every run tries.

`PENSTOCK_TESTS=all` tries all of them, and as many draws as `draws` names last.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Sequence
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


def some(
    cases: Iterable[Any], least: int = 1, *, pairs: bool = False, shows: Callable[..., Iterable[Any]] | None = None
) -> list[Any]:
    """At least so many of the cases, in their order, the same on every machine: such that each value of each axis is
    tried, and with `pairs` each two values of two axes that meet in any case. A case is a value, a tuple with one of
    each axis, or a `pytest.param`.

    `shows`: of a case's values, what it shows that the others may show as well: the sample shows all of that, in place
    of each value (`specs.kinds` of models that differ in what the law at hand has nothing to do with)."""
    cases = list(cases)
    if ALL:
        return cases
    untried = [_shown(case, pairs) if shows is None else set(shows(*_values(case))) for case in cases]
    order = list(range(len(cases)))
    random.Random(len(cases)).shuffle(order)
    taken: set[int] = set()
    tried: set[Any] = set()
    while len(taken) < len(cases):
        # The one that shows most that was not shown yet; among equals, the first of the shuffled.
        best = max((i for i in order if i not in taken), key=lambda i: len(untried[i] - tried))
        if untried[best] <= tried and len(taken) >= least:
            break
        taken.add(best)
        tried |= untried[best]
    return [case for i, case in enumerate(cases) if i in taken]


def chosen(items: Iterable[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run and those to leave out: of a function marked `pytest.mark.sampled(least, pairs=...)`, `some` of
    its cases over all its axes, those of fixtures among them. Whoever names a single case gets it."""
    items = list(items)
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[str] = set()
    for cases in functions.values():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        calls: list[Any] = [item.callspec for item in cases]  # type: ignore[attr-defined]
        axes = [_numbered([call.params[name] for call in calls]) for name in sorted(calls[0].params)]
        rows = [pytest.param(*row, id=item.nodeid) for item, row in zip(cases, zip(*axes, strict=True), strict=True)]
        kept = {row.id for row in some(rows, *mark.args, **mark.kwargs)}
        left_out |= {item.nodeid for item in cases} - kept
    return [i for i in items if i.nodeid not in left_out], [i for i in items if i.nodeid in left_out]


def _numbered(values: Sequence[Any]) -> list[int]:
    """Each value's number among those that differ: what is shown of some names where they lie in memory."""
    plain = (str, int, float, bool, type(None))
    keys = [(type(value), value) if isinstance(value, plain) else id(value) for value in values]
    return [keys.index(key) for key in keys]


def _values(case: Any) -> tuple[Any, ...]:
    values = getattr(case, "values", case)
    return values if isinstance(values, tuple) else (values,)


def _shown(case: Any, pairs: bool) -> set[Any]:
    values = _values(case)
    if len(values) == 1:
        return set()  # one axis: a draw is all that is wanted
    placed = [(axis, repr(value)) for axis, value in enumerate(values)]
    return set(combinations(placed, 2)) if pairs else {(place,) for place in placed}
