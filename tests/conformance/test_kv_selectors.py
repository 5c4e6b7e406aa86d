"""What every KVSelector that drops tokens promises. Registering one enrols it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.config.selection import SelectionConfig
from penstock.core.selection import KVLine, KVSelector, Selecting
from penstock.select import KV_SELECTORS
from tests.selecting import GROUP, HEADS, LAYERS, causal, config_of, selector

I32 = npt.NDArray[np.int32]
DROP_NOTHING = {"infinigen", "quest"}
"""Those that only read less: no line of theirs is cut."""
OWN_IDENTITY: dict[str, dict[str, Any]] = {"fastgen": {"threshold": 1.0}}
"""At a full budget fastgen keeps what its threshold says, so it is whole at threshold 1."""
NO_SINKS = {"window"}
WATCHERS = ["h2o", "scissorhands"]
"""Those that watch every token."""
SMALL = {"sinks": 2, "recent": 6, "observe": 5, "history": 16, "interval": 8}


@pytest.fixture(params=sorted(set(KV_SELECTORS.names()) - DROP_NOTHING))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_selector_is_enrolled_or_drops_nothing(name: str) -> None:
    made = selector(config_of(name))
    assert made.name == name
    assert made.drops in ("tokens", "blocks")
    assert (made.watches == "all") == (name in WATCHERS)


@pytest.mark.parametrize("name", sorted(KV_SELECTORS.names()))
def test_what_is_known_before_it_is_made_is_true(name: str) -> None:
    made, traits = selector(config_of(name)), KV_SELECTORS.traits(name)
    assert (made.drops, made.watches) == (traits.drops, traits.watches)
    assert (made.per_head, made.cache_positions) == (traits.per_head, traits.cache_positions)


def test_all_that_are_registered_have_traits() -> None:
    assert all(KV_SELECTORS.traits(name) is not None for name in KV_SELECTORS)


class Served:
    """A sequence whose cache is cut down again and again: what the runtime does, with made-up attention."""

    def __init__(self, made: KVSelector, config: SelectionConfig, seed: int, prompt_len: int) -> None:
        self.made, self.config, self.prompt_len = made, config, prompt_len
        self.rng = np.random.default_rng(seed)
        self.tokens: I32 = self.rng.integers(0, 40, 4096).astype(np.int32)
        self.num_tokens = 0
        heads = HEADS if made.per_head else 1
        self.lines = [KVLine(n, g, np.zeros(0, np.int32)) for n in range(LAYERS) for g in range(heads)]

    @property
    def readers(self) -> int:
        """Query heads of a line."""
        return GROUP if self.made.per_head else GROUP * HEADS

    def run(self, count: int) -> None:
        first = self.num_tokens
        self.num_tokens += count
        for line in self.lines:
            line.positions = np.concatenate([line.positions, np.arange(first, self.num_tokens, dtype=np.int32)])
            new = np.zeros(count, np.float32)
            line.stats.update({key: np.concatenate([old, new]) for key, old in line.stats.items()})
            if self.made.watches == "all":
                self.made.watch(line, causal(self.rng, line.positions, first, count, self.readers), first)
            self.look(line)

    def look(self, line: KVLine) -> None:
        """The last tokens' attention, over the slots that there are."""
        last = min(self.num_tokens, self.config.options.observe)
        seen = causal(self.rng, line.positions, self.num_tokens - last, last, self.readers)
        line.recent = lambda: seen

    def at(self) -> Selecting:
        budget = self.config.budget.of(self.num_tokens)
        return Selecting(self.num_tokens, self.prompt_len, budget, self.tokens[: self.num_tokens])

    def select(self) -> list[I32]:
        """Asks, and checks what every answer must hold to."""
        at = self.at()
        before = [line.positions.copy() for line in self.lines]
        found = self.made.select(at, self.lines)
        assert len(found) == len(self.lines)
        for line, old, kept in zip(self.lines, before, found, strict=True):
            assert kept.dtype == np.int32
            assert np.array_equal(line.positions, old), "select cuts nothing itself"
            assert len(kept) > 0
            assert kept[0] >= 0
            assert kept[-1] < len(line)
            assert (np.diff(kept) > 0).all(), "ascending, each once"
            assert all(len(x) == len(line) for x in line.stats.values())
        if self.config.budget.share < 1 or self.config.budget.tokens is not None:
            assert sum(map(len, found)) <= at.budget * len(self.lines)
        return found

    def cut(self, found: list[I32]) -> None:
        for line, kept in zip(self.lines, found, strict=True):
            line.positions = line.positions[kept]
            line.stats.update({key: old[kept] for key, old in line.stats.items()})
            self.look(line)


def served(name: str, budget: str, seed: int = 0, prompt_len: int = 100, **given: Any) -> Served:
    config = config_of(name, budget, **(SMALL | given))
    return Served(selector(config), config, seed, prompt_len)


@pytest.mark.parametrize("budget", ["100%", "4000"])
def test_a_full_budget_keeps_everything(name: str, budget: str) -> None:
    life = served(name, budget, **OWN_IDENTITY.get(name, {}))
    for count in (100, 8, 8):
        life.run(count)
        found = life.select()
        assert all(np.array_equal(kept, np.arange(life.num_tokens)) for kept in found)
        life.cut(found)


