"""An engine process whose rank lives in a third one: real processes, real signals."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.base.clock import MonotonicClock
from penstock.base.errors import EngineError
from penstock.config import EngineConfig
from penstock.core.sampling import SamplingParams, StructuredOutputs
from penstock.engine.frontend import EngineClient
from penstock.engine.link import Down
from penstock.engine.thread_link import ThreadLink
from penstock.launch.build import local_engine
from penstock.launch.front import open_front
from tests.engine.processes import Running, assert_num_fds, is_gone, nano, num_fds, running, within
from tests.engine.test_process_link import params

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def apart(**settings: Any) -> EngineConfig:
    return nano(executor="multiproc", depth=2, **settings)


def rank_of(engine: Running) -> int:
    """The process of the rank, the engine's only child."""
    pid = engine.link.pid
    (rank,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(rank)


def ended(pid: int) -> bool:
    """Gone, or a zombie of whoever inherits orphans."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def watch_deaths(engine: Running) -> list[Down]:
    deaths: list[Down] = []
    on_down = engine.client.replicas[0].on_down
    engine.client.replicas[0].on_down = lambda down: (deaths.append(down), on_down(down))[1]  # type: ignore[method-assign]
    return deaths


@within(120)
async def test_streams_survive_kills_of_either_process_unchanged() -> None:
    prompts = [f"Once upon a time there was a number {i} that" for i in range(6)]
    gc.collect()  # engines of other tests, whose sockets would go meanwhile
    before = num_fds()
    async with running(apart(), max_restarts_per_minute=50) as engine:
        client = engine.client
        calm = await asyncio.gather(*(engine.complete(f"calm{i}", prompts[i], params(i)) for i in range(6)))
        streams = [engine.submit(f"wild{i}", prompts[i], params(i)) for i in range(6)]
        wild = [asyncio.create_task(stream.result()) for stream in streams]
        deaths, pids = watch_deaths(engine), []
        for goal, whom in ((1, "rank"), (9, "engine"), (20, "rank")):
            # One that has only just been begun again works on nobody yet, so nobody would be suspected.
            least = max(goal, len(streams[0].output.outputs[0].token_ids) + 1)
            await engine.until(
                lambda least=least: client.state == "ready" and len(streams[0].output.outputs[0].token_ids) >= least
            )
            pids.append((rank_of(engine), engine.link.pid))
            os.kill(pids[-1][whom == "engine"], signal.SIGKILL)
            await engine.until(lambda: client.state == "restarting")
        outputs = await asyncio.gather(*wild)
        for i, (a, b) in enumerate(zip(calm, outputs, strict=True)):
            assert b.error is None
            assert a.outputs == b.outputs, f"stream {i} differs"
            assert a.prompt_logprobs == b.prompt_logprobs
        assert client.num_restarts == 3
        assert all(down.from_outside for down in deaths), "no request is to blame for a SIGKILL"
        assert any(down.suspects for down in deaths), "killed between two steps it worked on nobody, but three times?"
        for rank, pid in pids:
            assert is_gone(pid), "a zombie"
            await engine.until(lambda rank=rank: ended(rank))
        pids.append((rank_of(engine), engine.link.pid))
    assert is_gone(pids[-1][1])
    for _ in range(200):
        if ended(pids[-1][0]):
            break
        await asyncio.sleep(0.01)
    assert ended(pids[-1][0]), "the rank outlives its engine"
    await assert_num_fds(before)


@within(60)
async def test_a_rank_that_crashes_is_its_requests_fault_and_one_that_dies_idle_is_noticed() -> None:
    async with running(apart(), max_restarts_per_minute=50) as engine:
        deaths = watch_deaths(engine)
        stream = engine.submit("a", "The sea", params(1))
        await engine.until(lambda: bool(stream.output.outputs[0].token_ids))
        os.kill(rank_of(engine), signal.SIGSEGV)
        assert (await stream.result()).error is None
        assert [(down.from_outside, len(down.suspects)) for down in deaths] == [(False, 1)]
        await engine.until(lambda: engine.client.state == "ready")
        os.kill(rank_of(engine), signal.SIGKILL)
        await engine.until(lambda: len(deaths) == 2, 10)  # nobody has asked for anything
        assert not deaths[1].suspects
        await engine.until(lambda: engine.client.state == "ready")


@within(60)
async def test_a_rank_that_dies_of_a_grammar_leaves_the_name_of_its_request() -> None:
    async with running(apart(), max_restarts_per_minute=50) as engine:
        deaths = watch_deaths(engine)
        await engine.complete("warm", "The sea", SamplingParams(max_tokens=2))
        os.kill(rank_of(engine), signal.SIGSTOP)  # it does not compile anything now
        slow = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(choice=["a", "b"]))
        stream = engine.submit("slow", "The sea", slow)
        await asyncio.sleep(0.3)
        os.kill(rank_of(engine), signal.SIGSEGV)
        os.kill(rank_of(engine), signal.SIGCONT)
        out = await stream.result()
        assert out.outputs[0].text in ("a", "b")
        assert [len(down.suspects) for down in deaths] == [1]


@within(60)
async def test_nan_in_one_row_ends_that_request_alone() -> None:
    async with running(apart(), faults=["step:nan:6"]) as engine:
        sampled = [SamplingParams(seed=i, max_tokens=20) for i in range(3)]
        tasks = (engine.complete(f"s{i}", "The sea", sampled[i]) for i in range(3))
        outputs = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [str(out) for out in outputs if isinstance(out, EngineError)]
        assert len(failed) == 1
        assert "NaN" in failed[0]
        assert engine.client.num_restarts == 0


@within(60)
async def test_a_stuck_rank_writes_its_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    async with running(apart(), stall_s=0.1, hang_s=30) as engine:
        stream = engine.submit("a", "The sea", params(1))
        await engine.until(lambda: bool(stream.output.outputs[0].token_ids))
        rank = rank_of(engine)
        os.kill(rank, signal.SIGSTOP)
        await asyncio.sleep(1.5)  # five times the stall, and the watchdog's turn
        os.kill(rank, signal.SIGCONT)
        assert (await stream.result()).error is None
        written = capfd.readouterr().err
        assert "has been in one step" in written
        assert "multiproc.py" in written
        assert "worker.py" in written, "only the engine's"
        assert engine.client.num_restarts == 0


@within(60)
async def test_the_rank_counts_as_a_part_of_the_engine() -> None:
    """Its operations are progress, its memory is the engine's, its grammars are counted."""
    async with running(apart()) as engine:
        child = engine.link._child
        assert child is not None
        first = child.box.signs[1]
        grammar = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(choice=["a", "b"]))
        for i in range(2):
            await engine.complete(f"g{i}", "The sea", grammar)
        assert child.box.signs[1] > first
        await engine.until(lambda: engine.client.snapshot.counters.get("num_grammar_hits", 0) == 2)
        assert engine.client.snapshot.counters["num_grammar_misses"] == 1
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (engine.link.pid, rank_of(engine))]
        told = engine.client.snapshot.memory_bytes["rss"] / os.sysconf("SC_PAGE_SIZE")
        assert told > 0.9 * sum(pages), (told, pages)


@within(60)
async def test_an_engine_in_this_process_ends_its_rank_when_it_is_closed() -> None:
    config, made = apart(), []

    def make() -> Any:
        made.append(local_engine(config)())
        return made[0]

    front = open_front(config)
    client = EngineClient(ThreadLink(make), front.tokenizer, MonotonicClock())
    await client.start()
    (pid,) = made[0][0].executor.processes
    assert not is_gone(pid)
    await client.stop()
    assert is_gone(pid)
