"""KV memory is taken a little ahead of use; a machine that has none left slows engines down, and kills none."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.base.clock import VirtualClock
from penstock.core.output import EngineOutput
from penstock.core.request import Abort, Control, Request
from penstock.engine import grower
from penstock.engine.core import EngineCore
from penstock.engine.grower import LAST_BYTES, Grower, left_bytes
from penstock.engine.record import Recorder, load, replay
from penstock.kv import backing
from penstock.plan.probe import Free
from tests.engine.harness import Knobs, plain_core, real_engine, request, tiny

GIB = 1 << 30
MODELS = ["llama_gqa", "slots", "windowed"]


@dataclass
class Memory:
    """A machine whose neighbours come and go. `free`: beside what engines leave to others."""

    free: int
    total: int = GIB
    taken: dict[int, int] = field(default_factory=dict)
    script: random.Random | None = None

    def ask(self) -> Free:
        if self.script is not None:
            self.free = self.script.choice([0, 0, 3000, 10_000, 50_000, GIB])
        return Free(self.total, self.free + left_bytes(self.total) - sum(self.taken.values()))

    def attach(self, core: EngineCore, *, takes_all: bool = False) -> EngineCore:
        sizes = core.kv.backing.slab_bytes

        def back(num_slabs: Any) -> None:
            self.taken[id(core)] = sum(n * size for n, size in zip(num_slabs, sizes, strict=True))

        core.grower = Grower(self.ask, back, takes_all=takes_all)
        return core


@pytest.fixture(autouse=True)
def _little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing, "AHEAD_BYTES", 0)  # MIN_AHEAD slabs


def engine(name: str, knobs: Knobs, memory: Memory) -> EngineCore:
    spec, weights = tiny(name)
    core = memory.attach(real_engine(spec, weights, knobs))
    core.recorder = Recorder()
    core.clock = VirtualClock()
    return core


def prompts(num: int, seed: int = 1) -> list[Request]:
    rng = random.Random(seed)
    return [
        request(
            [rng.randrange(3, 60) for _ in range(rng.randrange(5, 40))],
            max_tokens=rng.randrange(2, 20),
            request_id=f"{seed}.{i}",
        )
        for i in range(num)
    ]


def run(core: EngineCore, todo: list[Request], most: int = 20_000) -> dict[str, list[int]]:
    """The tokens of each request, in the order given. Time passes as if every step took a tenth of a second."""
    for item in todo:
        core.add(item)
    tokens: dict[str, list[int]] = {item.request_id: [] for item in todo}
    for _ in range(most):
        if not core.has_work:
            return tokens
        collect(tokens, core.step())
        pass_time(core)
    raise AssertionError("the engine does not come to an end")


def collect(tokens: dict[str, list[int]], outputs: list[EngineOutput]) -> None:
    for out in outputs:
        assert out.finish_reason != "error", out.error
        tokens[out.request_id] += out.token_ids


def pass_time(core: EngineCore, seconds: float = 0.1) -> None:
    assert isinstance(core.clock, VirtualClock)
    core.clock.wait_until(core.clock.now() + seconds)


def rest(core: EngineCore) -> None:
    assert core.grower is not None
    core.rest()


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_taken_as_it_is_used(name: str) -> None:
    memory = Memory(GIB)
    core = engine(name, Knobs(num_blocks=400), memory)
    run(core, prompts(3))
    held, backed = core.kv.backing, list(core.kv.backing.num_slabs)
    assert 0 < held.num_bytes == sum(memory.taken.values())
    for pool, n in zip(core.kv.pools, backed, strict=True):
        assert n <= backing.touched(pool) + backing.MIN_AHEAD, "only a little ahead"
    assert max(backed) < 100
    run(core, prompts(12, seed=2))
    assert sum(core.kv.backing.num_slabs) > sum(backed)
    assert core.stats.num_kv_growths > 2
    assert core.stats.num_kv_refusals == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_machine_with_enough_changes_no_schedule(name: str, depth: int) -> None:
    knobs = Knobs(num_blocks=60, budget=24, depth=depth)
    grown = engine(name, knobs, Memory(GIB))
    plain = engine(name, knobs, Memory(GIB))
    plain.grower = None
    assert run(grown, prompts(10)) == run(plain, prompts(10))
    digests = [[d for i in core.recorder.iterations for d in i.digests] for core in (grown, plain) if core.recorder]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_do_not_depend_on_neighbours(name: str, depth: int) -> None:
    """Refusals of all sizes preempt and hold up; nobody ends, and no token changes."""
    knobs = Knobs(num_blocks=120, budget=24, depth=depth)
    expected = run(engine(name, knobs, Memory(GIB)), prompts(10))
    for seed in range(2):
        memory = Memory(0, script=random.Random(seed))
        core = engine(name, knobs, memory)
        assert run(core, prompts(10)) == expected
        assert core.stats.num_kv_refusals > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_run_replays_whatever_memory_there_is_now(tmp_path: Path, name: str, depth: int) -> None:
    """What the machine said is in the log; the replay asks nobody."""
    knobs = Knobs(num_blocks=120, budget=24, depth=depth)
    memory = Memory(0, script=random.Random(7))
    core = engine(name, knobs, memory)
    rng, todo, emitted = random.Random(5), prompts(12), []
    while todo or core.has_work:
        if todo and rng.random() < 0.3:
            core.add(todo.pop())
        if core.groups and rng.random() < 0.03:
            core.add(Control(kind="preempt", request_id=rng.choice(sorted(core.groups))))
        if core.groups and rng.random() < 0.03:
            core.add(Abort(request_id=rng.choice(sorted(core.groups))))
        emitted += core.step()
        pass_time(core, rng.choice([0.1, 0.5]))
        if not core.has_work:
            pass_time(core, 2 * grower.REST_S)
            rest(core)
    assert core.recorder is not None
    assert core.stats.num_kv_refusals > 2
    core.recorder.save(tmp_path / "run.log")
    spec, _ = tiny(name)
    made: list[EngineCore] = []

    def plain(executor: Any, clock: Any) -> EngineCore:
        made.append(plain_core(spec, knobs, executor, clock))
        return made[0]

    assert replay(load(tmp_path / "run.log"), plain, depth=depth) == emitted
    assert made[0].stats.num_kv_refusals == core.stats.num_kv_refusals
    assert made[0].kv.backing.num_slabs == core.kv.backing.num_slabs


def test_whoever_cannot_grow_waits_until_there_is_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can run: the engine waits, tries again every second, and says so once."""
    memory = Memory(0)
    core = engine("llama_gqa", Knobs(num_blocks=100), memory)
    core.add(request([5] * 40, max_tokens=30))
    for _ in range(50):
        core.step()
        assert core.scheduler.wake_s is not None
        pass_time(core)
    assert len(caplog.records) == 1
    assert "left to others" in caplog.text
    assert core.stats.num_scheduled_tokens == 0
    assert 1 <= core.stats.num_kv_refusals <= 6
    memory.free = GIB
    while core.has_work:
        core.step()
        pass_time(core)
    assert core.stats.num_finished == 1
    assert not core.kv.backing.is_short


