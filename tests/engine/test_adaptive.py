"""Adaptive mode: knobs that move change no token and are in the log; what moves them keeps to its bounds and rests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.events import Move
from penstock.core.output import EngineOutput
from penstock.core.request import Control, Request
from penstock.core.step_shape import StepShape
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.launch.adaptive import DEFAULTS, adapt, check_adaptive, movable_of, promise_of
from penstock.plan.devices import find_device
from penstock.plan.simulated import device_plan
from penstock.sched.controller import PERIOD_S, REST_S, Controller, LoadView, Promise, Wish
from penstock.sim.build import build_sim
from penstock.sim.driver import SimLimits, simulate
from penstock.sim.result import SimResult
from penstock.sim.specs import find_spec
from penstock.sim.workload import TimedRequest, Workload
from tests.engine.harness import Knobs, fake_engine, plain_core, real_engine, request, tiny

PROMISE = Promise(2.0, 0.1)


class Restless:
    """Moves something before every other step."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core, self.rng = core, random.Random(seed)

    def look(self, now_s: float) -> list[Move]:
        if self.rng.random() < 0.5:
            return []
        name = self.rng.choice(self.core.knobs.names)
        if name == "scheduling_policy":
            orders = ["fcfs", "slo:ttft_s=0.01,tpot_s=0.01,whole=1"]
            return [Move(name=name, value=self.rng.choice(orders), why="drawn")]
        least, most = self.core.knobs.bounds[name]
        value: float = self.rng.uniform(least, most)
        return [Move(name=name, value=value if name == "schedule_conservativeness" else round(value), why="drawn")]


def ran(knobs: Knobs, seed: int, *, restless: bool) -> tuple[EngineCore, list[Request], list[EngineOutput]]:
    """Requests through a tiny model, while knobs move or stay."""
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, knobs)
    core.recorder = Recorder()
    if restless:
        core.controller = Restless(core, seed)  # type: ignore[assignment]
    rng = random.Random(seed)
    todo = [
        request([rng.randrange(3, 60) for _ in range(rng.randrange(1, 40))], max_tokens=rng.randrange(1, 20),
                n=rng.choice([1, 1, 2]), temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(99), request_id=str(k))
        for k in range(25)
    ]  # fmt: skip
    asked, emitted = list(todo), []
    while todo or core.has_work:
        if todo and rng.random() < 0.4:
            core.add(todo.pop())
        emitted += core.step()
    return core, asked, emitted


def tokens_of(emitted: list[EngineOutput]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for out in emitted:
        found.setdefault((out.request_id, out.index), []).extend(out.token_ids)
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_knobs_that_move_change_no_token_and_a_replay_has_their_moves(tmp_path: Path, depth: int) -> None:
    knobs = Knobs(num_blocks=40, budget=16, depth=depth)
    core, _, emitted = ran(knobs, 5, restless=True)
    assert core.stats.num_moves > 20
    assert {move.name for _, move in core.moves} == set(core.knobs.names)
    assert core.recorder is not None
    core.recorder.save(tmp_path / "run.log")
    spec, _ = tiny("llama_gqa")
    again = replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, knobs, e, c), depth=depth)
    assert again == emitted
    _, _, still = ran(knobs, 5, restless=False)
    assert tokens_of(emitted) == tokens_of(still)


def test_moves_that_are_taken_out_of_a_log_are_missed() -> None:
    knobs = Knobs(num_blocks=40, budget=16)
    core, _, _ = ran(knobs, 5, restless=True)
    assert core.recorder is not None
    for iteration in core.recorder.iterations:
        iteration.intake = [item for item in iteration.intake if not isinstance(item, Move)]
    spec, _ = tiny("llama_gqa")
    with pytest.raises(Exception, match="step"):
        replay(core.recorder.iterations, lambda e, c: plain_core(spec, knobs, e, c))


# -- the controller, on a virtual clock ------------------------------------------------------------------------------


