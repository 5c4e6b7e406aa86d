"""What every Executor promises. Registering one enrols it; it then needs a factory here."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import CapacityError, ConfigError, EngineError, InputError, RankGoneError, UnsupportedError
from penstock.core.batch import (
    AddedRow,
    Appended,
    Fork,
    ScheduledRow,
    SchedulerOutput,
    StepOutput,
    TableUpdate,
)
from penstock.core.cache_spec import CacheSpec, PlaneSpec, group_layers
from penstock.core.page_ops import PageOp
from penstock.core.protocols import Executor
from penstock.core.sampling import TokenRules
from penstock.engine import wire
from penstock.engine.blackbox import BlackBox
from penstock.executor import EXECUTORS
from penstock.executor.inproc import InprocExecutor
from penstock.executor.multiproc import MultiprocExecutor
from penstock.executor.rank import RankSpec
from penstock.executor.sim import SimExecutor
from penstock.plan.resolve import Plan
from tests import ranks
from tests.engine.processes import is_gone, num_fds
from tests.ranks import Recorder, lasting

FACTORIES: dict[str, Callable[..., Executor]] = {
    "inproc": InprocExecutor,
    "multiproc": partial(MultiprocExecutor, command=ranks.COMMAND),
}
VARIANTS = [(name, depth, wire) for name in EXECUTORS.names() for depth in (1, 2) for wire in (False, True)]
VARIANTS = [v for v in VARIANTS if v[2] or v[0] != "multiproc"]  # it has nothing but the wire
every = pytest.mark.parametrize(("name", "depth", "wire"), VARIANTS)
GROUPS = group_layers([CacheSpec("paged", (PlaneSpec("k", 1, 1, "float32"),))])
PLAN = Plan(
    dtype="float32", kv_dtype="float32", max_model_len=16, block_size=4, groups=GROUPS, num_slabs=(4,), max_num_seqs=4,
    max_num_batched_tokens=16, long_prefill_token_threshold=0, step_tokens=16, kv_capacity_tokens=16, weight_bytes=0,
    kv_bytes=64,
)  # fmt: skip


def full_step(step: int, **more: Any) -> SchedulerOutput:
    rules = TokenRules(
        temperature=0.5,
        logit_bias={3: 1.5},
        bad_sequences=[[1, 2], [3]],
        allowed_ids=[],
        seed=2**64 - 1,
        stop_ids=[2],
        num_logprobs=0,
    )
    return SchedulerOutput(
        step,
        [Fork(1, 2, 1)],
        [1],
        [AddedRow(5, 0, [1, 2, 3], 2, rules)],
        [Appended(2, [9], 1)],
        [TableUpdate(2, 0, 1, [4, 5], 1)],
        more.get("page_ops", [PageOp(0, -1, 3, 2)]),
        [ScheduledRow(2, 4, 1, 0, 3, -1), ScheduledRow(5, 0, 3, 2, 0, 0)],
    )


def spec_of(model: str, wire: bool = False) -> RankSpec:
    return RankSpec(config={"model": "(test)"}, plan=PLAN, model=model, wire=wire)


def make(name: str, model: str, depth: int, wire: bool, **more: Any) -> closing[Any]:
    return closing(FACTORIES[name](spec_of(model, wire), ranks.build, depth=depth, **more))


def run(executor: Executor, steps: list[SchedulerOutput]) -> list[StepOutput]:
    """As many in flight as it takes."""
    results: list[StepOutput] = []
    submitted = 0
    while len(results) < len(steps):
        while submitted < len(steps) and submitted - len(results) < executor.depth:
            executor.submit(steps[submitted])
            submitted += 1
        results.append(executor.collect())
    return results


def test_every_executor_has_a_factory() -> None:
    assert sorted(FACTORIES) == EXECUTORS.names()
    for name, factory in FACTORIES.items():
        assert EXECUTORS.get(name) is getattr(factory, "func", factory)


# -- steps -----------------------------------------------------------------------------------------------------------


@every
def test_steps_run_in_order_and_nothing_is_lost(name: str, depth: int, wire: bool) -> None:
    with make(name, "recorder", depth, wire) as executor:
        assert isinstance(executor, Executor)
        assert executor.depth == depth
        assert executor.packed_file == Recorder.packed_file
        results = run(executor, [full_step(i) for i in range(5)])
    rank = Recorder()
    assert results == [rank.execute(full_step(i)) for i in range(5)], "each result has all that the rank was given"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wire", [False, True])
def test_execution_waits_for_collect(depth: int, wire: bool) -> None:
    """The inproc executor's own promise: with depth 2, step 0 runs after step 1 was submitted."""
    rank = Recorder()
    executor = InprocExecutor(spec_of("recorder", wire), lambda *_: rank, depth=depth)
    for step in range(depth):
        executor.submit(full_step(step))
    assert rank.seen == []
    assert executor.collect().step == 0
    assert [s.step for s in rank.seen] == [0]


