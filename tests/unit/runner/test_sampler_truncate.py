"""Which tokens survive temperature, min-p, top-k and top-p, and with what weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.sampling import TokenRules
from penstock.ops.draw_weights import UNIT
from penstock.runner import truncate as module
from penstock.runner.truncate import best_ids, truncate


def survivors(logits: Any, rules: TokenRules) -> dict[int, float]:
    """The documented rule, spelt out with a full sort."""
    z = np.asarray(logits, np.float64) / rules.temperature
    p = np.exp(z - z.max())
    ranked = sorted(range(len(p)), key=lambda i: (-float(logits[i]), i))
    if rules.min_p > 0:
        ranked = [i for i in ranked if p[i] >= rules.min_p * p.max()]
    if rules.top_k > 0:
        ranked = ranked[: rules.top_k]
    if rules.top_p < 1:
        mass, total, kept = 0.0, sum(p[i] for i in ranked), []
        for i in ranked:
            kept.append(i)
            mass += p[i]
            if mass >= rules.top_p * total * (1 - 1e-12):
                break
        ranked = kept
    total = sum(p[i] for i in ranked)
    return {i: p[i] / total for i in sorted(ranked)}


def actual(logits: Any, rules: TokenRules) -> dict[int, float]:
    ids, weights = truncate(np.asarray(logits, np.float32), rules)
    kept = range(len(logits)) if ids is None else ids.tolist()
    assert list(kept) == sorted(set(kept))
    assert weights.max() == UNIT
    return dict(zip(kept, (weights / weights.sum()).tolist(), strict=True))


RULES = st.builds(
    TokenRules,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 3, 10, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.999, 0.93, 0.51, 0.07]),
    min_p=st.sampled_from([0.0, 0.01, 0.13, 1.0]),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(RULES, st.integers(0, 10**6), st.integers(1, 60), st.booleans())
def test_D01_survivors_equal_the_spelt_out_rule(rules: TokenRules, seed: int, size: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    # Few distinct values make ties at every boundary; quarter steps keep them exact.
    logits = rng.integers(-6, 7, size) / 4 if ties else rng.normal(0, 3, size)
    logits = logits.astype(np.float32)
    got, want = actual(logits, rules), survivors(logits, rules)
    assert list(got) == list(want)
    assert list(got.values()) == pytest.approx(list(want.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        (TokenRules(temperature=1.0, top_k=3), [1, 2, 4]),
        (TokenRules(temperature=1.0, top_k=2), [1, 2]),
        (TokenRules(temperature=1.0, top_p=0.49), [1, 2]),
        (TokenRules(temperature=1.0, top_p=1e-9), [1]),
        (TokenRules(temperature=1.0, min_p=1.0), [1, 2, 4, 5]),
        (TokenRules(temperature=1.0, min_p=1.0, top_p=0.5), [1, 2]),
        (TokenRules(temperature=1.0, min_p=1.0, top_p=0.5000001), [1, 2, 4]),
        (TokenRules(temperature=1.0, top_k=2, top_p=0.5), [1]),  # top-p takes its share of what top-k left
        (TokenRules(temperature=1.0, top_k=2, top_p=0.51), [1, 2]),
    ],
)
def test_ties_keep_the_lowest_ids(rules: TokenRules, kept: list[int]) -> None:
    assert list(actual([-30.0, 2.0, 2.0, -30.0, 2.0, 2.0], rules)) == kept


def test_min_p_comes_before_top_p() -> None:
    """0.6, 0.3, 0.1: min-p 0.2 leaves 2/3 and 1/3; top-p 0.65 then keeps one, but on the whole mass would keep two."""
    logits = np.log([0.6, 0.3, 0.1]).astype(np.float32)
    assert list(actual(logits, TokenRules(temperature=1.0, min_p=0.2, top_p=0.65))) == [0]
    assert list(actual(logits, TokenRules(temperature=1.0, top_p=0.65))) == [0, 1]


def test_masked_tokens_are_never_drawn_and_extremes_are_fine() -> None:
    inf = float("inf")
    _, weights = truncate(np.array([-inf, 1.0, -inf, 0.0], np.float32), TokenRules(temperature=1.0))
    assert (weights / UNIT).tolist() == pytest.approx([0, 1, 0, np.exp(-1)])
    got = actual([-3e38, 3e38, -inf], TokenRules(temperature=1e-5, top_p=0.9))
    assert got == {1: 1.0}
    got = actual([5.0, -inf, -inf], TokenRules(temperature=1.0, top_k=2))
    assert got[0] == 1.0


def test_nuclei_wider_than_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for top-p widens in steps; the steps' sizes must not matter."""
    logits = np.random.default_rng(5).normal(0, 0.5, 5000).astype(np.float32)
    rules = TokenRules(temperature=1.0, top_p=0.8)
    wide = actual(logits, rules)
    assert 256 * 8 < len(wide) < 5000
    assert list(wide) == list(survivors(logits, rules))
    for head in (1, 7, 5000):
        monkeypatch.setattr(module, "_HEAD", head)
        assert actual(logits, rules) == wide


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(-1, 45))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_best_ids_is_a_stable_sort(values: list[int], k: int) -> None:
    array = np.array([-np.inf if v == -3 else v for v in values], np.float32)
    want = sorted(range(len(values)), key=lambda i: (-values[i], i))[: max(k, 0)]
    assert best_ids(array, k).tolist() == want


def hf_kept(name: str, value: float, logits: np.ndarray) -> list[int]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    warper = getattr(transformers, name)(value)
    with torch.no_grad():
        out = warper(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits)[None])
    return torch.isfinite(out[0]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("TopKLogitsWarper", "top_k", [1, 5, 17, 90]),
        ("TopPLogitsWarper", "top_p", [0.05, 0.4, 0.9, 0.99]),
        ("MinPLogitsWarper", "min_p", [0.01, 0.1, 0.5, 1.0]),
    ],
)
def test_kept_sets_equal_transformers(name: str, field: str, values: list[Any]) -> None:
    """Without ties all implementations mean the same."""
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(0, 2, 101).astype(np.float32)
        for value in values:
            rules = TokenRules(**{"temperature": 1.0, field: value})
            assert list(actual(logits, rules)) == hf_kept(name, value, logits)
