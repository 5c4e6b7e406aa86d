"""Row G09: what the search for LongRoPE's factors does, on costs whose optimum is known. Real texts: positions.md."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks.quality import longrope_search

    return longrope_search


def test_G09_yarn_s_divisors_are_those_of_its_paper(module: ModuleType) -> None:
    """Whole ones for pairs of few turns over the trained context, none for pairs of many; in between a ramp."""
    theta, dim = 10000.0, 32
    starts = module.known(theta, dim)
    turns = module.TRAINED * theta ** -(np.arange(0, dim, 2) / dim) / (2 * math.pi)
    yarn, linear, ntk = (np.array(starts[name].divisors) for name in ("yarn", "linear", "ntk"))
    np.testing.assert_allclose(yarn[turns > 33], 1.0)
    assert yarn[-1] == pytest.approx(4.0) or turns[-1] >= 1
    assert (np.diff(yarn) >= 0).all()
    np.testing.assert_allclose(linear, 4.0)
    assert (ntk[0], ntk[-1]) == (pytest.approx(1.0), pytest.approx(4.0))


def test_G09_children_are_what_longrope_allows(module: ModuleType) -> None:
    """Divisors that do not fall from fast to slow pairs, from 1 to twice the ratio; both ways of making them occur."""
    rng = random.Random(1)
    parents = [module.Genes((1.0, 2.0, 3.0, 4.0), 8), module.Genes((1.5, 1.5, 3.5, 8.0), 0)]
    made = [module.child(rng, parents, 0.35) for _ in range(400)]
    for genes in made:
        assert len(genes.divisors) == 4
        assert list(genes.divisors) == sorted(genes.divisors)
        assert genes.divisors[0] >= 1.0
        assert genes.divisors[-1] <= 2 * module.RATIO
        assert genes.start in (8, *module.STARTS)
    known = {d for p in parents for d in p.divisors}
    crossed = [g for g in made if set(g.divisors) <= known and g.divisors not in {p.divisors for p in parents}]
    assert len(crossed) > 20
    assert len([g for g in made if not set(g.divisors) <= known]) > 100


@pytest.mark.parametrize("seed", range(4))
def test_G09_the_search_ends_below_where_it_began(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A cost with its minimum beside all starts: each candidate is judged once, the best never gets worse, and what is
    found is below YaRN's divisors by a good part of what there was to win."""
    starts = module.known(10000.0, 16)
    target = np.minimum(np.array(starts["yarn"].divisors) * np.linspace(1.0, 1.6, 8), 2.0 * module.RATIO)
    judged: list[tuple[Any, ...]] = []

    def stretched(model: Any, scaling: dict[str, Any], length: int) -> dict[str, Any]:
        assert length == module.RATIO * module.TRAINED
        assert scaling["factor"] == module.RATIO
        judged.append((*scaling["long_factor"], scaling["start_tokens"]))
        return scaling

    def read(scaling: dict[str, Any], texts: Any) -> list[Any]:
        away = float(((np.log(scaling["long_factor"]) - np.log(target)) ** 2).sum())
        return [np.full(3, 3.0 + away + 0.01 * abs(scaling["start_tokens"] - 4))]

    monkeypatch.setattr(module, "stretched_model", stretched)
    monkeypatch.setattr(module, "read", read)
    best, log = module.search(Path("none"), [[1]], starts, 1.1, rounds=6, size=12, parents=3, seed=seed)

    def cost(genes: Any) -> float:
        return float(read(genes.scaling(1.1), None)[0].mean())

    assert len(judged) == len(set(judged)) == 3 + 6 * 12 == log[-1]["judged"]
    assert [r["perplexity"] for r in log] == sorted((r["perplexity"] for r in log), reverse=True)
    assert cost(best) == pytest.approx(math.log(log[-1]["perplexity"]), abs=1e-3)
    yarn, least = cost(starts["yarn"]), 3.0
    assert cost(best) - least < 0.7 * (yarn - least)