def test_a_rank_elsewhere_runs_while_the_engine_schedules() -> None:
    with make("multiproc", "recorder", 2, True) as executor:
        for step in range(2):
            executor.submit(full_step(step))
            assert select.select([executor._sock], [], [], 30)[0], "it waits for collect"
        assert [executor.collect().step for _ in range(2)] == [0, 1]


@every
def test_misuse_is_our_own_bug(name: str, depth: int, wire: bool) -> None:
    with make(name, "recorder", depth, wire) as executor:
        with pytest.raises(AssertionError):
            executor.collect()
        for step in range(depth):
            executor.submit(full_step(step))
        with pytest.raises(AssertionError):
            executor.submit(full_step(depth))
        executor.close()
        executor.close()
        with pytest.raises(AssertionError):
            executor.submit(full_step(0))
        with pytest.raises(AssertionError):
            executor.collect()


@pytest.mark.parametrize("name", EXECUTORS.names())
def test_the_wire_carries_the_step_as_it_was_sent(name: str) -> None:
    with make(name, "recorder", 1, True) as executor:
        step = full_step(0)
        executor.submit(step)
        step.removed.append(77)
        assert executor.collect() == Recorder().execute(full_step(0))


@every
def test_large_messages_both_ways_at_once(name: str, depth: int, wire: bool) -> None:
    """More than a socket holds: neither side waits for the other for ever."""
    rules = TokenRules()
    steps = [SchedulerOutput(i, added=[AddedRow(i, 0, list(range(300_000)), 1, rules)]) for i in range(3)]
    with make(name, "recorder", depth, wire) as executor:
        results = run(executor, steps)
    assert [len(r.errors[0].message) > 300_000 * 5 for r in results] == [True] * 3


RULES = TokenRules(temperature=0.9, seed=3, num_logprobs=2, num_prompt_logprobs=1)
FLAT_STEPS = [
    SchedulerOutput(
        0,
        added=[AddedRow(1, 0, [1, 2, 3], 3, RULES), AddedRow(2, 0, [5], 1, TokenRules(allowed_ids=[]))],
        tables=[TableUpdate(1, 0, 0, [0]), TableUpdate(2, 0, 0, [1])],
        scheduled=[ScheduledRow(1, 0, 3, 2, 0, 0), ScheduledRow(2, 0, 1, 1)],
    ),
    SchedulerOutput(1, appended=[Appended(1, [4])], scheduled=[ScheduledRow(1, 3, 1, 0, 4)]),
]


def untimed(results: list[StepOutput]) -> list[Any]:
    import msgspec

    return [msgspec.structs.replace(r, duration_s=0.0) for r in results]


@every
def test_a_real_rank_is_wireable(name: str, depth: int, wire: bool) -> None:
    """No numpy number, no view, nothing msgpack cannot carry, and no float that changes on the way."""
    with make("inproc", "flat", 1, False) as executor:
        plain = run(executor, FLAT_STEPS)
    with make(name, "flat", depth, wire) as executor:
        assert untimed(run(executor, FLAT_STEPS)) == untimed(plain)
    assert [len(s.token_ids) for s in plain[0].sampled] == [2]
    assert [e.seq_id for e in plain[0].errors] == [2], "an error of one row"
    assert len(plain[0].prompt_logprobs[0].entries) == 2
    assert plain[1].sampled[0].candidates[0][0] == 5


# -- beside the steps ------------------------------------------------------------------------------------------------


@every
def test_memory_grows_between_two_steps(name: str, depth: int, wire: bool) -> None:
    with make(name, "recorder", depth, wire) as executor:
        executor.back([4])
        first = run(executor, [full_step(0)])
        executor.back([6, 5])
        second = run(executor, [full_step(1)])
    rank = Recorder()
    rank.back([4])
    assert first == [rank.execute(full_step(0))]
    rank.back([6, 5])
    assert second == [rank.execute(full_step(1))]


