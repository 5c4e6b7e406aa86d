"""An engine that dies anywhere costs nobody a token: `Request.resume` and the front end's replay, without processes."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.base.errors import EngineGoneError, InputError
from penstock.core.request import Abort, Request, Resume
from penstock.core.sampling import SamplingParams
from penstock.engine.core import EngineCore
from penstock.engine.frontend import GUILTY
from penstock.engine.link import Down
from penstock.engine.record import Recorder, load, replay
from penstock.engine.suspects import CLEAR_AFTER
from tests.engine.crashing import KINDS, PROMPT, Crashing
from tests.engine.harness import Knobs, assert_idle, fake_engine, plain_core, real_engine, request, tiny

SHAPES = [(1, False), (2, False), (1, True)]


def make(depth: int, slots: bool) -> EngineCore:
    return fake_engine(Knobs(num_blocks=80, budget=24, depth=depth, max_num_seqs=20), slots=slots)[0]


@cache
def undisturbed(depth: int, slots: bool) -> tuple[dict[str, Any], int]:
    quiet = Crashing(lambda: make(depth, slots))
    quiet.submit_all()
    steps = quiet.drain()
    return quiet.results(), steps


def test_the_undisturbed_run_has_every_kind_of_end() -> None:
    results, steps = undisturbed(1, False)
    ends = {(o.finish_reason, type(o.stop_reason)) for name, r in results.items() if name != "beams" for o in r[2]}
    assert {("stop", str), ("stop", int), ("length", type(None))} <= ends
    assert len({o.finish_reason for o in results["three-stops"][2]} | {o.text for o in results["three-stops"][2]}) > 2
    assert results["prompt-logprobs"][1] is not None
    assert len(results["prompt-logprobs"][1]) == 3 * len(PROMPT)
    assert steps > 15


@pytest.mark.parametrize(("depth", "slots"), SHAPES)
@pytest.mark.parametrize("suspicious", [False, True])
def test_killed_at_any_step_nothing_changes(depth: int, slots: bool, suspicious: bool) -> None:
    expected, steps = undisturbed(depth, slots)
    for k in range(0, steps, 3 if suspicious else 1):
        run = Crashing(lambda: make(depth, slots))
        run.submit_all()
        for _ in range(k):
            run.step()
        run.crash([*KINDS] if suspicious else [])
        run.up()
        run.drain()
        assert run.results() == expected, f"killed after {k} steps"
        assert_idle(run.core)


@pytest.mark.parametrize("lag", [1, 3])
def test_news_on_its_way_is_counted_once(lag: int) -> None:
    """Between the front end's order to end a trial and its effect, the engine says more."""
    expected, steps = undisturbed(1, False)
    for k in range(1, steps, 4):
        run = Crashing(lambda: make(1, False), lag=lag)
        run.submit_all()
        for _ in range(k):
            run.step()
        run.crash([*KINDS])
        run.up()
        run.drain()
        assert run.results() == expected, f"killed after {k} steps"


@pytest.mark.parametrize("every", [2, 3, 5])
def test_killed_again_and_again_nothing_changes(every: int) -> None:
    expected, _ = undisturbed(1, False)
    run = Crashing(lambda: fake_engine(Knobs(num_blocks=160, budget=200, max_num_seqs=24))[0])
    run.submit_all()
    kills = 0
    while run.core.has_work:
        for _ in range(every + 6 * (kills > 30)):  # beams begin anew: in the end they need their time
            if run.core.has_work:
                run.step()
        run.crash()
        run.up()
        kills += 1
    assert kills > 4
    assert run.results() == expected


@pytest.mark.parametrize("ops", ["ref", "torch"])
def test_a_real_model_goes_on_bit_for_bit(ops: str) -> None:
    """Logprobs too: recomputed positions give the same floats."""
    spec, weights = tiny("llama_gqa")
    knobs = Knobs(num_blocks=80, budget=24, max_num_seqs=20, ops=ops)

    def run(kill_at: int | None) -> tuple[dict[str, Any], int]:
        crashing = Crashing(lambda: real_engine(spec, weights, knobs))
        for name in ("seeded", "three", "penalties", "logprobs", "prompt-logprobs"):
            crashing.submit(name, *KINDS[name])
        if kill_at is not None:
            for _ in range(kill_at):
                crashing.step()
            crashing.crash()
            crashing.up()
        steps = crashing.drain()
        return crashing.results(), steps

    expected, steps = run(None)
    for k in range(1, steps, 3):
        assert run(k)[0] == expected


