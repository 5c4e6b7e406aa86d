"""H04: engines that are added, drained, removed and restarted while streams run; every stream keeps its tokens."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.base.errors import CapacityError, RefusedError
from penstock.engine.membership import Membership
from penstock.engine.process_link import ProcessLink
from penstock.engine.stream import Stream
from tests.engine.disturbances import QUICK, campaign
from tests.engine.processes import Running, is_gone, nano, replicated, running, within
from tests.engine.test_process_link import params
from tests.engine.test_replicas import PROMPTS, kill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are processes that signals end")


_calm: list[object] = []


async def calm_texts() -> list[object]:
    """Computed once, by one engine."""
    if not _calm:
        async with running(nano(**QUICK)) as engine:
            _calm.extend(await texts(begun(engine, "calm")))
    return _calm


@asynccontextmanager
async def members(
    size: int, policy: str = "least-requests", most: int = 3
) -> AsyncIterator[tuple[Running, Membership]]:
    async with replicated(size, policy, max_replicas=most, **QUICK) as engine:
        config = nano(data_parallel_size=size, max_replicas=most, **QUICK)
        group = Membership(engine.client, lambda: ProcessLink(config.as_kwargs()), most)
        try:
            yield engine, group
        finally:
            await group.close()


def begun(engine: Running, name: str) -> list[Stream]:
    return [engine.submit(f"{name}{i}", PROMPTS[i], params(i)) for i in range(6)]


async def texts(streams: list[Stream]) -> list[object]:
    return [output.outputs for output in await asyncio.gather(*(stream.result() for stream in streams))]


async def started(engine: Running, streams: list[Stream], least: int = 3) -> None:
    await engine.until(lambda: all(s.ended or len(s.output.outputs[0].token_ids) >= least for s in streams))


def states(group: Membership) -> dict[int, str]:
    return {facts.number: facts.state for facts in group.describe()}


@within(120)
async def test_H04_an_engine_is_added_and_another_removed_while_streams_run() -> None:
    want = await calm_texts()
    async with members(2) as (engine, group):
        client = engine.client
        streams = begun(engine, "a")
        await started(engine, streams)
        adding = asyncio.create_task(group.add())
        await engine.until(lambda: states(group).get(2) == "starting")
        assert len(client.replicas) == 2, "it is not given anything before it is ready"
        assert await adding == 2
        assert states(group) == {0: "ready", 1: "ready", 2: "ready"}
        gone = client.replicas[0].link.pid  # type: ignore[attr-defined]
        running = begun(engine, "b")
        assert {stream.replica.number for stream in running} >= {2}
        await started(engine, running)
        assert client.replicas[0].streams
        await group.remove(0, timeout_s=0.0)
        assert is_gone(gone), "its memory is given back"
        assert [r.number for r in client.replicas] == [1, 2]
        assert all(stream.ended or stream.replica.number != 0 for stream in running)
        assert await texts(streams) == want
        assert await texts(running) == want
        assert await group.add() == 3, "numbers are never used again"
        counted = client.snapshot.counters["num_sampled_tokens"]
        assert counted >= 12 * len(want[0][0].token_ids) / 2, "what a removed engine has done stays counted"  # type: ignore[index]
        assert await texts(begun(engine, "c")) == want


async def ends_what_it_has(engine: Running, group: Membership, want: list[object]) -> None:
    first = engine.client.replicas[0]
    streams = begun(engine, "a")
    await started(engine, streams, 1)
    mine = [stream for stream in streams if stream.replica is first]
    draining = asyncio.create_task(group.drain(0))
    await asyncio.sleep(0)
    late = begun(engine, "b")
    assert {stream.replica.number for stream in late} == {1}
    tasks = [asyncio.create_task(stream.result()) for stream in [*streams, *late]]
    await draining
    assert mine
    assert all(stream.replica is first for stream in mine), "nobody was moved: there was time"
    outputs = [output.outputs for output in await asyncio.gather(*tasks)]
    assert outputs == want + want
    assert group.describe()[0].draining
    group.resume(0)
    again = begun(engine, "c")
    assert {stream.replica.number for stream in again} == {0, 1}
    assert await texts(again) == want


async def moves_what_is_left(engine: Running, group: Membership, want: list[object]) -> None:
    """Streams are moved off a living engine, to and fro: nothing that the old one still says is taken for news."""
    streams = begun(engine, "a")
    await started(engine, streams, 1)
    for _ in range(3):
        for number in (0, 1):
            await group.drain(number, timeout_s=0.0)
            assert not engine.client.unfinished(engine.client.replicas[number])
            group.resume(number)
            await asyncio.sleep(0.02)
    assert await texts(streams) == want
    await engine.until(lambda: not any(replica.leaving for replica in engine.client.replicas))


async def dies_while_drained(engine: Running, group: Membership, want: list[object]) -> None:
    streams = begun(engine, "a")
    await started(engine, streams)
    removing = asyncio.create_task(group.remove(0))
    await asyncio.sleep(0)
    kill(engine, 0)
    assert await texts(streams) == want
    await removing
    assert [r.number for r in engine.client.replicas] == [1]


@within(120)
async def test_H04_a_drained_engine_ends_what_it_has_or_others_do() -> None:
    want = await calm_texts()
    async with members(2, "round-robin") as (engine, group):
        await ends_what_it_has(engine, group, want)
        await moves_what_is_left(engine, group, want)
        await dies_while_drained(engine, group, want)


async def restarts_all(engine: Running, group: Membership, want: list[object]) -> None:
    before = [facts.pid for facts in group.describe()]
    streams = begun(engine, "a")
    await started(engine, streams, 1)
    rolling = asyncio.create_task(group.restart_all())
    away = set()
    while not rolling.done():
        assert engine.client.state == "ready"
        away |= {number for number, state in states(group).items() if state != "ready"}
        for number in group._busy:
            with pytest.raises(RefusedError, match=f"engine {number} is being restarted; try again"):
                group.resume(number)
        await asyncio.sleep(0.005)
    assert set(await rolling) == away == {0, 1}
    assert await texts(streams) == want
    after = group.describe()
    assert not {facts.pid for facts in after} & set(before)
    assert all(is_gone(pid) for pid in before)
    assert [facts.restarts for facts in after] == [0, 0], "nobody had to be started again"
    assert await texts(begun(engine, "b")) == want


async def fails_to_restart(engine: Running, group: Membership, want: list[object]) -> None:
    first = engine.client.replicas[0]
    config, first.link._config = first.link._config, {"model": "/nowhere"}  # type: ignore[attr-defined]
    streams = begun(engine, "a")
    await started(engine, streams, 1)
    with pytest.raises(Exception, match="nowhere"):
        await group.restart_all()
    assert states(group) == {0: "failed", 1: "ready"}, "the second one was left alone"
    assert await texts(streams) == want
    first.link._config = config  # type: ignore[attr-defined]
    await group.restart(0)
    assert states(group) == {0: "ready", 1: "ready"}
    assert await texts(begun(engine, "b")) == want


@within(120)
async def test_H04_a_rolling_restart_leaves_an_engine_ready_at_every_moment() -> None:
    want = await calm_texts()
    async with members(2) as (engine, group):
        await restarts_all(engine, group, want)
        await fails_to_restart(engine, group, want)


async def restarts_alone(engine: Running, group: Membership, want: list[object]) -> None:
    streams = begun(engine, "a")
    await started(engine, streams)
    restarting = asyncio.create_task(group.restart(0))
    await engine.until(lambda: engine.client.state == "starting")
    late = begun(engine, "b")
    assert await restarting > 0, "the gap is told"
    assert await texts(streams) == want
    assert await texts(late) == want


async def survives_a_kill_while_it_starts(engine: Running, group: Membership, want: list[object]) -> None:
    """Of the only engine, in the middle of its restart."""
    streams = begun(engine, "k")
    await started(engine, streams)
    before = engine.client.replicas[0].link.pid  # type: ignore[attr-defined]
    restarting = asyncio.create_task(group.restart(0))
    await engine.until(lambda: engine.client.replicas[0].link.pid not in (None, before))  # type: ignore[attr-defined]
    kill(engine, 0)
    await restarting
    assert await texts(streams) == want


async def says_what_cannot_be_done(engine: Running, group: Membership, want: list[object]) -> None:
    for action in (group.remove(0), group.drain(0)):
        with pytest.raises(RefusedError, match="engine 0 is the last one that takes requests; add one first"):
            await action
    with pytest.raises(RefusedError, match="there is no engine 7; there are: 0"):
        await group.remove(7)
    assert await group.add() == 1
    with pytest.raises(
        RefusedError, match=r"2 engines, and memory and cores .* start the server with --max-replicas 3"
    ):
        await group.add()
    await group.drain(0)
    with pytest.raises(RefusedError, match="engine 1 is the last one"):
        await group.drain(1)
    await group.remove(0)
    group._make_link = lambda: ProcessLink(nano(**QUICK, max_model_len=64).as_kwargs())
    with pytest.raises(CapacityError, match="memory for 64 tokens of a request, and requests may have 256"):
        await group.add()
    assert states(group) == {1: "ready"}
    assert engine.client.info is not None
    assert engine.client.info.max_model_len == 256
    assert await texts(begun(engine, "a")) == want


@within(120)
async def test_H04_a_lone_engine_is_restarted_and_what_cannot_be_done_is_said() -> None:
    want = await calm_texts()
    async with members(1, most=2) as (engine, group):
        await restarts_alone(engine, group, want)
        await survives_a_kill_while_it_starts(engine, group, want)
        await says_what_cannot_be_done(engine, group, want)


@within(300)
async def test_H04_a_short_campaign_of_everything_at_random() -> None:
    """tools/replica_campaign.py runs long ones."""
    seed, actions = int(os.environ.get("PENSTOCK_REPLICA_SEED", "1")), 8
    found = await campaign(seed, actions)
    assert sum(found["done"].values()) == actions
    assert found["streams"] >= len(PROMPTS)