@every
def test_grammars_are_prepared_beside_the_steps(name: str, depth: int, wire: bool) -> None:
    with make(name, "recorder", depth, wire) as executor:
        executor.submit(full_step(0, page_ops=lasting(200)))
        threads = [threading.Thread(target=executor.prepare, args=(f"g{i}",)) for i in range(6)]
        for thread in threads:
            thread.start()
        with pytest.raises(InputError, match="no such grammar") as caught:
            executor.prepare("wrong", "structured_outputs.json")
        assert (caught.value.param, caught.value.code) == ("structured_outputs.json", "bad")
        with pytest.raises((ZeroDivisionError, EngineError), match="in the compiler"):
            executor.prepare("broken")
        for thread in threads:
            thread.join()
        assert executor.collect().step == 0
        assert not executor.holds("g0")
        assert executor.holds("held") == (not executor.processes), "elsewhere only the rank knows"


@every
def test_the_step_submitted_next_is_spoilt(name: str, depth: int, wire: bool) -> None:
    rows = SchedulerOutput(
        0,
        added=[AddedRow(i, 0, [i], 1, TokenRules()) for i in (1, 2)],
        tables=[TableUpdate(i, 0, 0, [i]) for i in (1, 2)],
        scheduled=[ScheduledRow(1, 0, 1, 1), ScheduledRow(2, 0, 1, 1)],
    )

    def decode(step: int) -> SchedulerOutput:
        scheduled = [ScheduledRow(1, step, 1, 1), ScheduledRow(2, step, 1, 1)]
        return SchedulerOutput(step, appended=[Appended(i, [i + step]) for i in (1, 2)], scheduled=scheduled)

    with make(name, "flat", depth, wire) as executor:
        executor.submit(rows)
        results = [executor.collect()] if depth == 1 else []
        executor.spoil()  # with depth 2 while another one is in flight
        executor.submit(decode(1))
        results += [executor.collect() for _ in range(depth)]
        results += run(executor, [decode(2)])
    errors = [[e.seq_id for e in r.errors] for r in results]
    assert errors == [[], [1], []]
    assert [[s.seq_id for s in r.sampled] for r in results] == [[1, 2], [2], [1, 2]]


@every
def test_a_rank_counts_where_it_is_told_to(name: str, depth: int, wire: bool) -> None:
    with closing(BlackBox.create()) as box, make(name, "recorder", depth, wire, box=box):
        assert box.signs[1] >= 41


def test_a_rank_elsewhere_shows_that_it_is_being_built() -> None:
    with closing(BlackBox.create()) as box, make("multiproc", "busy", 1, True, box=box):
        assert box.signs[1] > 41, "a second of a processor's time is no sign of life"
    with closing(BlackBox.create()) as box, make("multiproc", "lazy", 1, True, box=box):
        assert 41 <= box.signs[1] <= 43, "it slept, after it had been imported"


@every
def test_loading_is_heard_of(name: str, depth: int, wire: bool) -> None:
    heard: list[tuple[int, int]] = []
    with make(name, "recorder", depth, wire, loading=lambda *n: heard.append(n)):
        assert heard == [(3, 4)]


def test_a_simulated_device_has_no_grammars_and_no_logits() -> None:
    executor = SimExecutor(None, VirtualClock(), vocab_size=4)  # type: ignore[arg-type]
    assert isinstance(executor, Executor)
    assert executor.holds("anything")
    executor.prepare("anything")
    executor.back([1])
    executor.check()
    assert not executor.processes
    with pytest.raises(UnsupportedError, match="no logits"):
        executor.spoil()


# -- ends ------------------------------------------------------------------------------------------------------------


@every
def test_what_keeps_a_rank_from_being_built_keeps_its_class(name: str, depth: int, wire: bool) -> None:
    before = num_fds()
    with pytest.raises(CapacityError, match="it is too small") as caught, make(name, "fails", depth, wire):
        pass
    assert caught.value.field == "block_size"
    assert num_fds() == before


def test_a_rank_that_dies_while_it_is_built_is_reported() -> None:
    before = num_fds()
    with pytest.raises(RankGoneError, match="SIGKILL"):
        make("multiproc", "dies", 1, True)
    assert num_fds() == before


