"""KV selectors that treat heads differently for good (catalogue rows F05, F24), on attention that is known."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.core.selection import KVLine
from penstock.select.fastgen import FULL, POLICIES, FastGen
from tests.selecting import BARE, at, config_of, kept, line, nano, nano_mark, selector

TEXT = [0, 14, 5, 9, 8, 10, 21, 11, 13, 20] * 10
"""Special: 0. Punctuation: 14, 21."""


MARKS = [*range(1, 100, 10), *range(6, 100, 10)]


def fastgen(seen: np.ndarray, n: int = 100, **given: Any) -> tuple[FastGen, KVLine]:
    made = selector(config_of("fastgen", budget="100%", **({"frequent": 0.1, "local": 0.2} | BARE | given)))
    assert isinstance(made, FastGen)
    return made, line(range(n), seen)


def attending(*groups: tuple[range | list[int], float]) -> np.ndarray:
    """A last token's attention: shares spread over slots; every other row is the same, one token earlier."""
    out = np.zeros((1, 100))
    for slots, share in groups:
        out[0, list(slots)] += share / len(slots)
    return out


@pytest.mark.parametrize(
    ("policy", "seen"),
    [
        ("special", attending((range(0, 100, 10), 0.97), (range(99), 0.03))),
        ("punctuation", attending((range(0, 100, 10), 0.4), (MARKS, 0.58), ([3], 0.02))),
        ("frequent", attending((range(0, 100, 10), 0.4), (range(22, 26), 0.58), ([3], 0.02))),
        ("local", attending((range(0, 100, 10), 0.2), (range(80, 100), 0.8))),
        ("full", attending((range(100), 1.0))),
    ],
)  # fmt: skip
def test_F05_each_head_gets_the_first_policy_that_recovers_enough(policy: str, seen: np.ndarray) -> None:
    made, one = fastgen(seen)
    where = at(100, 100, tokens=TEXT)
    offers = made.offers(one, where, seen.astype(np.float32))
    index = POLICIES.index(policy)
    assert offers[index].recovered >= 0.95 - 1e-6
    assert all(offer.recovered < 0.95 for offer in offers[:index])
    assert all((b.kept | ~a.kept).all() and b.recovered >= a.recovered - 1e-6 for a, b in pairwise(offers))
    (slots,) = made.select(where, [one])
    assert np.array_equal(slots, np.flatnonzero(offers[index].kept))
    assert (len(slots) == 100) == (policy == "full")
    assert seen[0, slots].sum() >= 0.95 - 1e-6, "for the token that was looked at, what stays is what was promised"


def test_F05_the_policy_is_kept_in_decoding() -> None:
    """Chosen at the prompt's end; what comes behind is held by it, whatever attention does then."""
    special = attending((range(0, 100, 10), 1.0))
    made, one = fastgen(special)
    (slots,) = made.select(at(100, 100, 100, TEXT), [one])
    stats = {key: np.concatenate([x[slots], np.zeros(10)]) for key, x in one.stats.items()}
    later = line([*one.positions[slots], *range(100, 110)], np.full(len(slots) + 10, 1 / (len(slots) + 10)), **stats)
    (slots,) = made.select(at(110, 110, 100, [*TEXT, *TEXT[:10]]), [later])
    assert later.positions[slots].tolist() == [*range(0, 110, 10), 109]
    fresh = replace(later, stats={})
    (slots,) = made.select(at(110, 110, 100, [*TEXT, *TEXT[:10]]), [fresh])
    assert len(slots) == len(fresh), "nobody has chosen: now it is chosen"


def test_F05_within_the_prompt_it_is_chosen_anew() -> None:
    made, one = fastgen(attending((range(0, 100, 10), 1.0)))
    assert len(made.select(at(100, 100, 150, TEXT), [one])[0]) == 11
    everything = np.full((1, 100), 0.01, np.float32)
    assert (
        len(made.select(at(100, 100, 150, TEXT), [replace(one, recent=line(range(100), everything).recent)])[0]) == 100
    )


def test_F05_a_threshold_of_one_is_full_and_a_budget_is_a_bound() -> None:
    special = attending((range(0, 100, 10), 1.0))
    made, one = fastgen(special, threshold=1.0)
    assert len(made.select(at(100, 100, tokens=TEXT), [one])[0]) == 100
    everything = attending((range(100), 1.0))
    made, narrow = fastgen(special)
    wide = line(range(100), everything, head=1)
    sizes = [len(x) for x in made.select(at(100, 40, tokens=TEXT), [narrow, wide])]
    assert sizes == [11, 69], "80 in all, and a head that wants less gets what it wants"
    assert FULL == 4


