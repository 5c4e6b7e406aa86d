"""Black box, frames, faults and the loop, without a process."""

from __future__ import annotations

import os
import threading
import time

import pytest

from penstock.base.errors import ConfigError, EngineError
from penstock.core.messages import Hello, Outputs, Send
from penstock.core.request import Abort, Control
from penstock.engine import wire
from penstock.engine.blackbox import MAX_HANDLES, BlackBox, handle_of
from penstock.engine.faults import Faults, parse
from penstock.engine.loop import EngineLoop
from tests.engine.harness import Knobs, fake_engine, request


def test_the_box_says_what_was_being_done() -> None:
    box = BlackBox.create()
    assert box.fd is not None
    writer = BlackBox.attach(os.dup(box.fd))
    assert box.age_s() == 0.0
    writer.beat(True)
    writer.working_on([handle_of("a"), handle_of("b")])
    assert box.busy
    assert box.suspects() == (handle_of("a"), handle_of("b"))
    time.sleep(0.02)
    assert 0.02 <= box.age_s() < 1.0
    writer.beat(False)
    writer.done()
    assert (box.age_s() < 0.02, box.busy, box.suspects(), box.num_steps) == (True, False, (), 1)
    writer.working_on(range(MAX_HANDLES + 9))
    assert len(box.suspects()) == MAX_HANDLES
    writer.close()
    box.close()
    box.close()


def test_frames_survive_every_way_of_cutting_them() -> None:
    messages = [Send([Abort(request_id="a")]), Hello("s", 3, {"model": "x"}), Send([request([5, 6], request_id="b")])]
    data = b"".join(wire.frame(m) for m in messages)
    for size in range(1, len(data) + 1):
        splitter = wire.Splitter()
        frames = [f for i in range(0, len(data), size) for f in splitter.feed(data[i : i + size])]
        assert [wire.to_engine.decode(f) for f in frames] == messages
    with pytest.raises(EngineError, match="broken"):
        wire.Splitter().feed(b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "text", ["", "step", "step:kill", "step:kill:x", "step:kill:0", "stop:kill:1", "load:nan:1", "step:kill:+"]
)
def test_a_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="fault"):
        parse(text)


def happened(faults: Faults, site: str, times: int, **kw: object) -> list[int]:
    """At which of so many visits an exception came."""
    out = []
    for visit in range(1, times + 1):
        try:
            faults.at(site, **kw)  # type: ignore[arg-type]
        except RuntimeError:
            out.append(visit)
    return out


def test_when_faults_are_due() -> None:
    assert happened(Faults.of(["step:exception:3"]), "step", 9) == [3]
    assert happened(Faults.of(["step:exception:3"], epoch=1), "step", 9) == []
    assert happened(Faults.of(["step:exception:3+"], epoch=1), "step", 9) == [3, 6, 9]
    assert happened(Faults.of(["step:exception:3"]), "intake", 9) == []
    assert happened(Faults.of(["load:exception:2"], epoch=0), "load", 1) == []
    assert happened(Faults.of(["load:exception:2"], epoch=1), "load", 1) == [1]


class Looped:
    """A loop in a thread; `outputs` grows."""

    def __init__(self, faults: Faults | None = None, knobs: Knobs | None = None) -> None:
        self.core, _ = fake_engine(knobs or Knobs())
        self.messages: list[Outputs] = []
        self.news = threading.Condition()
        self.box = BlackBox()
        self.loop = EngineLoop(self.core, self._emit, self.box, epoch=7, memory=lambda: {"kv": 5}, faults=faults)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def _emit(self, message: Outputs) -> None:
        with self.news:
            self.messages.append(message)
            self.news.notify()

    def wait_for_end(self, *ids: str) -> None:
        def ended() -> bool:
            return set(ids) <= {o.request_id for m in self.messages for o in m.outputs if o.finish_reason}

        with self.news:
            assert self.news.wait_for(ended, 10)

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_what_the_core_refuses_is_answered_and_the_loop_goes_on() -> None:
    looped = Looped()
    looped.loop.send([request([5, 6], request_id="a", max_tokens=200, eos=[]), Control(kind="nonsense")])
    looped.loop.send([request([5, 6], request_id="a"), Abort(request_id="nobody")])
    looped.wait_for_end("a")
    looped.loop.send([Abort(request_id="a"), request([5, 7], request_id="b", max_tokens=3)])
    looped.wait_for_end("b")
    looped.close()
    assert looped.error is None
    errors = [o.error for m in looped.messages for o in m.outputs if o.error]
    assert len(errors) == 1
    assert "in use" in errors[0]
    assert {m.epoch for m in looped.messages} == {7}
    last = [m.snapshot for m in looped.messages if m.snapshot is not None][-1]
    assert last.num_running == 0
    assert last.memory_bytes == {"kv": 5}


@pytest.mark.parametrize(("site", "nth", "guilty"), [("step", 2, {"a", "b"}), ("intake", 2, {"b"})])
def test_the_box_names_those_in_the_step_that_broke(site: str, nth: int, guilty: set[str]) -> None:
    looped = Looped(Faults.of([f"{site}:exception:{nth}"]), Knobs(depth=2))
    looped.loop.send([request([5, 6], request_id="a", max_tokens=9), request([7, 8], request_id="b", max_tokens=9)])
    looped.thread.join(10)
    assert isinstance(looped.error, RuntimeError)
    assert set(looped.box.suspects()) == {handle_of(i) for i in guilty}


def test_a_loop_that_has_nothing_to_do_sleeps_and_beats() -> None:
    looped = Looped()
    began = time.process_time()
    ages = []
    for _ in range(20):
        time.sleep(0.03)
        ages.append(looped.box.age_s())
    assert max(ages) < 0.75
    assert max(ages) > min(ages) + 0.1
    assert time.process_time() - began < 0.3
    looped.close()
