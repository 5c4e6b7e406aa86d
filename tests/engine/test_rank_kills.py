"""H01, H03: a model on several ranks in processes of their own: real signals, at any of them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from penstock import SamplingParams
from penstock.config import EngineConfig
from penstock.ops.native.library import best_library
from tests.engine.processes import Running, assert_num_fds, is_gone, nano, num_fds, running, within
from tests.engine.test_process_link import params
from tests.engine.test_process_rank import ended, watch_deaths

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif(best_library() is None, reason="no native library was built: no C++17 compiler"),
]
KILLS = int(os.environ.get("PENSTOCK_RANK_KILLS", "6"))
SEED = int(os.environ.get("PENSTOCK_RANK_SEED", "1"))


def ranked(size: int) -> EngineConfig:
    return nano(ops="native", tensor_parallel_size=size, threads=1)


def staged(size: int) -> EngineConfig:
    return nano(ops="native", pipeline_parallel_size=size, pipeline_microbatches=2, threads=1)


def ranks_of(engine: Running) -> list[int]:
    pid = engine.link.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():  # ranks are started by threads
        children = task / "children"
        if children.exists():
            found |= {int(child) for child in children.read_text().split()}
    return sorted(found)


@within(240 + 5 * KILLS)
async def test_H01_streams_survive_kills_of_any_rank_unchanged() -> None:
    """Seeded; PENSTOCK_RANK_KILLS says how many."""
    await kills_change_nothing(ranked(2))


@within(240 + 5 * KILLS)
async def test_H03_streams_survive_kills_of_any_stage_unchanged() -> None:
    await kills_change_nothing(staged(2))


@within(240)
async def test_B17_what_a_killed_rank_had_lent_is_forgotten_and_lent_anew() -> None:
    """Two ranks of six blocks each: every stream of nine borrows. A rank is killed in the middle; the engine that comes
    has books of its own, and they are empty at the end."""
    prompt = "Once upon a time there was a little girl who"
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    small = {"block_size": 8, "num_gpu_blocks_override": 12, "max_model_len": 96, "dtype": "float32"}
    async with running(nano(ops="native", threads=1, **small)) as engine:
        calm = await engine.complete("calm", prompt, long)
    lending = nano(ops="native", context_parallel_size=2, context_parallel_placement="home", threads=1, **small)
    async with running(lending, max_restarts_per_minute=100) as engine:
        client = engine.client
        stream = engine.submit("wild", prompt, long)
        wild = asyncio.create_task(stream.result())
        await engine.until(lambda: sum(rank.lent for rank in client.snapshot.rank_blocks) > 0)
        ranks = client.snapshot.rank_blocks
        assert [rank.total for rank in ranks] == [6, 6]
        assert sum(rank.lent for rank in ranks) == sum(rank.borrowed for rank in ranks)
        os.kill(ranks_of(engine)[-1], signal.SIGKILL)
        output = await wild
        assert output.error is None
        assert output.outputs[0].token_ids == calm.outputs[0].token_ids
        await engine.until(lambda: client.snapshot.num_running == 0)
        assert client.num_restarts == 1
        await engine.until(lambda: not any(r.lent or r.borrowed for r in client.snapshot.rank_blocks))
        assert client.snapshot.counters["num_borrowed_blocks"] > 0


async def kills_change_nothing(config: EngineConfig) -> None:
    rng = random.Random(SEED)
    prompts = [f"Once upon a time there was a number {i} that" for i in range(4)]
    gc.collect()  # engines of other tests, whose sockets would go meanwhile
    before = num_fds()
    async with running(nano(ops="native", threads=1)) as engine:
        calm = await asyncio.gather(*(engine.complete(f"calm{i}", prompts[i], params(i)) for i in range(4)))
    async with running(config, max_restarts_per_minute=10_000) as engine:
        client, done = engine.client, 0
        deaths = watch_deaths(engine)
        pids: list[int] = []
        while done < KILLS:
            streams = [engine.submit(f"wild{done}-{i}", prompts[i], params(i)) for i in range(4)]
            wild = [asyncio.create_task(stream.result()) for stream in streams]
            for _ in range(min(3, KILLS - done)):
                least = len(streams[0].output.outputs[0].token_ids) + 1
                await engine.until(
                    lambda least=least, wild=wild, streams=streams: wild[0].done() or (
                        client.state == "ready" and len(streams[0].output.outputs[0].token_ids) >= least
                    )
                )  # fmt: skip
                await engine.until(lambda: client.state == "ready" and len(ranks_of(engine)) == 2)
                whom = rng.choice([*ranks_of(engine), engine.link.pid])
                pids.append(whom)
                os.kill(whom, signal.SIGKILL)
                done += 1
                await engine.until(lambda: client.state == "restarting")
            outputs = await asyncio.gather(*wild)
            for i, (a, b) in enumerate(zip(calm, outputs, strict=True)):
                assert b.error is None
                assert a.outputs == b.outputs, f"stream {i} differs"
                assert a.prompt_logprobs == b.prompt_logprobs
        assert client.num_restarts == len(deaths) == KILLS
        await engine.until(lambda: client.state == "ready")
        last = ranks_of(engine)
    for pid in pids:
        assert is_gone(pid) or ended(pid)
    for _ in range(300):
        if all(map(ended, last)):
            break
        await asyncio.sleep(0.01)
    assert all(map(ended, last)), "a rank outlives its engine"
    await assert_num_fds(before)
    assert not list(Path("/dev/shm").glob("penstock*")), "shared memory has no name"