def test_an_engine_that_stands_still_takes_more_than_one_that_runs() -> None:
    """What is left to others is for them; but two engines must not wait for each other forever."""
    total = 24 * GIB
    assert left_bytes(total) > 2 * LAST_BYTES
    memory = Memory(-LAST_BYTES, total)
    core = engine("llama_gqa", Knobs(num_blocks=100), memory)
    run(core, prompts(3))
    assert core.stats.num_finished == 3
    assert core.stats.num_kv_refusals > 0
    none = engine("llama_gqa", Knobs(num_blocks=100), Memory(LAST_BYTES - left_bytes(total), total))
    none.add(request([5] * 9))
    for _ in range(100):
        none.step()
        pass_time(none)
    assert none.stats.num_scheduled_tokens == 0


def test_two_engines_share_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    """Neither takes what is left to others, both end all their requests, with the tokens of an engine alone."""
    knobs = Knobs(num_blocks=200, budget=48)
    expected = run(engine("llama_gqa", knobs, Memory(GIB)), prompts(20))
    size = engine("llama_gqa", knobs, Memory(GIB)).kv.backing.slab_bytes[0]
    memory = Memory(40 * size)
    cores = [engine("llama_gqa", knobs, memory) for _ in range(2)]
    answers: list[dict[str, list[int]]] = []
    for core in cores:
        for item in prompts(20):
            core.add(item)
        answers.append({item_id: [] for item_id in expected})
    for _ in range(400):
        for core, tokens in zip(cores, answers, strict=True):
            collect(tokens, core.step())
            pass_time(core)
        assert sum(memory.taken.values()) <= memory.free + 2 * (48 // 4 + knobs.max_num_seqs) * size, "beside a step"
    assert not any(core.has_work for core in cores)
    assert answers == [expected, expected]
    assert all(core.stats.num_kv_refusals for core in cores)
    assert sum(core.stats.num_preemptions for core in cores) > 0, "nobody had to give way: the test is too tame"


@pytest.mark.parametrize("cached", [True, False])
def test_an_engine_at_rest_gives_back_what_nobody_needs(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    monkeypatch.setattr(grower, "REST_BYTES", 1)
    memory = Memory(GIB)
    core = engine("llama_gqa", Knobs(num_blocks=400, prefix_cache="radix" if cached else "none"), memory)
    first = run(core, prompts(20))
    held = sum(memory.taken.values())
    rest(core)
    assert not core.has_work, "only after a while"
    pass_time(core, grower.REST_S + 1)
    rest(core)
    assert core.step() == [] if core.has_work else cached
    core.kv.check_invariants([])
    if not cached:
        assert core.kv.backing.num_slabs == [backing.MIN_AHEAD]
        assert sum(memory.taken.values()) < held / 4
    rest(core)
    assert not core.has_work, "once"
    again = prompts(20)
    assert list(run(core, again).values()) == list(first.values())


def test_what_growth_leaves_to_others() -> None:
    assert left_bytes(100 * GIB) == left_bytes(24 * GIB) == 512 << 20
    assert left_bytes(2 * GIB) == 2 * GIB // 20
    assert left_bytes(GIB // 2) == LAST_BYTES


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_an_order_to_sleep_gives_all_back_at_once_and_changes_no_token(tmp_path: Path, name: str, depth: int) -> None:
    knobs, memory = Knobs(num_blocks=400, prefix_cache="radix", depth=depth), Memory(GIB)
    core = engine(name, knobs, memory)
    first = run(core, prompts(8))
    core.add(Control(kind="sleep"))
    core.step()
    rest(core)
    assert core.has_work, "at once"
    core.step()
    assert sum(memory.taken.values()) == core.kv.backing.num_bytes == 0
    core.kv.check_invariants([])
    rest(core)
    assert not core.has_work, "once"
    again = prompts(8)
    assert list(run(core, again).values()) == list(first.values())
    assert core.recorder is not None
    core.recorder.save(tmp_path / "run.log")
    spec, _ = tiny(name)
    told: dict[str, list[int]] = {item.request_id: [] for item in again}
    collect(told, replay(load(tmp_path / "run.log"), partial(plain_core, spec, knobs), depth=depth))
    assert list(told.values()) == [tokens + tokens for tokens in first.values()]