class Slow:
    """Steps that cost 20 ms, 3 ms a token, as on a CPU; a tile of 32 costs no more than a part of it."""

    name = "slow"

    def step_s(self, shape: StepShape) -> float:
        tokens = shape[0]
        return 0.02 + 0.1 * -(-tokens // 32) if tokens > 16 else 0.02 + 0.005 * tokens

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / 1e10


def phases(*parts: tuple[float, float, int, int]) -> list[TimedRequest]:
    """(seconds, requests per second, prompt, output) one behind the other."""
    rng, out, at = random.Random(1), [], 0.0
    for seconds, rate, prompt, output in parts:
        end = at + seconds
        while (at := at + rng.expovariate(rate)) < end:
            out.append(TimedRequest(at, rng.randrange(prompt // 2, 2 * prompt), rng.randrange(output // 2, 2 * output)))
        at = end
    return out


def served(load: list[TimedRequest], **settings: Any) -> tuple[EngineCore, SimResult]:

    given = {"max_num_seqs": 16, "max_model_len": 4096, "kv_cache_memory_bytes": 1 << 30} | settings
    config = from_kwargs(model="(sim)", **given)
    spec = find_spec("llama-3.2-1b")
    config, plan = device_plan(config, spec, find_device("h100-sxm"))
    clock = VirtualClock()
    core = build_sim(config, spec, plan, Slow(), clock)
    work = Workload("made", "made", lambda: iter(load), num_requests=len(load))
    limits = SimLimits(plan.max_model_len, plan.kv_capacity_tokens, spec.vocab_size, truncate=True)
    return core, simulate(core, clock, work, limits)


def chat_documents_chat() -> list[TimedRequest]:
    return phases((40.0, 1.2, 40, 40), (40.0, 0.4, 600, 20), (40.0, 1.2, 40, 40))


@pytest.fixture(scope="module")
def turned() -> tuple[EngineCore, SimResult]:
    return served(chat_documents_chat(), adaptive=True, adaptive_slo="ttft=3,tpot=0.2")


def test_the_load_moves_the_knobs_within_bounds_and_every_move_says_why(turned: tuple[EngineCore, SimResult]) -> None:
    core, _ = turned
    moved = {move.name for _, move in core.moves}
    assert {"max_num_batched_tokens", "scheduling_policy"} <= moved
    for _, move in core.moves:
        assert move.why
        assert move.value != move.was
        if move.name in core.knobs.bounds:
            least, most = core.knobs.bounds[move.name]
            assert least <= move.value <= most
    assert core.stats.num_moves >= len(core.moves)


def test_a_knob_that_has_moved_rests(turned: tuple[EngineCore, SimResult]) -> None:
    last: dict[str, float] = {}
    for at_s, move in turned[0].moves:
        assert at_s - last.get(move.name, float("-inf")) >= REST_S[move.name] - 1e-9, move
        last[move.name] = at_s


def test_it_finds_the_size_of_a_tile(turned: tuple[EngineCore, SimResult]) -> None:
    sizes = [move.value for _, move in turned[0].moves if move.name == "max_num_batched_tokens"]
    assert {32, 64} & set(sizes), "whole tiles that about keep the pace"
    assert max(sizes) <= 256, "longer than anybody is to wait"


def test_it_serves_better_than_what_it_began_with(turned: tuple[EngineCore, SimResult]) -> None:
    from penstock.sim.metrics import Slo, within

    _, as_given = served(chat_documents_chat())
    slo = Slo(3.0, 0.2)
    assert within(turned[1], slo).mean() > within(as_given, slo).mean() + 0.05


def test_deadlines_go_when_nobody_is_late_any_more() -> None:
    load = phases((15.0, 1.0, 600, 20), (150.0, 0.5, 30, 10))
    core, _ = served(load, adaptive=True, adaptive_slo="ttft=1,tpot=0.2", adaptive_knobs="scheduling_policy",
                     max_num_batched_tokens=64)  # fmt: skip
    orders = [move.value for _, move in core.moves]
    assert orders[0].startswith("slo:ttft_s=1")
    assert orders[-1] == "fcfs"
    assert core.knobs.values()["scheduling_policy"] == "fcfs"
    assert core.scheduler.policy.name == "fcfs"


def test_only_named_knobs_move_and_a_value_that_was_given_stays() -> None:
    core, _ = served(chat_documents_chat(), adaptive=True, adaptive_slo="ttft=3,tpot=0.2",
                     scheduling_policy="prefill-first")  # fmt: skip
    assert core.moves
    assert "scheduling_policy" not in {move.name for _, move in core.moves}
    assert core.scheduler.policy.name == "prefill-first"
    core, _ = served(chat_documents_chat(), adaptive=True, adaptive_knobs="max_num_seqs")
    assert {move.name for _, move in core.moves} <= {"max_num_seqs"}
    for name, default in DEFAULTS.items():
        other = {"fcfs": "fair", 0: 64, 1.0: 0.5}[default]  # type: ignore[index]
        config = from_kwargs(model="(sim)", adaptive=True, **{name: other})
        assert name not in movable_of(config)


def test_without_adaptive_mode_nothing_moves() -> None:
    core, _ = served(chat_documents_chat())
    assert core.controller is None
    assert not core.moves


def test_frozen_it_moves_nothing_until_it_is_thawed() -> None:
    moves: list[int] = []
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs(num_blocks=40, budget=16))
    adapt(from_kwargs(model="(sim)", adaptive=True, adaptive_slo="ttft=0.0001,tpot=0.0001"), core)
    assert isinstance(core.controller, Controller)

    def some() -> Iterator[int]:
        for k in range(12):
            core.add(request([3 + k] * 30, max_tokens=6))
            core.controller._next_s = 0.0  # type: ignore[union-attr]
            core.step()
            yield core.stats.num_moves

    core.add(Control(kind="freeze"))
    core.step()
    moves = list(some())
    assert set(moves) == {moves[0]}, "frozen"
    core.add(Control(kind="thaw"))
    core.step()
    assert list(some())[-1] > moves[0]


def test_it_looks_twice_a_second_and_not_at_every_step() -> None:
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs())
    adapt(from_kwargs(model="(sim)", adaptive=True), core)
    seen: list[float] = []
    controller = core.controller
    assert controller is not None
    inner = controller._load
    controller._load = lambda now_s: (seen.append(now_s), inner(now_s))[1]  # type: ignore[method-assign,func-returns-value]
    for k in range(100):
        controller.look(0.01 * k)
    assert len(seen) == 2
    assert seen[1] - seen[0] >= PERIOD_S


def test_pieces_are_never_larger_than_those_that_memory_was_planned_for() -> None:
    spec, weights = tiny("llama_gqa")
    assert "long_prefill_token_threshold" in real_engine(spec, weights, Knobs()).knobs.names
    assert "long_prefill_token_threshold" not in real_engine(spec, weights, Knobs(threshold=3)).knobs.names
    whole = real_engine(spec, weights, Knobs(chunked=False, budget=256)).knobs.names
    assert set(whole) == {"scheduling_policy", "max_num_seqs", "schedule_conservativeness"}


# -- rules, one by one -----------------------------------------------------------------------------------------------


def controller_of() -> tuple[EngineCore, Controller]:
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs(block_size=4, budget=64, max_num_seqs=8))
    return core, Controller(core.scheduler, core.knobs, PROMISE, tuple(REST_S))


def load_of(**given: Any) -> LoadView:
    usual = {
        "now_s": 100.0, "num_decodes": 4, "num_running": 4, "num_waiting": 0, "tpot_s": 0.1, "pace_s": 0.05,
        "backlog": [], "late": 0.0,
    }  # fmt: skip
    return LoadView(**{**usual, **given})


def test_a_knob_whose_rule_always_wants_another_value_moves_only_when_its_rest_is_over() -> None:
    core, controller = controller_of()
    controller._rules = {
        "max_num_seqs": lambda load: Wish(4 if core.scheduler.max_num_seqs == 8 else 8, "drawn"),
        "schedule_conservativeness": lambda load: Wish(
            2.0 if core.scheduler.reserve.conservativeness < 1 else 0.5, "-"
        ),
    }
    moved: dict[str, list[float]] = {name: [] for name in controller._rules}
    for k in range(25):
        for move in controller.look(PERIOD_S * k):
            core.knobs.set(move.name, move.value)
            moved[move.name].append(PERIOD_S * k)
    assert moved == {
        "max_num_seqs": [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0],
        "schedule_conservativeness": [0.0, 5.0, 10.0],
    }


def test_the_batch_shrinks_when_promises_per_token_break_and_grows_when_there_is_room() -> None:
    core, controller = controller_of()
    core.scheduler.pauses.costs.observe(1, 0, 0.02)
    controller._pace_s = 0.2
    assert controller._batch(load_of(num_decodes=8)).value == 4  # type: ignore[union-attr]
    core.scheduler.max_num_seqs = 4
    controller._pace_s = 0.05
    assert controller._batch(load_of(num_waiting=3)).value == 5  # type: ignore[union-attr]
    assert controller._batch(load_of(num_waiting=0)) is None
    core.scheduler.pauses.costs.decode[:] = [0.5]
    assert controller._batch(load_of()).value == 8, "no batch keeps that promise"  # type: ignore[union-attr]


def test_memory_set_aside_follows_who_is_thrown_out() -> None:
    core, controller = controller_of()
    core.scheduler.reserve.scale(1.0)
    core.scheduler.reserve.share = 0.7
    core.stats.num_scheduled_tokens, core.stats.num_recomputed_tokens = 1000, 100
    assert controller._aside(load_of()).value == pytest.approx(1.5)  # type: ignore[union-attr]
    core.stats.num_scheduled_tokens = 2000
    assert controller._aside(load_of(now_s=200.0)) is None, "nobody waits"
    core.add(request([5] * 40, max_tokens=200))
    core.step()
    core.add(request([6] * 110, max_tokens=40))
    core._take(core._intake.popleft())
    core.stats.num_scheduled_tokens = 3000
    assert controller._aside(load_of(now_s=200.0, num_waiting=1)).value == pytest.approx(0.7)  # type: ignore[union-attr]
    core.scheduler.running[0].token_ids.extend([7] * 190)  # it is about to end, and needs no more
    core.stats.num_scheduled_tokens = 4000
    assert controller._aside(load_of(now_s=300.0, num_waiting=1)) is None, "there is memory"


def test_short_prompts_do_not_wait_behind_a_long_one() -> None:
    _, controller = controller_of()
    assert controller._chunk(load_of(backlog=[(101.0, 500), (102.0, 9)])).value == 32  # type: ignore[union-attr]
    assert controller._chunk(load_of(backlog=[(101.0, 500)])).value == 0  # type: ignore[union-attr]


def test_drafts_go_when_they_lose_time_and_come_back_for_a_try() -> None:
    core, _ = fake_engine(Knobs(num_drafts=8))
    core.knobs.limit_drafts(8)
    controller = Controller(core.scheduler, core.knobs, PROMISE, tuple(REST_S))
    core.stats.num_spec_steps, core.stats.spec_compared_s, core.stats.spec_plain_s = 40, 2.0, 1.0
    assert controller._drafts(load_of()).value == 4  # type: ignore[union-attr]
    core.stats.num_spec_steps, core.stats.spec_compared_s, core.stats.spec_plain_s = 80, 3.0, 3.0
    assert controller._drafts(load_of()).value == 8, "twice as fast as plain steps"  # type: ignore[union-attr]
    core.knobs.set("num_speculative_tokens", 0)
    assert controller._drafts(load_of()).value == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(("was", "then", "order"), [("slo", "fcfs", "abc"), ("fcfs", "slo:window=1", "cba")])
def test_those_that_wait_are_served_in_the_order_of_the_policy_that_is_set(was: str, then: str, order: str) -> None:
    """They have come as a, b, c, and are due as c, b, a; a window of one leaves the order to the queue."""
    core, _ = fake_engine(Knobs(policy=was, max_num_seqs=1))
    core.add(request([3] * 8, max_tokens=4, request_id="first"))
    core.step()
    for due_s, name in zip((30.0, 20.0, 10.0), "abc", strict=True):
        core.add(request([5] * 8, max_tokens=2, request_id=name, slo_ttft_s=due_s))
    core.step()
    assert [seq.request.request_id for seq in core.scheduler.waiting] == list(reversed(order))
    core.knobs.set("scheduling_policy", then)
    ended = []
    while core.has_work:
        ended += [out.request_id for out in core.step() if out.finish_reason is not None]
    assert ended == ["first", *order]


@pytest.mark.parametrize(("was", "then", "last"), [("slo", "fcfs", "b"), ("fcfs", "slo", "a")])
def test_who_is_last_in_the_order_of_the_policy_that_is_set_yields_memory(was: str, then: str, last: str) -> None:
    """Both run; a has come first, b is due first."""
    core, _ = fake_engine(Knobs(policy=was))
    for due_s, name in zip((20.0, 10.0), "ab", strict=True):
        core.add(request([5] * 4, max_tokens=8, request_id=name, slo_ttft_s=due_s))
    core.step()
    core.knobs.set("scheduling_policy", then)
    running = core.scheduler.running
    needy = next(seq for seq in running if seq.request.request_id != last)
    victim = core.scheduler.policy.victim(running, needy)
    assert victim is not None
    assert victim.request.request_id == last


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adaptive_slo": "ttft=soon"}, "ttft=X or tpot=X"),
        ({"adaptive_slo": "tbt=1"}, "ttft=X or tpot=X"),
        ({"adaptive_knobs": "temperature"}, "there is no 'temperature'; known: scheduling_policy"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_adaptive(from_kwargs(model="(sim)", adaptive=True, **given))
    assert "\n" not in str(caught.value)


def test_promises_are_read_in_seconds_and_milliseconds() -> None:
    assert promise_of("ttft=500ms,tpot=0.1") == Promise(0.5, 0.1)
    assert promise_of("tpot=50ms") == Promise(1.0, 0.05)
