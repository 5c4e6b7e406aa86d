"""H04: several engines of one model behind one client, in processes of their own; real signals at any of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter

import pytest

from tests.engine.processes import Running, nano, replicated, running, within
from tests.engine.test_process_link import params

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are killed by signals")
KILLS = int(os.environ.get("PENSTOCK_REPLICA_KILLS", "6"))
SEED = int(os.environ.get("PENSTOCK_REPLICA_SEED", "1"))
PROMPTS = [f"Once upon a time there was a number {i} that" for i in range(6)]


async def calm_texts() -> list[object]:
    async with running(nano()) as engine:
        calm = await asyncio.gather(*(engine.complete(f"calm{i}", PROMPTS[i], params(i)) for i in range(6)))
    return [output.outputs for output in calm]


def pid_of(engine: Running, number: int) -> int | None:
    return engine.client.replicas[number].link.pid


@within(120)
async def test_H04_both_engines_work_and_the_tokens_are_those_of_one() -> None:
    want = await calm_texts()
    async with replicated(2, "round-robin") as engine:
        streams = [engine.submit(f"r{i}", PROMPTS[i], params(i)) for i in range(6)]
        assert Counter(stream.replica.number for stream in streams) == {0: 3, 1: 3}
        got = await asyncio.gather(*(stream.result() for stream in streams))
        assert [output.outputs for output in got] == want
        assert engine.client.ready() == (True, "")
        assert not any(replica.streams for replica in engine.client.replicas)


@within(240 + 5 * KILLS)
async def test_H04_I10_streams_of_a_killed_engine_go_on_with_another_unchanged() -> None:
    """Seeded; PENSTOCK_REPLICA_KILLS says how many."""
    want, rng = await calm_texts(), random.Random(SEED)
    async with replicated(2, "least-requests") as engine:
        client, done, moved = engine.client, 0, 0
        while done < KILLS:
            streams = [engine.submit(f"wild{done}-{i}", PROMPTS[i], params(i)) for i in range(6)]
            wild = [asyncio.create_task(stream.result()) for stream in streams]
            least = rng.randrange(1, 8)
            await engine.until(
                lambda streams=streams, least=least: len(streams[0].output.outputs[0].token_ids) >= least
                or streams[0].ended
            )  # fmt: skip
            whom = rng.randrange(2)
            await engine.until(lambda: all(replica.state == "ready" for replica in client.replicas))
            had = set(client.replicas[whom].streams)
            pid = pid_of(engine, whom)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await engine.until(lambda whom=whom: client.replicas[whom].state != "ready")
            moved += sum(stream.replica.number != whom for stream in streams if stream.request_id in had)
            assert client.state == "ready", "the other one goes on"
            outputs = await asyncio.gather(*wild)
            assert [output.error for output in outputs] == [None] * 6
            assert [output.outputs for output in outputs] == want
            done += 1
        assert moved > 0
        await engine.until(lambda: all(replica.state == "ready" for replica in client.replicas))
        assert client.num_restarts == KILLS


@within(120)
async def test_H04_all_engines_killed_at_once() -> None:
    want = await calm_texts()
    async with replicated(2, "least-requests") as engine:
        streams = [engine.submit(f"r{i}", PROMPTS[i], params(i)) for i in range(6)]
        tasks = [asyncio.create_task(stream.result()) for stream in streams]
        await engine.until(lambda: len(streams[0].output.outputs[0].token_ids) >= 3)
        for number in range(2):
            os.kill(pid_of(engine, number) or 0, signal.SIGKILL)
        await engine.until(lambda: engine.client.state == "restarting")
        assert not engine.client.ready()[0]
        assert [output.outputs for output in await asyncio.gather(*tasks)] == want


@within(120)
async def test_H04_equal_beginnings_go_to_the_same_engine() -> None:
    async with replicated(2, "prefix") as engine:
        begun = "There was once a very small dog who lived in a very large house with a red door and a blue roof. " * 3
        first = engine.submit("a", begun + "One", params(0))
        await first.result()
        other = engine.submit(
            "b", "Quite another story begins on a ship far away, long before all of that. " * 4, params(1)
        )
        again = [engine.submit(f"c{i}", begun + f"Number {i}", params(0)) for i in range(4)]
        assert {stream.replica.number for stream in again} == {first.replica.number}
        assert other.replica.number != first.replica.number
        found = await asyncio.gather(*(stream.result() for stream in again))
        assert all(output.num_cached_tokens > 0 for output in found)
        await other.result()


@within(120)
async def test_H04_aborts_reach_the_engine_that_has_the_request() -> None:
    async with replicated(2, "round-robin") as engine:
        streams = [engine.submit(f"r{i}", PROMPTS[i], params(i)) for i in range(4)]
        await engine.until(lambda: all(len(s.output.outputs[0].token_ids) >= 1 for s in streams))
        for stream in streams[:3]:
            stream.abort()
        await streams[3].result()
        await engine.until(lambda: engine.client.snapshot.num_running == 0)
        assert all(load.requests == load.tokens == load.waiting_tokens == 0 for load in loads(engine))


def loads(engine: Running) -> list[object]:
    return list(engine.client._placing._loads.values())  # type: ignore[union-attr]