def test_a_schedule_with_resumed_requests_replays(tmp_path: Path) -> None:
    knobs = Knobs(num_blocks=40, budget=16)
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, knobs)
    core.recorder = Recorder()
    rng = random.Random(1)
    emitted = []
    for i in range(8):
        prompt = [rng.randrange(3, 60) for _ in range(9)]
        samples = [(j, [rng.randrange(3, 60) for _ in range(i % 4)]) for j in range(1 + i % 3)][i % 2 :]
        resume = Resume(samples) if samples else None
        core.add(msgspec.structs.replace(request(prompt, n=1 + i % 3, max_tokens=8, seed=i), resume=resume))
    while core.has_work:
        emitted += core.step()
    core.recorder.save(tmp_path / "run.log")
    assert any(item.resume for it in core.recorder.iterations for item in it.intake if isinstance(item, Request))
    assert replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, knobs, e, c)) == emitted


@pytest.mark.parametrize(
    "samples",
    [[], [(0, [5]), (0, [5])], [(3, [5])], [(-1, [5])], [(0, [5]), (1, [])], [(0, [5] * 8)]],
    ids=["none", "twice", "beyond", "negative", "mixed", "too long"],
)
def test_a_resume_that_makes_no_sense_is_refused(samples: list[tuple[int, list[int]]]) -> None:
    core = make(1, False)
    with pytest.raises(InputError, match="resume"):
        core.add(msgspec.structs.replace(request([5, 6], n=3, max_tokens=8), resume=Resume(samples)))
    assert not core.has_work


def test_an_id_is_free_once_its_abort_is_queued() -> None:
    core = make(1, False)
    core.add(request([5, 6, 7], request_id="a", max_tokens=9))
    core.step()
    with pytest.raises(InputError, match="in use"):
        core.add(request([5, 6], request_id="a"))
    core.add(Abort(request_id="a"))
    core.add(request([8, 9], request_id="a", max_tokens=2))
    with pytest.raises(InputError, match="in use"):
        core.add(request([5, 6], request_id="a"))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert [o.finish_reason for o in outputs if o.finish_reason] == ["abort", "length"]


# -- the poison rule ---------------------------------------------------------------------------------------------------


class Poisoned(Crashing):
    """Whenever one of `poison` is in a step, the engine dies and names everybody in it."""

    def __init__(self, poison: set[str], after: int = 0) -> None:
        self.poison = poison
        self.after = after
        self.in_step: list[str] = []
        self.alone: list[list[str]] = []
        super().__init__(self._poisoned)

    def _poisoned(self) -> EngineCore:
        core = make(1, False)

        def watch(requests: Any) -> None:
            self.in_step = sorted(r.request_id for r in requests)
            if self.client.state == "restarting":
                self.alone.append(self.in_step)
            for r in requests:
                done = len(self.streams[r.request_id].output.outputs[0].token_ids) if r.beam is None else 99
                if r.request_id in self.poison and done >= self.after:
                    raise OSError("poison")

        core.watch = watch
        return core

    def live(self) -> int:
        """Steps and restarts until all is done. Returns the number of crashes."""
        crashes = 0
        while self.core.has_work:
            try:
                self.step()
            except OSError:
                crashes += 1
                self.crash(self.in_step)
                assert crashes < 20
                self.up()
        return crashes


@pytest.mark.parametrize("after", [0, 4])
def test_poison_ends_alone_and_everyone_else_is_untouched(after: int) -> None:
    expected, _ = undisturbed(1, False)
    run = Poisoned({"three", "greedy"}, after)
    run.submit_all()
    assert run.live() <= 4
    results = run.results()
    for name in KINDS:
        if name in ("three", "greedy"):
            error, _, outputs = results[name]
            assert error == GUILTY
            assert {o.finish_reason for o in outputs} == {"error"}
            for got, whole in zip(outputs, expected[name][2], strict=True):
                assert got.token_ids == whole.token_ids[: len(got.token_ids)]
        else:
            assert results[name] == expected[name], name
    assert run.alone
    assert all(len(ids) == 1 for ids in run.alone), "a suspect had company"
    assert run.client.state == "ready"


