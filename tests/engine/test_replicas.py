"""H04: several engines of one model behind one client, in processes of their own; real signals at any of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter

import pytest

from penstock.base.errors import EngineGoneError
from penstock.launch.front import limits_from
from penstock.text.validate import build_request
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


def kill(engine: Running, number: int) -> None:
    pid = engine.client.replicas[number].link.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


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
            kill(engine, whom)
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
            kill(engine, number)
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
async def test_H04_an_engine_that_is_given_up_leaves_all_to_the_others() -> None:
    want = await calm_texts()
    async with replicated(2, "round-robin", max_restarts_per_minute=0) as engine:
        client = engine.client
        for last in (False, True):
            streams = [engine.submit(f"{last}{i}", PROMPTS[i], params(i)) for i in range(6)]
            tasks = [asyncio.create_task(stream.result()) for stream in streams]
            await engine.until(lambda streams=streams: len(streams[1].output.outputs[0].token_ids) >= 3)
            number = next(replica.number for replica in client.replicas if replica.state == "ready")
            kill(engine, number)
            await engine.until(lambda number=number: client.replicas[number].state == "failed")
            if last:
                break
            assert client.state == "ready"
            assert [output.outputs for output in await asyncio.gather(*tasks)] == want
        assert client.state == "failed"
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(answer, EngineGoneError) for answer in found)
        with pytest.raises(EngineGoneError):
            engine.submit("late", PROMPTS[0], params(0))


@within(120)
async def test_H04_requests_of_a_session_go_to_one_engine() -> None:
    async with replicated(2, "session") as engine:
        assert engine.client.info is not None
        assert engine.front.tokenizer is not None
        limits = limits_from(engine.client.info)
        ids = engine.front.tokenizer.encode(PROMPTS[0])
        chosen: dict[str, set[int]] = {}
        streams = []
        for n in range(24):
            request = build_request(f"s{n}", ids, params(0), limits=limits, tokenizer=engine.front.tokenizer, seed=n)
            session = f"session {n % 8}"
            streams.append(engine.client.submit(request, params(0), session=session))
            chosen.setdefault(session, set()).add(streams[-1].replica.number)
        assert all(len(numbers) == 1 for numbers in chosen.values())
        assert set().union(*chosen.values()) == {0, 1}
        await asyncio.gather(*(stream.result() for stream in streams))


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