@pytest.mark.parametrize(("budget", "seed"), [("25%", 0), ("60%", 1), ("30", 2), ("9", 3)])
def test_sinks_and_recent_tokens_stay_over_many_selections(name: str, budget: str, seed: int) -> None:
    """Lines are soon of unequal lengths, and their numbers have been through many compactions."""
    life = served(name, budget, seed)
    life.run(60)
    life.run(40)
    for _ in range(5):
        found = life.select()
        life.cut(found)
        n = life.num_tokens
        for line in life.lines:
            recent = n - (6 if name not in NO_SINKS else min(6, life.at().budget))
            assert np.isin(np.arange(recent, n), line.positions).all()
            if name not in NO_SINKS:
                assert np.isin([0, 1], line.positions).all()
        life.run(int(life.rng.integers(1, 20)))


@pytest.mark.parametrize("budget", ["1", "2", "4", "1%"])
def test_a_budget_below_sinks_and_recent_tokens_still_holds(name: str, budget: str) -> None:
    life = served(name, budget, sinks=2, recent=6)
    life.run(100)
    for _ in range(4):
        found = life.select()
        assert all(kept[-1] == len(line) - 1 for kept, line in zip(found, life.lines, strict=True)), "the newest stays"
        life.cut(found)
        life.run(8)


def test_what_fits_stays(name: str) -> None:
    """Fewer tokens than the budget, or lines that were cut to it before."""
    given = OWN_IDENTITY.get(name, {})
    life = served(name, "40", **given)
    life.run(39)
    assert all(len(kept) == 39 for kept in life.select())
    life.run(61)
    life.cut(life.select())
    assert sum(map(len, life.lines)) <= 40 * len(life.lines)
    if name != "streaming":  # the gap moves on with the positions, whatever has gone
        again = life.select()
        assert [len(kept) for kept in again] == [len(line) for line in life.lines]


def _lives(name: str) -> Callable[[], list[list[I32]]]:
    def live() -> list[list[I32]]:
        life, out = served(name, "30%", 5), []
        life.run(100)
        for _ in range(4):
            out.append(life.select())
            life.cut(out[-1])
            life.run(8)
        return out

    return live


def test_the_same_history_keeps_the_same(name: str) -> None:
    live = _lives(name)
    for a, b in zip(live(), live(), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_others_do_not_matter(name: str) -> None:
    """One selector serves many sequences: what it was asked in between leaves no trace in it."""
    config = config_of(name, "30%", **SMALL)
    made = selector(config)
    alone, shared, other = (Served(made, config, seed, 50) for seed in (1, 1, 2))
    kept: list[list[I32]] = []
    alone.run(70)
    alone.cut(alone.select())
    alone.run(30)
    kept.append(alone.select())
    shared.run(70)
    other.run(200)
    shared.cut(shared.select())
    other.cut(other.select())
    shared.run(30)
    other.select()
    kept.append(shared.select())
    assert all(np.array_equal(x, y) for x, y in zip(*kept, strict=True))


@pytest.mark.parametrize("name", WATCHERS)
def test_steps_do_not_matter(name: str) -> None:
    """What it watched bit by bit, it knows as if it had watched it at once."""
    config = config_of(name, "30%", **SMALL)
    made = selector(config)
    rng = np.random.default_rng(3)
    positions = np.arange(120, dtype=np.int32)
    weights = causal(rng, positions, 0, 120, GROUP)
    stats = []
    for sizes in ([120], [50, 30, 40], [1] * 120, [7, 16, 16, 81]):
        line, first = KVLine(0, 0, positions[:0]), 0
        for size in sizes:
            line.positions = positions[: first + size]
            new = np.zeros(size, np.float32)
            line.stats.update({key: np.concatenate([old, new]) for key, old in line.stats.items()})
            made.watch(line, weights[first : first + size, :, : first + size], first)
            first += size
        stats.append(line.stats)
    for other in stats[1:]:
        assert other.keys() == stats[0].keys()
        assert all(np.array_equal(other[key], x) for key, x in stats[0].items())


@pytest.mark.parametrize("name", WATCHERS)
def test_tokens_that_stay_keep_their_numbers(name: str) -> None:
    """Two equal lives; one loses tokens that nobody looks at later: the numbers of those that stay are the same."""
    config = config_of(name, "30%", **SMALL)
    made = selector(config)
    rng = np.random.default_rng(4)
    whole = KVLine(0, 0, np.arange(60, dtype=np.int32))
    made.watch(whole, causal(rng, whole.positions, 0, 60, GROUP), 0)
    stay = np.array([0, 1, 5, 8, 30, *range(50, 60)], np.int32)
    part = KVLine(0, 0, whole.positions[stay], {key: x[stay] for key, x in whole.stats.items()})
    more = np.zeros((4, GROUP, 64), np.float32)
    for t in range(4):
        more[t, :, [0, 5, 30, 60 + t]] = 0.25
    for line in (whole, part):
        new = np.arange(60, 64, dtype=np.int32)
        line.positions = np.concatenate([line.positions, new])
        line.stats.update({key: np.concatenate([x, np.zeros(4, np.float32)]) for key, x in line.stats.items()})
        made.watch(line, more[:, :, line.positions], 60)
    for key, x in whole.stats.items():
        assert np.array_equal(x[part.positions], part.stats[key]), key
