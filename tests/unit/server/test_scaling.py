"""I09: the server's loop that orders engines, over a set of engines that only says it has them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError, EngineError
from penstock.config import serve_from_kwargs
from penstock.engine.membership import ReplicaFacts
from penstock.route.scale import make_scaler
from penstock.server import scaling
from penstock.server.scaling import AGAIN_S, Autoscaling, check_autoscale


@dataclass
class Fake:
    """A `ReplicaSet`: engines are ready, and gone, when `let` is set."""

    states: dict[int, str]
    requests: dict[int, int] = field(default_factory=dict)
    let: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    removed: list[tuple[int, float | None]] = field(default_factory=list)

    async def add(self) -> int:
        number = max(self.states) + 1
        if self.error is not None:
            raise self.error
        self.states[number] = "starting"
        await self.let.wait()
        self.states[number] = "ready"
        return number

    async def remove(self, number: int, timeout_s: float | None = None) -> None:
        self.removed.append((number, timeout_s))
        await self.let.wait()
        del self.states[number]

    def describe(self) -> list[ReplicaFacts]:
        return [ReplicaFacts(number=n, state=s, requests=self.requests.get(n, 0)) for n, s in self.states.items()]


class Fleet:
    """An `Autoscaling` on a clock that the test moves."""

    def __init__(self, engines: int, policy: str, most: int = 4) -> None:
        self.clock, self.live = VirtualClock(), 0
        self.fake = Fake(dict.fromkeys(range(engines), "ready"))
        self.scaling = Autoscaling(
            self.fake, make_scaler(policy), 1, most, self.clock, requests=lambda: self.live, arrived=lambda: 0,
            start_s=3.0,
        )  # fmt: skip

    async def looks(self, *loads: int) -> list[int]:
        """A second apart; engines that are ready after each."""
        found = []
        for self.live in loads:
            self.clock.wait_until(self.clock.now() + 1)
            self.scaling.look()
            for _ in range(5):
                await asyncio.sleep(0)
            found.append(sum(state == "ready" for state in self.fake.states.values()))
        return found


def test_I09_what_was_ordered_is_not_ordered_again_while_it_starts() -> None:
    async def go() -> None:
        fleet = Fleet(1, "reactive:target=2,up_s=0")
        assert await fleet.looks(6, 6, 6, 6) == [1, 1, 1, 1]
        assert len(fleet.fake.states) == 3, "two, once"
        fleet.fake.let.set()
        assert await fleet.looks(6, 8) == [3, 4]
        assert [(d.had, d.wanted) for d in fleet.scaling.decisions] == [(1, 3), (3, 4)]
        assert all("requests" in d.why for d in fleet.scaling.decisions)
        assert fleet.scaling.counts == {"up": 2, "down": 0, "failed": 0}
        await fleet.scaling.close()

    asyncio.run(go())


def test_I09_who_has_least_leaves_and_is_not_asked_twice() -> None:
    async def go() -> None:
        fleet = Fleet(3, "reactive:target=2,down_s=1")
        fleet.fake.requests = {0: 0, 1: 5, 2: 1}
        await fleet.looks(0, 0, 0, 0, 0)
        assert fleet.fake.removed == [(0, scaling.DRAIN_S), (2, scaling.DRAIN_S)], "never the last"
        fleet.fake.let.set()
        await fleet.looks(0, 0, 0)
        assert set(fleet.fake.states) == {1}
        assert fleet.scaling.counts["down"] == 2
        await fleet.scaling.close()

    asyncio.run(go())


def test_I09_after_a_start_that_failed_none_is_ordered_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        fleet = Fleet(1, "reactive:target=1,up_s=0")
        fleet.fake.error = EngineError("no memory for a further engine")
        await fleet.looks(*[2] * 10)
        assert fleet.scaling.counts == {"up": 1, "down": 0, "failed": 1}
        assert "no memory for a further engine" in caplog.text
        fleet.fake.error = None
        fleet.fake.let.set()
        assert (await fleet.looks(*[2] * round(AGAIN_S)))[-1] == 2
        await fleet.scaling.close()

    asyncio.run(go())


def test_I09_engines_that_come_back_count_as_coming() -> None:
    async def go() -> None:
        fleet = Fleet(2, "reactive:target=2,up_s=0")
        fleet.fake.states[1] = "restarting"
        await fleet.looks(4, 4, 4)
        assert len(fleet.fake.states) == 2
        await fleet.scaling.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"min_replicas": 1}, "min_replicas", "only with autoscale"),
        ({"autoscale": "reactive"}, "autoscale", "give max_replicas"),
        ({"autoscale": "magic", "max_replicas": 2}, "autoscale", "predictive"),
        ({"autoscale": "reactive:goal=2", "max_replicas": 2}, "autoscale", "no knob 'goal'"),
        ({"autoscale": "reactive", "max_replicas": 2, "min_replicas": 3}, "min_replicas", "give 2 or fewer"),
        ({"autoscale": "reactive", "max_replicas": 3, "min_replicas": 2}, "min_replicas", "give data_parallel_size 2"),
        ({"autoscale": "reactive", "data_parallel_size": 2}, "autoscale", "nothing to scale"),
    ],
)  # fmt: skip
def test_I09_settings_that_do_not_fit_are_refused_before_anything_starts(
    given: dict[str, Any], field: str, said: str
) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=said) as caught:
        check_autoscale(serve_from_kwargs(model="nano", **given))
    assert caught.value.field == field


def test_I09_settings_that_fit_are_taken() -> None:
    for given in (
        {}, {"autoscale": "predictive", "max_replicas": 3},
        {"autoscale": "fixed", "max_replicas": 4, "data_parallel_size": 2, "min_replicas": 1},
    ):  # fmt: skip
        check_autoscale(serve_from_kwargs(model="nano", **given))
