"""A recorded run replays to the identical schedule: the engine has no input but intake, clock readings and results."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from penstock.base.errors import EngineError
from penstock.core.output import EngineOutput
from penstock.core.request import Abort, Control
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from tests.engine.harness import Knobs, plain_core, real_engine, request, tiny


def record(knobs: Knobs, name: str, seed: int) -> tuple[Recorder, list[EngineOutput]]:
    """A real engine under random arrivals, aborts (also in the middle of steps) and preemptions."""
    spec, weights = tiny(name)
    core = real_engine(spec, weights, knobs)
    core.recorder = Recorder()
    rng = random.Random(seed)
    collect = core.executor.collect

    def meddle():  # type: ignore[no-untyped-def]
        if core.groups and rng.random() < 0.1:
            core.add(Abort(request_id=rng.choice(sorted(core.groups))))
        if rng.random() < 0.1:
            core.add(request([rng.randrange(3, 60) for _ in range(9)], max_tokens=5))
        return collect()

    core.executor.collect = meddle  # type: ignore[method-assign]
    emitted: list[EngineOutput] = []
    todo = [
        request(
            [rng.randrange(3, 60) for _ in range(rng.randrange(1, 40))],
            max_tokens=rng.randrange(1, 20),
            n=rng.choice([1, 1, 2]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(99),
            eos=[4],
            priority=rng.randrange(3),
        )
        for _ in range(25)
    ]
    todo.insert(5, request([5, 6, 7, 8, 9], beam_width=3, max_tokens=6))
    while todo or core.has_work:
        if todo and rng.random() < 0.4:
            core.add(todo.pop())
        if core.groups and rng.random() < 0.05:
            core.add(Control(kind="preempt", request_id=rng.choice(sorted(core.groups))))
        emitted += core.step()
    return core.recorder, emitted


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("name", "policy"), [("llama_gqa", "fcfs"), ("slots", "fcfs"), ("llama_gqa", "prefill-first")])
def test_a_real_run_replays_to_the_identical_schedule(tmp_path: Path, name: str, policy: str, depth: int) -> None:
    knobs = Knobs(num_blocks=40, budget=16, policy=policy, depth=depth)
    recorder, emitted = record(knobs, name, seed=3)
    assert sum(len(i.digests) for i in recorder.iterations) > 50
    assert any(i.late for i in recorder.iterations), "no abort came while a step ran: the run is too tame"
    recorder.save(tmp_path / "run.log")
    spec, _ = tiny(name)
    again = replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, knobs, e, c), depth=depth)
    assert again == emitted


def test_a_different_engine_is_noticed() -> None:
    recorder, _ = record(Knobs(num_blocks=40, budget=16), "llama_gqa", seed=3)
    spec, _ = tiny("llama_gqa")

    def other(executor, clock) -> EngineCore:  # type: ignore[no-untyped-def]
        return plain_core(spec, Knobs(num_blocks=40, budget=15), executor, clock)

    with pytest.raises(EngineError, match="step"):
        replay(recorder.iterations, other)


def test_a_log_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    recorder, _ = record(Knobs(), "llama_gqa", seed=1)
    path = tmp_path / "run.log"
    recorder.save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(EngineError, match="cut off"):
        list(load(path))