def profile(folder: Path, **more: Any) -> Path:
    scores = [[0.0, 0.0, 0.0] for _ in range(6)]
    scores[1] = [0.5, 0.9, 0.0]
    scores[4] = [0.0, 0.0, 0.7]
    path = folder / "heads.json"
    path.write_text(json.dumps({"fingerprint": nano_mark(), "scores": scores} | more))
    return path


def sizes_by_head(found: list[list[int]]) -> dict[tuple[int, int], int]:
    return {divmod(i, 3): len(x) for i, x in enumerate(found)}


def test_F24_retrieval_heads_keep_everything(tmp_path: Path) -> None:
    lines = [line(range(200), layer=n, head=g) for n in range(6) for g in range(3)]
    given = {"profile": str(profile(tmp_path)), "heads": 3 / 18, "sinks": 2, "recent": 8}
    found = kept("retrieval", 200, 60, lines, **given)
    sizes = sizes_by_head(found)
    full = {head for head, size in sizes.items() if size == 200}
    assert full == {(1, 1), (4, 2), (1, 0)}
    rest = (60 * 18 - 3 * 200) // 15
    assert {size for head, size in sizes.items() if head not in full} == {rest}
    assert found[0] == [0, 1, *range(200 - rest + 2, 200)], "sinks and the newest"
    turned = sizes_by_head(kept("retrieval", 200, 60, lines, keep="streaming", **given))
    assert not full & {head for head, size in turned.items() if size == 200}
    chance = sizes_by_head(kept("retrieval", 200, 60, lines, keep="random", **given))
    assert sorted(chance.values()) == sorted(turned.values()) == sorted(sizes.values())


def test_F24_as_many_heads_as_fit_keep_everything(tmp_path: Path) -> None:
    """3 of 18 whole heads of 200 tokens do not fit in 18 x 21; the best one does."""
    lines = [line(range(200), layer=n, head=g) for n in range(6) for g in range(3)]
    given = {"profile": str(profile(tmp_path)), "heads": 0.5, "sinks": 2, "recent": 8}
    sizes = sizes_by_head(kept("retrieval", 200, 21, lines, **given))
    assert sizes[(1, 1)] == 200
    assert sizes[(4, 2)] == 10
    assert sum(sizes.values()) <= 21 * 18
    assert max(kept("retrieval", 200, 12, lines, **given), key=len) == [0, 1, *range(190, 200)], "none fits"


def test_F24_nano_has_a_profile_and_others_are_told_to_measure_one(tmp_path: Path) -> None:
    selector(config_of("retrieval"))
    with pytest.raises(ConfigError, match=r"there is none for this model \(weights 0123\); measure one with"):
        selector(config_of("retrieval"), mark="0123")
    selector(config_of("retrieval", keep="random"), mark="0123")  # asks no profile
    with pytest.raises(ConfigError, match=r"heads\.json' is the profile of another model \(weights .*these are 0123"):
        selector(config_of("retrieval", profile=str(profile(tmp_path))), mark="0123")
    for wrong, said in [
        ({"scores": [[0.1] * 3] * 5}, "does not hold a list of scores per layer"),
        ({"scores": [[0.1] * 2] * 6}, "does not hold a list of scores per layer"),
        ({"scores": 3}, "does not hold a list of scores per layer"),
        ({"scores": [[0.1, 0.1, "x"]] * 6}, "'x' for a score; scores are numbers from 0 to 1"),
        ({"scores": [[0.1, 0.1, True]] * 6}, "'True' for a score"),
        ({"scores": [[0.1, 0.1, 7]] * 6}, "'7' for a score"),
    ]:
        with pytest.raises(ConfigError, match=said) as caught:
            selector(config_of("retrieval", profile=str(profile(tmp_path, **wrong))))
        assert caught.value.field == "kv_selector_config"
    with pytest.raises(ConfigError, match=r"name a file that tools/retrieval_heads\.py has written"):
        selector(config_of("retrieval", profile=str(tmp_path / "none.json")))
    assert len(nano().spec.layers) == 6
