"""Requests that wait for something slow wait aside: others go by, aborts find them, nothing is lost or doubled."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from penstock.base.errors import InputError, RankGoneError
from penstock.core.request import Abort, Intake, Request
from penstock.engine.prepare import Preparation
from tests.engine.harness import request


class Slow:
    """Requests with an even prompt need work, which waits until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.later: list[Intake] = []
        self.arrived = threading.Semaphore(0)
        self.fails = False
        self.preparation = Preparation(lambda r: r.prompt_token_ids[0] % 2 == 0, self._work)

    def _work(self, request: Request) -> None:
        self.begun.release()
        self.gate.wait(10)
        if self.fails:
            raise InputError("no")

    def _take(self, items: Sequence[Intake]) -> None:
        self.later += items
        self.arrived.release()

    def sift(self, *items: Intake) -> list[Intake]:
        return self.preparation.sift(items, self._take)


@pytest.mark.parametrize("fails", [False, True])
def test_others_go_by_and_it_comes_when_it_is_ready(fails: bool) -> None:
    slow = Slow()
    slow.fails = fails
    waits, goes = request([4]), request([5])
    assert slow.sift(waits, goes) == [goes]
    assert slow.begun.acquire(timeout=5)
    assert slow.later == []
    slow.gate.set()
    assert slow.arrived.acquire(timeout=5)
    assert slow.later == [waits]
    assert slow.sift(Abort(request_id=waits.request_id)) == [
        Abort(request_id=waits.request_id)
    ]  # the engine's business


def test_an_abort_takes_it_away_and_its_id_is_free() -> None:
    slow = Slow()
    first, again = request([4], request_id="same"), request([6], request_id="same")
    slow.sift(first)
    assert slow.begun.acquire(timeout=5)
    assert slow.sift(Abort(request_id="same")) == []
    slow.sift(again)
    slow.gate.set()
    assert slow.arrived.acquire(timeout=5)
    assert slow.later == [again]


def test_an_abort_of_one_sample_goes_in_behind_it() -> None:
    slow = Slow()
    made = request([4], n=2)
    slow.sift(made)
    one = Abort(request_id=made.request_id, index=1)
    assert slow.sift(one) == []
    slow.gate.set()
    assert slow.arrived.acquire(timeout=5)
    assert slow.later == [made, one]


def test_a_slow_one_does_not_hold_up_the_next() -> None:
    slow = Slow()
    made = [request([4]), request([6])]
    slow.sift(*made)
    assert slow.begun.acquire(timeout=5)
    assert slow.begun.acquire(timeout=5)
    slow.gate.set()
    for _ in made:
        assert slow.arrived.acquire(timeout=5)
    assert sorted(r.request_id for r in slow.later if isinstance(r, Request)) == sorted(r.request_id for r in made)


def test_whoever_the_rank_died_of_stays_written_down() -> None:
    """The engine ends in a moment; until then nobody may wipe out whose grammar it was, or blame others."""
    told: list[Request | None] = []
    tried = threading.Event()

    def work(request: Request) -> None:
        tried.set()
        raise RankGoneError("the rank is gone")

    preparation = Preparation(lambda _: True, work, lambda _, request: told.append(request))
    guilty = request([4])
    later: list[Intake] = []
    preparation.sift([guilty], later.extend)
    assert tried.wait(5)
    for thread in threading.enumerate():
        if thread.name == "penstock-prepare" and told == [guilty]:
            thread.join(0.2)
    assert told == [guilty]
    assert later == []
