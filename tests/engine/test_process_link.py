"""The engine as a supervised child: real processes, real signals."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.base.errors import CapacityError, ConfigError, EngineError, EngineGoneError, ModelError
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams, TokenRules
from penstock.engine import wire
from penstock.engine.frontend import GUILTY
from penstock.engine.process_link import ProcessLink
from penstock.engine.spawn import COMMAND, spawn
from tests.engine.processes import assert_num_fds, is_gone, nano, num_fds, running, within

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MARKER = 4000
"""A token that no prompt here has by chance."""


def params(i: int) -> SamplingParams:
    """One of several ways to sample; long enough to be killed in the middle."""
    length = {"max_tokens": 30 + i, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **length),
        SamplingParams(seed=i, **length),
        SamplingParams(temperature=0.8, top_p=0.9, **length),
        SamplingParams(n=3, seed=i, max_tokens=25, logprobs=2, stop=["zq", " the"], min_tokens=15),
        SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.3, logprobs=1, **length),
        SamplingParams(temperature=1.2, prompt_logprobs=1, min_tokens=20, max_tokens=40),
    ][i % 6]


@within(120)
async def test_twenty_streams_survive_kills_unchanged() -> None:
    """Row 55."""
    prompts = [f"Once upon a time there was a number {i} that" for i in range(20)]
    async with running(max_restarts_per_minute=50) as engine:
        client = engine.client
        calm = await asyncio.gather(*(engine.complete(f"calm{i}", prompts[i], params(i)) for i in range(20)))
        streams = [engine.submit(f"wild{i}", prompts[i], params(i)) for i in range(20)]
        wild = [asyncio.create_task(stream.result()) for stream in streams]
        pids = []
        for goal in (1, 9, 20):
            while client.state != "ready" or len(streams[0].output.outputs[0].token_ids) < goal:
                await asyncio.sleep(0.005)
            pids.append(engine.signal())
            await engine.until(lambda: client.state == "restarting")
            assert not client.ready()[0]
        outputs = await asyncio.gather(*wild)
        for i, (a, b) in enumerate(zip(calm, outputs, strict=True)):
            assert b.error is None
            assert a.outputs == b.outputs, f"stream {i} differs"
            assert a.prompt_logprobs == b.prompt_logprobs
        assert client.num_restarts == 3
        assert len(set(pids)) == 3
        assert all(is_gone(pid) for pid in pids), "a zombie"
        assert client.ready() == (True, "")
        print("restarts took", [f"{s * 1000:.0f} ms" for s in engine.link.restart_s])


@within(60)
async def test_a_stopped_engine_is_not_ready_and_recovers(capfd: pytest.CaptureFixture[str]) -> None:
    """Row 56, with 5 s in place of 60."""
    stop_s = 5.0
    async with running() as engine:
        client = engine.client
        calm = await engine.complete("calm", "The sea", params(1))
        stream = engine.submit("wild", "The sea", params(1))
        await engine.until(lambda: bool(stream.output.outputs[0].token_ids))
        assert client.ready() == (True, "")
        pid = engine.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await engine.until(lambda: not client.ready()[0], 5.0)
        assert time.monotonic() - stopped < 5.0
        assert "has not moved" in client.ready()[1]
        await asyncio.sleep(stopped + stop_s - time.monotonic())
        engine.signal(signal.SIGCONT)
        assert (await stream.result()).outputs == calm.outputs
        assert client.ready() == (True, "")
        assert engine.link.pid == pid, "it was replaced"
        await asyncio.sleep(0.6)  # the watchdog's turn, twice
        written = capfd.readouterr().err
        assert written.count("its stacks") == 1, written
        assert "loop.py" in written


@within(60)
async def test_an_idle_engine_shows_that_it_lives() -> None:
    async with running() as engine:
        ages = []
        for _ in range(30):
            await asyncio.sleep(0.03)
            ages.append(engine.link.progress_age_s())
        assert max(ages) < 0.5 + 0.25  # a beat every 0.25 s, on a busy machine
        assert len({round(age, 2) for age in ages}) > 5, "nobody counts"
        ticks = _cpu_ticks(engine.link.pid)
        await asyncio.sleep(0.6)
        assert _cpu_ticks(engine.link.pid) - ticks <= 10, "it spins"


def _cpu_ticks(pid: int | None) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@within(60)
async def test_a_stuck_step_writes_its_stacks_and_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    async with running(faults=["step:hang:9"], stall_s=0.1, hang_s=1.5) as engine:
        first = engine.link.pid
        out = await engine.complete("a", "The sea", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        assert len(out.outputs[0].token_ids) == 20
        assert engine.client.num_restarts == 1
        assert engine.link.pid != first
        written = capfd.readouterr().err
        assert written.count("has been in one step") == 1, written
        assert "faults.py" in written


@pytest.mark.parametrize("kind", ["kill", "exception"])
@within(60)
async def test_a_step_that_fails_costs_nobody_anything(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with running(faults=[f"step:{kind}:7"]) as engine:
        client = engine.client
        reasons = []
        on_down = client.replicas[0].on_down
        client.replicas[0].on_down = lambda down: (reasons.append(down.reason), on_down(down))[1]  # type: ignore[method-assign]
        first = await engine.complete("a", "The sea", params(1))
        again = await engine.complete("b", "The sea", params(1))
        assert first.error is None
        assert first.outputs == again.outputs
        assert client.num_restarts == 1
        written = capfd.readouterr().err
        if kind == "exception":
            assert "injected fault" in written
            assert "traceback" in reasons[0]
        else:
            assert "SIGKILL" in reasons[0]


@within(60)
async def test_poison_ends_its_own_request_only() -> None:
    async with running(faults=[f"step:poison:{MARKER}"]) as engine:
        client = engine.client
        calm = await asyncio.gather(*(engine.complete(f"c{i}", f"The {i}", params(i)) for i in range(4)))
        streams = [engine.submit(f"w{i}", f"The {i}", params(i)) for i in range(4)]
        wild = [asyncio.create_task(stream.result()) for stream in streams]
        await engine.until(lambda: all(stream.output.outputs[0].token_ids for stream in streams))
        with pytest.raises(EngineError) as told:
            await engine.complete("poison", [5, MARKER, 7], params(0))
        assert str(told.value) == GUILTY
        assert not isinstance(told.value, EngineGoneError)
        for a, b in zip(calm, await asyncio.gather(*wild), strict=True):
            assert b.error is None
            assert a.outputs == b.outputs
        assert client.num_restarts == 2
        assert client.ready() == (True, "")


@within(60)
async def test_too_many_crashes_end_all_with_a_retryable_error() -> None:
    async with running(faults=["step:kill:3+"], max_restarts_per_minute=2) as engine:
        client = engine.client
        results = await asyncio.gather(
            *(engine.complete(f"r{i}", "The sea", params(0)) for i in range(3)), return_exceptions=True
        )
        assert client.state == "failed"
        assert all(isinstance(r, EngineError) for r in results)
        assert any(isinstance(r, EngineGoneError) for r in results)
        assert engine.link.pid is None
        assert not client.ready()[0]
        with pytest.raises(EngineGoneError):
            engine.submit("late", "The sea", params(0))


@within(60)
async def test_an_engine_that_cannot_come_back_is_tried_again() -> None:
    async with running(faults=["load:kill:2", "load:exception:3", "step:kill:5"]) as engine:
        out = await engine.complete("a", "The sea", params(0))
        assert out.error is None
        assert len(engine.link.restart_s) == 1


@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        ({"model": "/nowhere/at/all"}, ModelError, "nowhere"),
        ({"max_model_len": 10**6}, ConfigError, "max_model_len"),
        ({"num_gpu_blocks_override": 10**8}, CapacityError, "smallest|GiB|memory|fit"),
    ],
)
@within(60)
async def test_what_keeps_it_from_starting_keeps_its_class(
    settings: dict[str, object], kind: type[Exception], says: str
) -> None:
    before = num_fds()
    link = ProcessLink(nano(**settings).as_kwargs())
    with pytest.raises(kind, match=says):
        await link.start(None)  # type: ignore[arg-type]
    assert link.pid is None
    await link.close()
    await assert_num_fds(before)


@within(60)
async def test_an_engine_that_dies_while_loading_says_so() -> None:
    link = ProcessLink(nano().as_kwargs(), faults=["load:kill:1"])
    with pytest.raises(EngineError, match="while it was starting"):
        await link.start(None)  # type: ignore[arg-type]


@within(60)
async def test_starting_can_be_called_off() -> None:
    before = num_fds()
    link = ProcessLink(nano().as_kwargs(), faults=["load:hang:1"])
    starting = asyncio.create_task(link.start(None))  # type: ignore[arg-type]
    while link.pid is None:
        await asyncio.sleep(0.01)
    pid = link.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert is_gone(pid)
    await assert_num_fds(before)


@within(60)
async def test_another_build_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "schema", lambda: "9.9.9-abc")
    link = ProcessLink(nano().as_kwargs())
    with pytest.raises(EngineError, match=r"another build of Penstock \(.*\) than the server \(9\.9\.9\)"):
        await link.start(None)  # type: ignore[arg-type]


@within(60)
async def test_closing_leaves_nothing_behind() -> None:
    async with running():
        pass  # imports and caches
    before = num_fds()
    async with running() as engine:
        pid = engine.signal()
        await engine.until(lambda: engine.client.num_restarts == 1 and engine.client.state == "ready")
        second = engine.link.pid
        assert second is not None
        assert is_gone(pid)
        task = asyncio.create_task(engine.complete("a", "The sea", params(0)))
        await engine.until(lambda: engine.client.num_live == 1)
    with pytest.raises(EngineGoneError):
        await task
    assert is_gone(second)
    await assert_num_fds(before)


@within(60)
async def test_a_request_that_the_core_refuses_gets_its_answer() -> None:
    """A second request of the same id must not end the loop, whoever sends it."""
    async with running() as engine:
        await engine.complete("a", "The sea", SamplingParams(max_tokens=2))
        rules = TokenRules()
        bad = Request(request_id="b", prompt_token_ids=[5], rules=rules, max_tokens=50)
        answered = asyncio.Event()
        take = engine.client.replicas[0].on_outputs

        def spy(message):  # type: ignore[no-untyped-def]
            if any(out.error and "in use" in out.error for out in message.outputs):
                answered.set()
            take(message)

        engine.client.replicas[0].on_outputs = spy  # type: ignore[method-assign]
        engine.link.send([bad, bad])
        await answered.wait()
        assert (await engine.complete("c", "The sea", params(0))).error is None
        assert engine.client.num_restarts == 0


@within(60)
async def test_nan_in_one_row_ends_that_request_alone() -> None:
    """Row 59."""
    async with running(faults=["step:nan:12"]) as engine:
        stayers = [asyncio.create_task(engine.complete(f"s{i}", f"The {i}", params(i))) for i in range(3)]
        outputs = await asyncio.gather(*stayers, return_exceptions=True)
        failed = [o for o in outputs if isinstance(o, EngineError)]
        assert len(failed) == 1
        assert "NaN" in str(failed[0])
        for i, out in enumerate(outputs):
            if not isinstance(out, BaseException):
                calm = await engine.complete(f"calm{i}", f"The {i}", params(i))
                assert out.outputs == calm.outputs
        assert engine.client.num_restarts == 0
        await engine.until(lambda: engine.client.snapshot.counters.get("num_errors") == 1.0)


def test_the_child_dies_with_its_parent() -> None:
    """Row 54, orphans: SIGKILL of the server's process while a step hangs, when nobody reads end of file."""
    program = """
import asyncio, sys
from tests.engine.processes import nano, running
from penstock.core.sampling import SamplingParams
async def main():
    async with running(faults=["step:hang:2"]) as engine:
        engine.submit("a", "The sea", SamplingParams(max_tokens=9, ignore_eos=True))
        await engine.until(lambda: engine.link._child.box.num_steps >= 1)
        print(engine.link.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=_root())
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not is_gone(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    killed = time.monotonic()
    while not _dead(child):
        assert time.monotonic() - killed < 5, "an orphan"
        time.sleep(0.01)


def _dead(pid: int) -> bool:
    """Gone, or a zombie that nobody but init can reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_child_ends_at_end_of_file() -> None:
    """The other half: without the kernel's help, the closed socket alone must do."""
    import socket

    from penstock.core.messages import Hello
    from penstock.engine.blackbox import BlackBox

    ours, theirs = socket.socketpair()
    box = BlackBox.create()
    assert box.fd is not None
    child = subprocess.Popen(
        [*COMMAND, str(theirs.fileno()), str(box.fd)], pass_fds=(theirs.fileno(), box.fd), stdin=subprocess.DEVNULL
    )
    theirs.close()
    ours.sendall(wire.frame(Hello(wire.schema(), 0, nano().as_kwargs())))
    while b"Ready" not in (said := wire.read_frame(ours) or b""):
        assert said
    ours.close()
    assert child.wait(10) == 0
    box.close()


def _root() -> Path:
    return Path(__file__).resolve().parents[2]


@within(60)
async def test_a_child_that_was_spawned_ahead_becomes_the_engine() -> None:
    before, spare = num_fds(), spawn()
    async with running(spare=spare) as engine:
        assert engine.link.pid == spare.process.pid
        output = await engine.complete("r", "Once upon a time", params(0))
        assert output.error is None
    assert is_gone(spare.process.pid)
    await assert_num_fds(before)


@within(30)
async def test_a_child_that_nobody_needs_leaves_nothing() -> None:
    before = num_fds()
    dropped, closed, orphan = spawn(), spawn(), spawn()
    dropped.drop()
    link = ProcessLink({}, spare=closed)
    await link.close()
    await link.close()
    orphan.sock.close()  # as the end of its server would
    assert orphan.process.wait(20) == 0
    orphan.box.close()
    assert all(is_gone(child.process.pid) for child in (dropped, closed, orphan))
    await assert_num_fds(before)