def test_without_a_second_crash_alone_nobody_is_guilty() -> None:
    """Crashes with company strike everybody again and again; that is nobody's end."""
    expected, _ = undisturbed(1, False)
    run = Crashing(lambda: make(1, False))
    run.submit_all()
    for _ in range(5):
        while run.client.state != "ready":
            run.step()
        run.step()
        run.crash([n for n in KINDS if n in run.core.groups])
        run.up()
    run.drain()
    assert run.results() == expected


def test_a_crash_between_steps_makes_nobody_guilty() -> None:
    run = Crashing(lambda: make(1, False))
    run.submit("greedy", *KINDS["greedy"])
    run.step()
    run.crash(["greedy"])
    run.up()  # its trial begins
    run.crash([])
    run.up()
    run.drain()
    assert run.results()["greedy"][0] is None


def test_tokens_clear_a_suspect() -> None:
    run = Crashing(lambda: make(1, False))
    run.submit("long", PROMPT, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    run.step()
    run.crash(["long"])
    run.up()
    suspects = run.client.replicas[0].replay.suspects
    while len(run.streams["long"].output.outputs[0].token_ids) < CLEAR_AFTER + 2:
        assert run.client.state in ("ready", "restarting")
        run.step()
    assert not suspects.has_strike("long")
    run.sent.clear()
    run.crash([])
    run.up()
    assert run.client.state == "ready", "it was tried again"
    run.drain()


def test_what_comes_and_goes_while_suspects_are_tried() -> None:
    run = Crashing(lambda: make(1, False))
    for name in ("greedy", "seeded", "logprobs", "unseeded"):
        run.submit(name, *KINDS[name])
    run.step()
    run.crash(["greedy", "seeded", "logprobs", "unseeded"])
    run.submit("stop", *KINDS["stop"])
    run.streams["unseeded"].abort()
    run.up()
    assert not run.client.ready()[0]
    run.submit("penalties", *KINDS["penalties"])
    assert [type(item) for item in run.sent[-1:]] == [Request]
    assert run.client.replicas[0].replay.trial == "greedy"
    run.streams["greedy"].abort()  # the client of the one being tried goes; the trial does not
    assert run.client.replicas[0].replay.trial == "greedy"
    assert run.streams["greedy"].ended
    while run.client.replicas[0].replay.trial == "greedy":
        run.step()
    assert [i.request_id for i in run.sent[-2:]] == ["greedy", "seeded"]
    assert isinstance(run.sent[-2], Abort)
    assert run.client.replicas[0].replay.trial == "seeded"
    run.drain()
    assert not run.client.replicas[0].replay._left
    assert run.client.ready() == (True, "")
    expected, _ = undisturbed(1, False)
    results = run.results()
    for name in ("seeded", "logprobs", "penalties", "stop"):
        assert results[name] == expected[name], name
    for name in ("greedy", "unseeded"):
        assert results[name][2][0].finish_reason == "abort"
    assert_idle(run.core)


def test_an_engine_given_up_ends_all_with_a_retryable_error() -> None:
    run = Crashing(lambda: make(1, False))
    run.submit_all()
    run.step()
    run.client.replicas[0].on_down(Down("it died", (), fatal=True))
    assert run.client.num_live == 0
    assert run.client.ready() == (False, "it died")
    for stream in run.streams.values():
        assert isinstance(stream.failure(stream.error or ""), EngineGoneError)
        assert "it died" not in (stream.error or "")
    with pytest.raises(EngineGoneError):
        run.submit("late", *KINDS["greedy"])


def test_news_of_a_dead_engine_is_dropped() -> None:
    run = Crashing(lambda: make(1, False))
    run.submit("greedy", *KINDS["greedy"])
    stale = run.core.step()
    from penstock.core.messages import Outputs

    run.crash()
    run.up()
    run.client.replicas[0].on_outputs(Outputs(0, stale))
    run.drain()
    assert run.results()["greedy"] == undisturbed(1, False)[0]["greedy"]
