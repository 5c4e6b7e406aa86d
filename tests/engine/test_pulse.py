"""What counts as silence: only time in which the engine could have moved."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.base.errors import RefusedError
from penstock.engine.blackbox import BlackBox
from penstock.engine.pulse import Pulse
from tests.engine.processes import running, within
from tests.engine.test_process_link import params

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


class At:
    """A clock for `Pulse`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.s = time.monotonic()
        monkeypatch.setattr("penstock.engine.pulse.time.monotonic", lambda: self.s)


def test_silence_adds_up_and_any_sign_ends_it(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, box = At(monkeypatch), BlackBox()
    box.beat(True)
    pulse = Pulse(box, sleeper.pid, 1.0)
    pulse.look()
    for i in range(1, 6):
        at.s += 1
        assert pulse.look() == pytest.approx(i, abs=0.2)
    box.progress()
    assert pulse.look() == 0
    at.s += 1
    assert pulse.look() == pytest.approx(1, abs=0.2)
    box.beat(True)
    assert pulse.look() == 0


def test_a_machine_that_slept_was_not_silent(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks slept too: an hour between two looks is a moment."""
    at, box = At(monkeypatch), BlackBox()
    box.beat(True)
    pulse = Pulse(box, sleeper.pid, 1.0)
    pulse.look()
    at.s += 3600
    assert pulse.look() <= 2.0


def test_a_stopped_process_is_not_silent(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    at, box = At(monkeypatch), BlackBox()
    box.beat(True)
    pulse = Pulse(box, sleeper.pid, 1.0)
    pulse.look()
    os.kill(sleeper.pid, signal.SIGSTOP)
    while not pulse.is_stopped():
        pass
    for _ in range(100):
        at.s += 1
        assert pulse.look() == 0
    os.kill(sleeper.pid, signal.SIGCONT)
    while pulse.is_stopped():
        pass
    at.s += 1
    assert pulse.look() == pytest.approx(1, abs=0.2)


def test_time_spent_waiting_for_a_processor_does_not_count(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, box, waited = At(monkeypatch), BlackBox(), 5.0
    box.beat(True)
    pulse = Pulse(box, sleeper.pid, 1.0)
    monkeypatch.setattr(Pulse, "_read_waited_s", lambda self: waited)
    pulse.look()
    for _ in range(50):
        at.s, waited = at.s + 1, waited + 0.9
        pulse.look()
    assert pulse.silent_s == pytest.approx(5.0)


def test_while_it_loads_its_rank_may_count_for_it(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    at, box = At(monkeypatch), BlackBox()
    pulse = Pulse(box, sleeper.pid, 1.0)
    for second in range(6):
        pulse.look()
        at.s += 1
        if second % 2:
            box.progress()
            assert pulse.look() == 0
    at.s += 1
    pulse.look()
    assert pulse.silent_s > 0.5


def test_while_it_loads_processor_time_is_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    at, box = At(monkeypatch), BlackBox()
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as busy:
        pulse = Pulse(box, busy.pid, 1.0)
        ticks = pulse._read_signs()
        while pulse._read_signs() == ticks:
            pass
        pulse.look()
        ticks = pulse._read_signs()
        while pulse._read_signs() == ticks:
            pass
        at.s += 1
        assert pulse.look() == 0
        busy.kill()


def test_ready_goes_by_the_same_signs(sleeper: subprocess.Popen[bytes]) -> None:
    box = BlackBox()
    pulse = Pulse(box, sleeper.pid, 1.0)
    assert pulse.age_s() == 0, "it is being loaded"
    box.beat(True)
    box._words[0] -= 10**10  # ten seconds ago
    assert pulse.age_s() > 9
    box.progress()
    assert pulse.age_s() < 1


@pytest.mark.parametrize("ops", ["ref", "native"])
def test_models_count_their_operations(ops: str) -> None:
    from penstock import LLM, SamplingParams
    from penstock.launch.bundled import bundled_model

    llm = LLM(str(bundled_model("nano")), ops=ops, max_model_len=64, num_gpu_blocks_override=16, threads=2)
    word = np.zeros(1, np.uint64)
    llm.engine.core.executor.runner.watch(word.ctypes.data)  # type: ignore[attr-defined]
    llm.generate(["Once"], SamplingParams(temperature=0, max_tokens=1))
    first = int(word[0])
    assert first > len(llm.engine.spec.layers), "not even one for each layer"
    llm.generate(["Once upon a time there was"], SamplingParams(temperature=0, max_tokens=1))
    assert int(word[0]) > first


def test_the_box_has_room_for_the_count() -> None:
    box = BlackBox.create()
    address = box.progress_address
    ctypes.c_uint64.from_address(address).value += 41
    box.progress()
    assert box.signs == (0, 42)
    box.close()


@within(60)
async def test_a_slow_step_that_moves_is_not_replaced() -> None:
    """Five seconds in one step, with a limit of two."""
    async with running(faults=["step:slow:7"], hang_s=2.0) as engine:
        first = engine.link.pid
        stream = asyncio.create_task(engine.complete("a", "The sea", params(1)))
        ready = []
        while not stream.done():
            ready.append(engine.client.ready()[0])
            await asyncio.sleep(0.05)
        assert (await stream).error is None
        assert all(ready)
        assert engine.link.pid == first


@within(60)
async def test_streams_go_on_after_a_hung_step_with_the_same_tokens() -> None:
    async with running(faults=["step:hang:12"], hang_s=2.0) as engine:
        prompts = [f"Once upon a time there was a number {i} that" for i in range(4)]
        wild = await asyncio.gather(*(engine.complete(f"w{i}", prompts[i], params(i)) for i in range(4)))
        assert engine.client.num_restarts == 1
        calm = await asyncio.gather(*(engine.complete(f"c{i}", prompts[i], params(i)) for i in range(4)))
        assert [(o.outputs, o.prompt_logprobs) for o in wild] == [(o.outputs, o.prompt_logprobs) for o in calm]
        assert engine.client.convictions.num_convicted == 0


@within(90)
async def test_who_hangs_an_engine_and_leaves_is_found_out() -> None:
    """Its client has less patience than the watchdog: still it comes back only once."""
    prompt = [5, 4000, 7]
    async with running(faults=["step:poison-hang:4000"], hang_s=2.0) as engine:
        calm = await engine.complete("calm", "The sea", params(1))
        stream = engine.submit("wild", "The sea", params(1))
        await engine.until(lambda: bool(stream.output.outputs[0].token_ids))
        poison = engine.submit("poison", prompt, params(0))
        await engine.until(lambda: engine.link.progress_age_s() > 0.5)
        poison.abort("timeout")
        assert (await stream.result()).outputs == calm.outputs
        assert engine.client.convictions.num_convicted == 1
        assert engine.client.num_restarts == 2
        with pytest.raises(RefusedError):
            engine.submit("again", prompt, params(0))


@within(60)
async def test_an_engine_that_hangs_while_it_is_loaded_again_is_replaced() -> None:
    async with running(faults=["load:hang:2", "step:kill:5"], hang_s=2.0) as engine:
        assert (await engine.complete("a", "The sea", params(0))).error is None
        assert engine.client.num_restarts == 1
