"""Who is blamed for dead engines, without processes: leavers, kills from outside, copies, and which deaths count."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from penstock.base.errors import ConvictedError, RefusedError
from penstock.core.request import Request
from penstock.core.sampling import BeamSearchParams, SamplingParams
from penstock.engine import replay
from penstock.engine.blackbox import handle_of
from penstock.engine.core import EngineCore
from penstock.engine.frontend import GUILTY
from penstock.engine.link import Down
from tests.engine.crashing import PROMPT, Crashing
from tests.engine.harness import Knobs, assert_idle, fake_engine

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
POISON = [4, 4, 4]


class Dying(Crashing):
    """Engines die of steps with a request whose prompt is in `poison`; `from_outside`: so that it may have been others.

    `unexplained`: deaths of which no guilty request is known, by number of the engine.
    """

    def __init__(self, *poison: list[int], from_outside: bool = False, lag: int = 0) -> None:
        self.poison = [*poison]
        self.from_outside = from_outside
        self.unexplained: set[int] = set()
        self.num_deaths = 0
        self.in_step: list[str] = []
        super().__init__(self._core, lag=lag)

    def _core(self) -> EngineCore:
        core = fake_engine(Knobs(num_blocks=80, budget=64, max_num_seqs=24))[0]

        def watch(requests: Collection[Request]) -> None:
            self.in_step = sorted(r.request_id for r in requests)
            if any(r.prompt_token_ids in self.poison for r in requests):
                raise OSError("poison")

        core.watch = watch
        return core

    def die(self, suspects: Collection[str]) -> None:
        self.num_deaths += 1
        self.unexplained.add(self._epoch)
        down = Down("it died", tuple(handle_of(s) for s in suspects), from_outside=self.from_outside)
        self.unexplained -= set(self.client.replicas[0].on_down(down))

    def try_step(self) -> bool:
        """False: the engine died, and the next one is up."""
        try:
            self.step()
        except OSError:
            self.die(self.in_step)
            assert self.num_deaths < 60
            self.up()
            return False
        return True

    def live(self) -> None:
        while self.core.has_work:
            self.try_step()


def expected(name: str) -> Any:
    run = Dying()
    run.submit(name, PROMPT[: 3 + int(name)], LONG)
    run.drain()
    return run.results()[name]


@pytest.mark.parametrize(("from_outside", "deaths"), [(False, 2), (True, 3)])
def test_a_guilty_request_explains_all_its_deaths(from_outside: bool, deaths: int) -> None:
    run = Dying(POISON, from_outside=from_outside)
    for i in range(3):
        run.submit(str(i), PROMPT[: 3 + i], LONG)
    run.submit("poison", POISON, LONG)
    run.live()
    assert run.num_deaths == deaths
    assert not run.unexplained
    results = run.results()
    assert results["poison"][0] == GUILTY
    assert isinstance(run.streams["poison"].failure(GUILTY), ConvictedError)
    assert [results[str(i)] for i in range(3)] == [expected(str(i)) for i in range(3)]
    assert run.client.convictions.num_convicted == 1


def test_one_kill_from_outside_during_a_trial_convicts_nobody() -> None:
    run = Dying(from_outside=True)
    for i in range(3):
        run.submit(str(i), PROMPT[: 3 + i], LONG)
    run.step()
    run.die(["0", "1", "2"])
    run.up()
    assert run.client.replicas[0].replay.trial == "0"
    run.step()
    while run.client.replicas[0].replay.trial != "1":
        run.step()
    run.die(["1"])
    run.up()
    assert run.client.replicas[0].replay.trial == "1", "it comes first, in an engine that has done nothing else"
    run.drain()
    assert [run.results()[str(i)] for i in range(3)] == [expected(str(i)) for i in range(3)]
    assert len(run.unexplained) == 2, "and these count as restarts"


def test_who_has_shown_a_token_is_not_blamed_for_what_comes_after() -> None:
    """The order to end a trial is on its way while the engine runs one step more."""
    run = Dying(lag=1)
    run.submit("0", PROMPT[:3], LONG)
    run.step()
    run.step()
    run.die(["0"])
    run.up()
    while not run.client.replicas[0].replay._stopping:
        run.step()
    run.die(["0"])
    assert run.client.num_live == 1
    run.up()
    run.drain()
    assert run.results()["0"] == expected("0")


@pytest.mark.parametrize("num", [2, 10])
def test_many_poisons_in_one_step(num: int) -> None:
    poisons = [[4, 4, 5 + i] for i in range(num)]
    run = Dying(*poisons)
    for i in range(3):
        run.submit(str(i), PROMPT[: 3 + i], LONG)
    for i, prompt in enumerate(poisons):
        run.submit(f"poison{i}", prompt, LONG)
    run.live()
    assert run.num_deaths == 1 + num
    assert not run.unexplained
    results = run.results()
    assert all(results[f"poison{i}"][0] == GUILTY for i in range(num))
    assert [results[str(i)] for i in range(3)] == [expected(str(i)) for i in range(3)]


def test_those_that_have_been_tried_are_not_tried_again_for_somebody_elses_death() -> None:
    run = Dying([4, 4, 5], [4, 4, 6])
    tried: list[str] = []
    for i in range(6):
        run.submit(str(i), PROMPT[: 3 + i], LONG)
    run.submit("poison0", [4, 4, 5], LONG)
    run.submit("poison1", [4, 4, 6], LONG)
    suspects = run.client.replicas[0].replay.suspects
    next_one = suspects.next
    suspects.next = lambda: (tried.append(name) if (name := next_one()) else None, name)[1]  # type: ignore[method-assign]
    run.live()
    assert sorted(tried) == sorted([*map(str, range(6)), "poison0", "poison1"])


def test_copies_of_a_guilty_request_end_with_it() -> None:
    """A client that sends it five times at once: one trial is enough."""
    run = Dying(POISON)
    run.submit("0", PROMPT[:3], LONG)
    for i in range(5):
        run.submit(f"poison{i}", POISON, LONG)
    run.live()
    assert run.num_deaths == 2
    assert all(run.results()[f"poison{i}"][0] == GUILTY for i in range(5))
    assert run.results()["0"] == expected("0")


def test_sent_again_it_is_refused_and_others_are_not() -> None:
    run = Dying(POISON)
    run.submit("poison", POISON, LONG)
    run.live()
    for i in range(100):
        with pytest.raises(RefusedError, match="failed") as told:
            run.submit(f"again{i}", POISON, SamplingParams(temperature=0, seed=i, max_tokens=1 + i))
        assert told.value.status == 422
        assert told.value.retry_after_s is None
    assert run.num_deaths == 2
    assert (run.client.convictions.num_refused, run.client.num_live) == (100, 0)
    run.submit("0", PROMPT[:3], LONG)
    run.drain()
    assert run.results()["0"] == expected("0")


@pytest.mark.parametrize("when", ["in the step", "before its trial", "on trial"])
def test_leaving_does_not_help_a_poison(when: str) -> None:
    """Clients with less patience than a restart takes, or than a hung step lasts."""
    run = Dying(POISON)
    for i in range(2):
        run.submit(str(i), PROMPT[: 3 + i], LONG)
    run.step()
    run.submit("poison", POISON, LONG)
    with pytest.raises(OSError, match="poison"):
        run.step()
    if when == "in the step":
        run.streams["poison"].abort("timeout")
    run.die(run.in_step)
    if when == "before its trial":
        run.streams["poison"].abort()
    run.up()
    while run.client.replicas[0].replay.trial != "poison":
        run.step()
    if when == "on trial":
        run.streams["poison"].abort()
    run.live()
    assert run.streams["poison"].ended
    assert run.num_deaths == 2
    assert not run.unexplained
    assert run.client.convictions.num_convicted == 1
    with pytest.raises(RefusedError):
        run.submit("again", POISON, LONG)
    assert [run.results()[str(i)] for i in range(2)] == [expected(str(i)) for i in range(2)]


def test_the_harmless_that_leave_are_forgotten() -> None:
    run = Dying()
    for i in range(4):
        run.submit(str(i), PROMPT[: 3 + i], LONG)
    run.step()
    run.streams["0"].abort()
    run.die(["0", "1", "2"])
    run.streams["1"].abort()
    run.up()
    run.streams["2"].abort()
    run.drain()
    assert run.client.replicas[0].replay._left == {}
    assert not any(run.client.replicas[0].replay.suspects.has_strike(str(i)) for i in range(3))
    assert run.client.convictions.num_convicted == 0
    assert_idle(run.core)


def test_leavers_of_a_healthy_engine_are_forgotten_after_two_messages() -> None:
    run = Dying()
    run.submit("stays", PROMPT[:3], LONG)
    for i in range(20):
        run.submit(str(i), PROMPT[: 3 + i % 5], LONG)
        run.step()
        run.streams[str(i)].abort()
        assert len(run.client.replicas[0].replay._left) <= 2
    run.step()
    run.step()
    assert run.client.replicas[0].replay._left == {}


def test_who_left_is_remembered_for_one_message_more() -> None:
    """The message that came after it left may be of a step before, so the engine may still die of it."""
    run = Dying()
    for i in range(2):
        run.submit(str(i), PROMPT[: 3 + i], LONG)
    run.step()
    run.streams["0"].abort()
    run.step()
    run.die(["0", "1"])
    assert run.client.replicas[0].replay.suspects.has_strike("0")
    run.up()
    run.drain()
    assert run.client.replicas[0].replay._left == {}


def test_those_who_leave_while_an_engine_hangs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MAX_LEFT", 3)
    run = Dying()
    for i in range(8):
        run.submit(str(i), PROMPT[: 3 + i], LONG)
    run.step()
    for i in range(8):
        run.streams[str(i)].abort()
    assert sorted(run.client.replicas[0].replay._left) == ["0", "1", "2"]
    run.die(["1", "7"])
    assert sorted(run.client.replicas[0].replay._left) == ["1"], "only suspects are of use from here on"


@pytest.mark.parametrize("left", [False, True])
def test_a_beam_search_that_kills_late_is_found_out(left: bool) -> None:
    """It begins anew on trial, and is tried to its end."""
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    run = Dying()
    run.submit("0", PROMPT[:3], LONG)
    run.submit("beams", POISON, params)
    for _ in range(3):
        run.step()
    run.poison += [POISON]
    with pytest.raises(OSError, match="poison"):
        run.step()
    if left:
        run.streams["beams"].abort()
    run.die(run.in_step)
    run.up()
    run.live()
    assert run.num_deaths == 2
    assert not run.unexplained
    other = run.streams["0"].output
    assert (other.error, other.prompt_logprobs, other.outputs) == expected("0")
    with pytest.raises(RefusedError):
        run.submit("again", POISON, params)


def test_a_death_between_steps_is_nobodys_and_counts() -> None:
    run = Dying()
    run.submit("0", PROMPT[:3], LONG)
    run.step()
    run.die([])
    run.up()
    run.drain()
    assert len(run.unexplained) == 1
    assert run.client.num_restarts == 1
