"""What a sample of a grid leaves out is no value, and it is the same one everywhere."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests import sampled

AXES = ("abcdefg", (1, 2, 3), (0, 8))


def test_each_value_and_each_pair_that_is_asked_for_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "ALL", False)
    whole = list(product(*AXES))
    found, pairs = sampled.some(whole), sampled.some(whole, pairs=True)
    assert [set(column) for column in zip(*found, strict=True)] == [set(axis) for axis in AXES]
    for i, j in combinations(range(3), 2):
        assert {(case[i], case[j]) for case in pairs} == set(product(AXES[i], AXES[j]))
    assert len(found) < len(pairs) < len(whole)
    assert found == sampled.some(whole) == [case for case in whole if case in found]
    assert len(sampled.some(whole, 20)) == 20
    assert len(sampled.some(range(30), 4)) == 4


def test_all_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "ALL", True)
    whole = list(product(*AXES))
    assert sampled.some(whole) == whole
    assert sampled.draws(2, 9) == 9


def test_marks_come_with_their_values() -> None:
    marked = pytest.param("native", marks=pytest.mark.skip)
    cases = sampled.grid("ab", ["ref", marked])
    assert [case.values for case in cases] == [("a", "ref"), ("a", "native"), ("b", "ref"), ("b", "native")]
    assert [len(case.marks) for case in cases] == [0, 1, 0, 1]