@every
def test_an_exception_in_a_step_is_said(name: str, depth: int, wire: bool) -> None:
    with make(name, "breaks", depth, wire) as executor, pytest.raises((ValueError, EngineError), match="out of order"):
        run(executor, [full_step(i) for i in range(4)])


@every
def test_closing_with_steps_in_flight_leaves_nothing(name: str, depth: int, wire: bool) -> None:
    before = num_fds()
    with make(name, "recorder", depth, wire) as executor:
        executor.prepare("starts a thread")
        pids = executor.processes
        assert len(pids) == (name == "multiproc")
        executor.check()
        for step in range(depth):
            executor.submit(full_step(step, page_ops=lasting(60_000)))
        began = time.monotonic()
    assert time.monotonic() - began < 30, "it waits for the step"
    assert all(is_gone(pid) for pid in pids), "a process is left, perhaps as a zombie"
    assert num_fds() == before
    executor.check()


def test_an_executor_that_is_forgotten_ends_its_rank() -> None:
    executor = MultiprocExecutor(spec_of("recorder"), command=ranks.COMMAND)
    (pid,) = executor.processes
    del executor
    gc.collect()
    assert is_gone(pid)


def until_it_raises(f: Callable[[], object]) -> None:
    for _ in range(1000):
        f()
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("when", ["idle", "in a step", "in a grammar"])
def test_a_rank_that_dies_is_reported(number: signal.Signals, when: str) -> None:
    with make("multiproc", "recorder", 2, True) as executor:
        (pid,) = executor.processes
        executor.prepare("once")
        if when == "in a step":
            executor.submit(full_step(0, page_ops=lasting(60_000)))
            threading.Timer(0.1, os.kill, (pid, number)).start()
        else:
            os.kill(pid, number)
        if when == "in a grammar":
            with pytest.raises(RankGoneError):
                until_it_raises(lambda: executor.prepare("again"))
        ask = executor.collect if when == "in a step" else executor.check
        with pytest.raises(RankGoneError, match=number.name) as caught:
            until_it_raises(ask)
        assert caught.value.killed == (number == signal.SIGKILL)
        with pytest.raises(RankGoneError, match=number.name):
            executor.submit(full_step(1))
        with pytest.raises(RankGoneError):
            executor.prepare("later")
    assert is_gone(pid)


PARENT = """
import sys, time
sys.path[0] = {root!r}
from tests.conformance.test_executor import full_step, lasting, make
executor = make("multiproc", "recorder", 2, True).thing
executor.submit(full_step(0, page_ops=lasting(60_000)))
print(executor.processes[0], flush=True)
{last}
"""


@contextmanager
def parent(last: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process with a rank that is in a step, and the rank's."""
    code = PARENT.format(root=str(Path(__file__).parents[2]), last=last)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("last", ["time.sleep(60)", "", "raise SystemExit(3)"])
def test_a_rank_ends_with_its_engine(last: str) -> None:
    with parent(last) as (process, pid):
        if "sleep" in last:
            process.kill()
        process.wait(10)
        began = time.monotonic()
        while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() - began < 30, "the rank lives on"
            time.sleep(0.01)


def test_a_rank_outlives_the_thread_that_made_it() -> None:
    """Only the main thread is known to live as long as the engine."""
    made: list[MultiprocExecutor] = []
    thread = threading.Thread(target=lambda: made.append(MultiprocExecutor(spec_of("recorder"), command=ranks.COMMAND)))
    thread.start()
    thread.join()
    with closing(made[0]) as executor:
        time.sleep(0.1)
        executor.check()
        assert [r.step for r in run(executor, [full_step(0)])] == [0]


def test_weights_in_memory_are_refused() -> None:
    spec = RankSpec(config={"model": "(test)"}, plan=PLAN)
    with pytest.raises(ConfigError, match="use executor inproc, or a model on disk") as caught:
        MultiprocExecutor(spec)
    assert caught.value.field == "executor"


def test_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "identity", lambda *_: "0.0-of-another-build")
    with pytest.raises(EngineError, match="another build"):
        make("multiproc", "recorder", 1, True)


def test_a_description_survives_the_wire() -> None:
    import msgspec

    spec = spec_of("recorder")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=RankSpec) == spec
