"""I01: engines are told (SIGTERM) that they will be killed, and are: everything goes on elsewhere, and nothing that was
computed is computed again but for keys and values."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys

import pytest

from penstock.core.sampling import SamplingParams
from penstock.engine.replica import Replica
from penstock.engine.stream import Stream
from tests.engine.processes import Running, replicated, within
from tests.engine.test_membership import QUICK, begun, calm_texts, started, texts
from tests.engine.test_replicas import PROMPTS, kill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are told and killed by signals")
ROUNDS = int(os.environ.get("PENSTOCK_REPLICA_KILLS", "3"))
LENGTH = 90


def long_ones(engine: Running, name: str) -> list[Stream]:
    """Greedy and drawn, each of exactly LENGTH tokens."""
    each = [
        SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True) if i % 2 else
        SamplingParams(seed=i, max_tokens=LENGTH, ignore_eos=True) for i in range(6)
    ]  # fmt: skip
    return [engine.submit(f"{name}{i}", PROMPTS[i], one) for i, one in enumerate(each)]


def sampled(replica: Replica) -> int:
    return int(replica.counted.counters.get("num_sampled_tokens", 0))


async def told(engine: Running, replica: Replica) -> None:
    pid = replica.link.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGTERM)
    await engine.until(lambda: replica.noticed)


async def idle_since(engine: Running, replica: Replica) -> None:
    """It has said once more how it is, with nothing to do."""
    said = replica.snapshot
    await engine.until(lambda: replica.snapshot is not said and not replica.snapshot.num_running)


@within(120 + 20 * ROUNDS)
async def test_I01_what_an_engine_has_goes_on_at_once_and_no_token_is_lost() -> None:
    """At random steps; the engine is killed once it has nothing left, as a machine is at the end of its notice."""
    rng, want = random.Random(5), None
    async with replicated(2, "least-requests", **QUICK) as engine:
        client = engine.client
        for turn in range(ROUNDS):
            before = sum(map(sampled, client.replicas))
            streams = long_ones(engine, f"wild{turn}-")
            whom, least = client.replicas[rng.randrange(2)], rng.randrange(1, LENGTH // 2)
            tasks = [asyncio.create_task(stream.result()) for stream in streams]
            await started(engine, streams, least)
            had = [s for s in streams if s.replica is whom and not s.ended]
            await told(engine, whom)
            assert not client.unfinished(whom), "all of it is with others already"
            assert all(s.replica is not whom for s in had if not s.ended)
            late = engine.submit(f"late{turn}", PROMPTS[0], SamplingParams(max_tokens=1))
            assert late.replica is not whom, "it is given nothing new"
            await late.result()
            outputs = [(await task).outputs for task in tasks]
            want = want or outputs
            assert outputs == want
            await idle_since(engine, whom)
            await idle_since(engine, next(one for one in client.replicas if one is not whom))
            assert sum(map(sampled, client.replicas)) - before == 6 * LENGTH + 1, "tokens were lost, and sampled again"
            epoch = whom.epoch
            kill(engine, whom.number)
            await engine.until(lambda whom=whom, epoch=epoch: whom.epoch > epoch and whom.state == "ready")
            assert not whom.draining, "the next engine in its place works"
            await idle_since(engine, whom)


@within(60)
async def test_I01_without_another_engine_it_works_until_it_is_killed() -> None:
    """Also if all are told at once, as by a service manager that means the server."""
    want = await calm_texts()
    async with replicated(2, "round-robin", **QUICK) as engine:
        streams = begun(engine, "a")
        await started(engine, streams, 1)
        for replica in engine.client.replicas:
            os.kill(replica.link.pid, signal.SIGTERM)  # type: ignore[attr-defined]
        await engine.until(lambda: all(replica.noticed for replica in engine.client.replicas))
        assert sum(not replica.draining for replica in engine.client.replicas) == 1
        assert await texts(streams) == want
        assert await texts(begun(engine, "b")) == want
