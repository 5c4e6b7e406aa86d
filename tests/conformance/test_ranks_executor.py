"""Several ranks behind one executor: what one of them does not do as the others is an error, and the end of all."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing

import pytest
from msgspec.structs import replace

from penstock.base.errors import CapacityError, EngineError, RankGoneError, UnsupportedError
from penstock.core.batch import StepOutput
from penstock.engine.blackbox import BlackBox
from penstock.executor.ranks import Moves, RanksExecutor
from tests import ranks
from tests.conformance.test_executor import full_step, lasting, run, spec_of, until_it_raises
from tests.engine.processes import is_gone, num_fds
from tests.ranks import Recorder

SIZE = 3


def make(model: str, **more: object) -> closing[RanksExecutor]:
    spec = spec_of(model)
    spec = replace(spec, config=spec.config | {"tensor_parallel_size": SIZE})
    return closing(RanksExecutor(spec, command=ranks.COMMAND, **more))  # type: ignore[arg-type]


def test_every_rank_is_given_every_step_and_one_answer_comes() -> None:
    with make("recorder") as executor:
        results = run(executor, [full_step(i) for i in range(4)])
        assert len(set(executor.processes)) == SIZE
    rank = Recorder()
    assert results == [rank.execute(full_step(i)) for i in range(4)]


def test_ranks_that_differ_are_an_error_and_not_two_opinions() -> None:
    before = num_fds()
    with make("last:odd") as executor:
        pids = executor.processes
        with pytest.raises(EngineError, match="ranks 0 and 2 differ at step 0: sampled"):
            run(executor, [full_step(0)])
        assert all(map(is_gone, pids))
    assert num_fds() == before


@pytest.mark.parametrize(("kind", "error", "words"), [
    ("fails", CapacityError, "it is too small"), ("dies", RankGoneError, "SIGKILL"),
])  # fmt: skip
def test_one_rank_that_cannot_be_built_is_the_end_of_all(kind: str, error: type[Exception], words: str) -> None:
    before = num_fds()
    with pytest.raises(error, match=words):
        make(f"last:{kind}")
    assert num_fds() == before


def test_an_exception_of_one_rank_ends_all() -> None:
    with make("last:breaks") as executor:
        pids = executor.processes
        with pytest.raises(EngineError, match="out of order"):
            run(executor, [full_step(i) for i in range(3)])
        assert all(map(is_gone, pids))


@pytest.mark.parametrize("which", range(SIZE))
@pytest.mark.parametrize("when", ["idle", "in a step"])
def test_whichever_rank_dies_nobody_waits_for_it(which: int, when: str) -> None:
    with make("recorder") as executor:
        pids = executor.processes
        if when == "in a step":
            executor.submit(full_step(0, page_ops=lasting(60_000)))
            threading.Timer(0.1, os.kill, (pids[which], signal.SIGKILL)).start()
            with pytest.raises(RankGoneError, match="SIGKILL"):
                executor.collect()
        else:
            os.kill(pids[which], signal.SIGKILL)
            with pytest.raises(RankGoneError, match="SIGKILL"):
                until_it_raises(executor.check)
            executor.close()
        assert all(map(is_gone, pids))


def test_grammars_and_memory_reach_all_of_them() -> None:
    with make("recorder") as executor:
        executor.back([4])
        executor.prepare("g")
        (first,) = run(executor, [full_step(0)])
    rank = Recorder()
    rank.back([4])
    assert first == rank.execute(full_step(0))


def test_the_lead_counts_and_weights_of_several_are_not_swapped() -> None:
    with closing(BlackBox.create()) as box, make("recorder", box=box) as executor:
        assert box.signs[1] >= 41
        with pytest.raises(UnsupportedError, match="cannot be swapped"):
            executor.ready_weights("elsewhere")


def test_a_load_has_ended_when_it_has_on_all_ranks_and_was_good_if_it_was_on_all() -> None:
    """Each reads at its own pace; the steps in which they tell it need not be the same."""
    moves = Moves(2)
    steps = [({1: True, 2: True}, {2: True}), ({}, {3: False}), ({3: True}, {1: True}), ({4: True}, {4: False})]
    told = [moves.ended([StepOutput(i, moves=move) for move in both]) for i, both in enumerate(steps)]
    assert told == [{2: True}, {}, {1: True, 3: False}, {4: False}]
