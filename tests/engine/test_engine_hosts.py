"""H04: engines of one server on other hosts, which are processes of this machine with sockets between them: tokens,
kills, hosts that come, go silent and come again, and strangers at the port."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.base.clock import MonotonicClock
from penstock.base.errors import ConfigError, EngineError, EngineGoneError, RefusedError
from penstock.config import EngineConfig
from penstock.core.engine_host import OWN_SETTINGS, other_settings, settings_there
from penstock.engine.frontend import GUILTY, EngineClient
from penstock.engine.membership import Membership
from penstock.engine.placement import EnginePlacement
from penstock.engine.process_link import ProcessLink
from penstock.engine.remote_link import RemoteLink
from penstock.executor import node_wire
from penstock.executor.node_wire import ENGINES, EngineJoins, HostRefusedError, alike_engines, join
from penstock.launch.engine_host import run_engine_host
from penstock.launch.engine_hosts import EngineHosts
from penstock.launch.front import open_front
from penstock.ops.native.library import best_library
from penstock.route import ROUTERS
from penstock.runner.block_wire import PeerError
from tests.engine.hosts import EngineHost, beside, free_port
from tests.engine.processes import Running, assert_num_fds, nano, num_fds, running, within
from tests.engine.test_process_link import params
from tests.engine.test_process_rank import ended
from tests.unit.families.test_families import TINY, tiny_tensors, write_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines are killed by signals")
PROMPTS = [f"Once upon a time there was a number {i} that" for i in range(6)]
MODEL = nano().model.model
MARKER = 977
Calm = list[Any]


@pytest.fixture(scope="module")
def calm() -> Calm:
    """What one engine says that nobody disturbs."""
    found: Calm = []

    @within(120)
    async def run() -> None:
        async with running(nano()) as engine:
            outputs = await asyncio.gather(*(engine.complete(f"calm{i}", PROMPTS[i], params(i)) for i in range(6)))
        found.extend(output.outputs for output in outputs)

    run()
    return found


class Spread(Running):
    """`late`: the links to engines of other hosts, by number."""

    def __init__(self, client: EngineClient, late: list[RemoteLink], front: Any) -> None:
        super().__init__(client, client.link, front)  # type: ignore[arg-type]
        self.late = {link.number: link for link in late}

    def state(self, number: int) -> str:
        return self.client.replicas[number].state

    async def until_state(self, *states: str) -> None:
        """Of all engines, by number."""
        await self.until(lambda: [one.state for one in self.client.replicas] == list(states), 180)

    def cut(self, number: int) -> None:
        """The connection of an engine there, and nothing else."""
        connection = self.late[number]._engine
        assert connection is not None
        assert connection._transport is not None
        connection._transport.abort()

    def streams(self, name: str) -> tuple[list[Any], list[asyncio.Task[Any]]]:
        streams = [self.submit(f"{name}-{i}", PROMPTS[i], params(i)) for i in range(6)]
        return streams, [asyncio.create_task(stream.result()) for stream in streams]

    async def until_begun(self, streams: list[Any], tokens: int = 3) -> None:
        await self.until(lambda: all(len(s.output.outputs[0].token_ids) >= tokens or s.ended for s in streams))


def spread_config(port: int, size: int = 2, local: int = 1, **settings: Any) -> EngineConfig:
    return nano(data_parallel_size=size, data_parallel_size_local=local, data_parallel_rpc_port=port, **settings)


@asynccontextmanager
async def spread(
    config: EngineConfig, policy: str = "round-robin", silent_s: float = 20.0, **link_settings: Any
) -> AsyncIterator[Spread]:
    """A client with engines here and on other hosts; without one here it waits for the first."""
    run = config.execution
    placing = EnginePlacement(ROUTERS.get(policy)())
    hosts = EngineHosts(config, silent_s=silent_s)
    usual = {"max_restarts_per_minute": 10_000, "block_secret": placing.block_secret}
    kwargs = config.as_kwargs()
    here = [ProcessLink(kwargs, **usual) for _ in range(run.size_here)]
    late = [
        RemoteLink(n, kwargs, **(usual | link_settings)) for n in range(run.size_here, run.data_parallel_size)
    ]  # fmt: skip
    first, *further = [*here, *late]
    front = open_front(config)
    client = EngineClient(first, front.tokenizer, MonotonicClock(), further=further, late=late, placing=placing)
    hosts.begin(late)
    try:
        await client.start()
        yield Spread(client, late, front)
    finally:
        await client.stop()
        await asyncio.to_thread(hosts.close)


def outputs_of(outputs: list[Any]) -> Calm:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs for output in outputs]


@within(240)
async def test_H04_engines_on_three_hosts_say_what_one_says_and_come_when_they_come(calm: Calm, tmp_path: Path) -> None:
    gc.collect()
    before = num_fds()
    port = free_port()
    async with spread(spread_config(port, 3)) as engine:
        assert engine.client.ready() == (True, "")
        assert [one.state for one in engine.client.replicas] == ["ready", "away", "away"]
        _, tasks = engine.streams("alone")
        assert outputs_of(await asyncio.gather(*tasks)) == calm
        hosts = [EngineHost(MODEL, port, tmp_path / f"{n}", size=3, first=n).start() for n in (1, 2)]
        with beside(*hosts):
            await engine.until_state("ready", "ready", "ready")
            streams, tasks = engine.streams("all")
            assert Counter(stream.replica.number for stream in streams) == {0: 2, 1: 2, 2: 2}
            assert outputs_of(await asyncio.gather(*tasks)) == calm
            facts = Membership(engine.client, lambda: None, 3).describe()  # type: ignore[arg-type,return-value]
            assert [one.host for one in facts] == ["", *[f"{socket.gethostname()} (127.0.0.1)"] * 2]
            assert [one.pid for one in facts][1:] == [host.ranks[0] for host in hosts]
            assert engine.client.num_restarts == 0
            assert 0 <= max(link.progress_age_s() for link in engine.late.values()) < 4
    await assert_num_fds(before)


@within(400)
async def test_H04_streams_survive_kills_of_engines_and_hosts_unchanged(calm: Calm, tmp_path: Path) -> None:
    """An engine there, its host, which comes again, its connection alone; each in the middle of streams."""
    port = free_port()
    host = EngineHost(MODEL, port, tmp_path / "log").start()
    with beside(host):
        async with spread(spread_config(port)) as engine:
            client = engine.client
            for number, whom in enumerate(("engine", "host", "connection")):
                await engine.until_state("ready", "ready")
                had = host.ranks
                assert len(had) == 1
                streams, tasks = engine.streams(f"wild{number}")
                await engine.until_begun(streams)
                there = [stream for stream in streams if stream.replica.number == 1 and not stream.ended]
                assert there, "streams run there"
                if whom == "connection":
                    engine.cut(1)
                else:
                    os.kill(had[0] if whom == "engine" else host.pid, signal.SIGKILL)
                await engine.until(lambda: engine.state(1) != "ready")
                if whom == "connection":
                    assert client.replicas[1].reason == "its connection was lost", "nobody's fault"
                assert client.state == "ready"
                assert all(stream.replica.number == 0 for stream in there), "the other one goes on at once"
                assert outputs_of(await asyncio.gather(*tasks)) == calm, whom
                if whom == "host":
                    assert engine.state(1) == "away"
                    await engine.until(lambda had=had: all(map(ended, had)))  # it does not outlive its host
                    host.kill()
                    host.start()
            await engine.until_state("ready", "ready")
            assert client.replicas[1].num_restarts == 3
            assert not client.replicas[1].replay.suspects.num_waiting
            streams, tasks = engine.streams("last")
            assert {stream.replica.number for stream in streams} == {0, 1}
            assert outputs_of(await asyncio.gather(*tasks)) == calm
        host.until_says("the server is gone")
        assert host.process is not None
        assert host.process.poll() is None, "it waits for the next server"
        assert host.ranks == []
        assert "Traceback" not in host.said()


@within(300)
async def test_H04_a_server_without_engines_of_its_own_waits_for_hosts(calm: Calm, tmp_path: Path) -> None:
    """Both engines of one host, and the next server has them, too. All are killed while streams run: these wait."""
    port = free_port()
    host = EngineHost(MODEL, port, tmp_path / "log", first=0, num=2).start()
    with beside(host):
        for again in range(2):
            async with spread(spread_config(port, local=0)) as engine:
                await engine.until_state("ready", "ready")
                if again:
                    break
                streams, tasks = engine.streams("wild")
                await engine.until_begun(streams)
                host.kill()
                await engine.until(lambda: engine.client.state == "away")
                ready, why = engine.client.ready()
                assert not ready
                assert "is out of reach" in why
                host.start()
                assert outputs_of(await asyncio.gather(*tasks)) == calm


@within(240)
async def test_H04_a_host_that_is_silent_is_out_of_reach_until_it_speaks(calm: Calm, tmp_path: Path) -> None:
    port = free_port()
    host = EngineHost(MODEL, port, tmp_path / "log").start()
    with beside(host):
        async with spread(spread_config(port), silent_s=2.0) as engine:
            await engine.until_state("ready", "ready")
            streams, tasks = engine.streams("wild")
            await engine.until_begun(streams)
            (pid,) = host.ranks
            for one in (host.pid, pid):
                os.kill(one, signal.SIGSTOP)
            await engine.until(lambda: engine.state(1) == "away", 30)
            assert "it has said nothing for 2 s" in engine.client.replicas[1].reason
            assert outputs_of(await asyncio.gather(*tasks)) == calm
            os.kill(host.pid, signal.SIGCONT)  # its engine is still stopped: it has to be killed
            await engine.until_state("ready", "ready")
            assert ended(pid)
            _, tasks = engine.streams("again")
            assert outputs_of(await asyncio.gather(*tasks)) == calm


@within(240)
async def test_H04_what_waits_for_a_lost_host_goes_on_with_the_first_that_comes_back(
    calm: Calm, tmp_path: Path
) -> None:  # fmt: skip
    port = free_port()
    hosts = [EngineHost(MODEL, port, tmp_path / f"{n}", first=n).start() for n in (0, 1)]
    with beside(*hosts):
        async with spread(spread_config(port, local=0), away_s=10_000.0) as engine:
            await engine.until_state("ready", "ready")
            streams, tasks = engine.streams("wild")
            await engine.until_begun(streams)
            for number, host in enumerate(hosts):  # what the first had is the second's when that is lost
                host.kill()
                await engine.until(lambda number=number: engine.state(number) == "away")
            assert {stream.replica.number for stream in streams if not stream.ended} == {1}
            hosts[0].start()
            assert outputs_of(await asyncio.gather(*tasks)) == calm
            assert engine.state(1) == "away"


@within(240)
async def test_H04_engines_there_that_hang_or_die_of_a_request_take_none_along(
    calm: Calm, tmp_path: Path
) -> None:  # fmt: skip
    """The first hangs, and is killed by its host. The next dies of a request, which is found out as it is here."""
    port = free_port()
    faults = ["step:hang:9", f"step:poison:{MARKER}"]
    with beside(host := EngineHost(MODEL, port, tmp_path / "log").start()):
        async with spread(spread_config(port), faults=faults, hang_s=3.0) as engine:
            await engine.until_state("ready", "ready")
            _, tasks = engine.streams("hung")
            assert outputs_of(await asyncio.gather(*tasks)) == calm
            await engine.until_state("ready", "ready")
            assert engine.client.replicas[1].num_restarts == 1
            assert "was killed because it did not move for 3 s" in host.said()
            streams, tasks = engine.streams("wild")
            await engine.until_begun(streams, 1)
            poison = engine.submit("poison", [5, MARKER, 7], params(0))
            if poison.replica.number != 1:
                engine.client.pass_on(poison, engine.client.replicas[1])
            with pytest.raises(EngineError) as told:
                await poison.result()
            assert str(told.value) == GUILTY
            assert outputs_of(await asyncio.gather(*tasks)) == calm
            assert engine.client.replicas[0].num_restarts == 0, "the suspects stayed with the engine that died"
            await engine.until_state("ready", "ready")


@within(120)
async def test_nothing_waits_for_ever_for_a_host(tmp_path: Path) -> None:
    port = free_port()
    host = EngineHost(MODEL, port, tmp_path / "log", size=1, first=0).start()
    with beside(host):
        async with spread(spread_config(port, 1, local=0), away_s=1.0) as engine:
            streams, tasks = engine.streams("wild")
            await engine.until_begun(streams, 1)
            host.kill()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(one, EngineGoneError) for one in found)
            for one in found:
                if isinstance(one, EngineGoneError):
                    assert "no engine can be reached; try again later" in str(one)
            with pytest.raises(EngineGoneError, match="the engine is not there: its host is out of reach"):
                engine.submit("late", PROMPTS[0], params(0))
            host.start()
            await engine.until_state("ready")
            assert (await engine.complete("again", PROMPTS[0], params(0))).error is None


@within(240)
async def test_H04_engines_of_other_hosts_are_drained_restarted_and_removed(calm: Calm, tmp_path: Path) -> None:
    port = free_port()
    host = EngineHost(MODEL, port, tmp_path / "log").start()
    with beside(host):
        async with spread(spread_config(port)) as engine:
            group = Membership(engine.client, lambda: None, 2)  # type: ignore[arg-type,return-value]
            with pytest.raises(RefusedError, match="engine 1 is out of reach: its host has not come yet"):
                await group.restart(1)
            await engine.until_state("ready", "ready")
            streams, tasks = engine.streams("a")
            await engine.until_begun(streams, 1)
            (pid,) = host.ranks
            await group.restart(1)
            assert ended(pid)
            assert engine.state(1) == "ready"
            await group.drain(1, 0.0)
            assert not engine.client.replicas[1].streams
            group.resume(1)
            assert outputs_of(await asyncio.gather(*tasks)) == calm
            await group.remove(1)
            assert [one.number for one in engine.client.replicas] == [0]
            assert host.process is not None
            assert await asyncio.to_thread(host.process.wait, 60) != 0
            assert "engine 1 was removed at the server" in host.said()
            assert "Traceback" not in host.said()
            await asyncio.to_thread(host.start)
            assert await asyncio.to_thread(host.process.wait, 60) != 0
            _, tasks = engine.streams("b")
            assert outputs_of(await asyncio.gather(*tasks)) == calm


@within(120)
async def test_an_engine_with_less_memory_than_was_promised_is_refused_by_name(tmp_path: Path) -> None:
    port = free_port()
    host = EngineHost(MODEL, port, tmp_path / "log")
    with beside(host):
        async with spread(spread_config(port)) as engine:
            assert engine.client.info is not None
            engine.client.info = replace(engine.client.info, max_model_len=10_000, kv_capacity_tokens=20_000)
            host.start()
            assert host.process is not None
            assert await asyncio.to_thread(host.process.wait, 60) != 0
            assert "an engine there would have memory for 256 tokens of a request, and requests may have 10000" in (
                host.said()
            )
            assert engine.state(1) == "away"
            assert engine.client.ready() == (True, "")


# -- who may come -----------------------------------------------------------------------------------------------------


class Door:
    """`EngineHosts` whose links have no client: only who is let in counts."""

    def __init__(self, port: int, **settings: Any) -> None:
        config = spread_config(port, 3, **settings)
        self.port, self.hosts = port, EngineHosts(config)
        self.links = [RemoteLink(n, config.as_kwargs()) for n in (1, 2)]
        self.secret = node_wire.secret_of(config.execution.ranks_secret_file, "127.0.0.1", ENGINES)
        self.own = alike_engines(MODEL)
        self.turn: Callable[[], None] = lambda: None
        """Lets the event loop run for a moment, which stands still otherwise."""

    def joins(self, secret: bytes | None = None, own: Any = None, **how: Any) -> Any:
        said: dict[str, Any] = {"what": "host", "number": 1, "size": 3, "name": "a"}
        return join(
            "127.0.0.1", self.port, secret or self.secret, own or self.own, EngineJoins(**said | how), ENGINES
        )  # fmt: skip


@contextmanager
def door(**settings: Any) -> Iterator[Door]:
    made = Door(free_port(), **settings)
    with asyncio.Runner() as runner:
        made.turn = lambda: runner.run(asyncio.sleep(0.01))

        async def begin() -> None:
            made.hosts.begin(made.links)

        runner.run(begin())
        try:
            yield made
        finally:
            made.hosts.close()


STRANGERS: list[tuple[bytes, str]] = [
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "it does not speak the protocol of engines"),
    (secrets.token_bytes(4096), "it does not speak the protocol of engines"),
    (node_wire.PREFACE + b"\0" * 64, "it does not speak the protocol of engines"),
    (b"PSTENGN\x07", "it speaks version 7 of the protocol, and this side version 1"),
    (ENGINES.preface + b"\0" * 64, "it has another secret"),
    (ENGINES.preface, "closed"),
    (b"", "closed"),
]


def test_strangers_are_refused_with_one_line_each_and_others_do_not_notice(caplog: pytest.LogCaptureFixture) -> None:
    with door() as front, caplog.at_level(logging.WARNING, "penstock.engine"), ExitStack() as stack:
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", front.port)))  # says nothing at all
        for data, words in STRANGERS:
            caplog.clear()
            with socket.create_connection(("127.0.0.1", front.port)) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(10)
                try:
                    while sock.recv(4096):
                        pass
                except ConnectionError:
                    pass
            until_s = time.monotonic() + 5
            while not any(words in r.message for r in caplog.records):
                assert time.monotonic() < until_s, (words, caplog.text)
                time.sleep(0.01)
            assert len([r for r in caplog.records if "refused" in r.message]) == 1
        front.joins().sock.close()  # whoever belongs there gets in all the while
        idle.close()


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"build": "0.0-b"}, "the host of engine 1 has another build of Penstock (0.0) than the server ("),
    ({"model": "x"}, "the host of engine 1 has another model than the server; give both the same files"),
]
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"size": 2}, "data_parallel_size is 2 at the host and 3 at the server; give the same at both"),
    ({"number": 0}, "engine 0 is none of those on other hosts, 1 ... 2; give data_parallel_start_rank"),
    ({"number": 3}, "engine 3 is none of those on other hosts, 1 ... 2"),
    ({"given": {"max_model_len": 64}}, "max_model_len is 64 at the host and 256 at the server; give the same at both"),
]


def test_hosts_that_would_compute_otherwise_or_do_not_belong_are_refused_by_name() -> None:
    with door() as front:
        for changed, words in OTHERS:
            with pytest.raises(HostRefusedError) as caught:
                front.joins(own=replace(front.own, **changed))
            assert words in str(caught.value)
        for how, words in UNFIT:
            with pytest.raises(HostRefusedError) as caught:
                front.joins(**how)
            assert words in str(caught.value)
        front.links[1].dismiss("engine 2 was removed")
        with pytest.raises(HostRefusedError, match="engine 2 was removed"):
            front.joins(number=2)
        with front.joins(given={"max_model_len": 256, "data_parallel_address": "10.0.0.1"}).sock:
            with pytest.raises(PeerError, match="engine 1 has a host already") as busy:
                front.joins()
            assert busy.value.reason == "busy", "it may have gone a moment later"
        until_s = time.monotonic() + 10
        while True:  # the first one has gone: the next may come
            try:
                front.joins().sock.close()
                break
            except PeerError:
                assert time.monotonic() < until_s
                time.sleep(0.01)
        with front.joins(what="engine", group="x").sock as nobody:  # which nobody began
            for _ in range(30):
                front.turn()
            nobody.settimeout(10)
            assert nobody.recv(1) == b""


@pytest.mark.skipif(best_library() is None, reason="no native library was built: no C++17 compiler")
def test_kernels_have_to_be_the_same_where_they_are_used() -> None:
    with door() as front:  # reference operations: none are
        front.joins(own=replace(front.own, isa="other", kernels="k")).sock.close()
    with door(ops="native") as front:
        with pytest.raises(HostRefusedError, match=r"computes with other and the server with .*, whose bits differ"):
            front.joins(own=replace(front.own, isa="other"))
        with pytest.raises(HostRefusedError, match="native kernels of another build than the server"):
            front.joins(own=replace(front.own, kernels="k"))


def test_whoever_has_another_secret_stays_outside(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    with door(ranks_secret_file=str(file)) as front:
        of_ranks = node_wire.secret_of(str(file), "127.0.0.1")
        for other in (node_wire.secret_of(None, "127.0.0.1", ENGINES), of_ranks, b"x" * 32):
            with pytest.raises(PeerError, match="the server did not accept the secret"):
                front.joins(secret=other)
        front.joins().sock.close()


def test_a_host_without_the_secret_or_with_another_model_ends_with_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    other = str(write_folder(tmp_path / "m", TINY, tiny_tensors(TINY)))
    with door(ranks_secret_file=str(file)) as front:
        logs = [
            EngineHost(MODEL, front.port, tmp_path / "a", size=3).start(),
            EngineHost(other, front.port, tmp_path / "b", size=3).start("--ranks-secret-file", str(file)),
        ]
        with beside(*logs):
            for host, words in zip(
                logs, ("did not accept the secret", "has another model than the server"), strict=True
            ):
                assert host.process is not None
                assert host.process.wait(60) != 0
                assert words in host.said()
                assert "Traceback" not in host.said()


def test_two_servers_cannot_have_one_port() -> None:
    with door() as front, pytest.raises(ConfigError, match=r"data_parallel_rpc_port: .* cannot be listened to: it is"):
        EngineHosts(spread_config(front.port, 3))


def test_other_machines_need_a_secret() -> None:
    with pytest.raises(
        ConfigError, match=r"ranks_secret_file: other hosts can reach 0.0.0.0, so engines need a secret"
    ):
        EngineHosts(spread_config(free_port(), data_parallel_address="0.0.0.0"))
    with pytest.raises(ConfigError, match=r"data_parallel_address: 'no.such.host.invalid' is not known"):
        EngineHosts(spread_config(free_port(), data_parallel_address="no.such.host.invalid"))


def test_a_start_rank_is_for_other_hosts_and_has_to_be_there() -> None:
    with pytest.raises(ConfigError, match="data_parallel_start_rank: engines of the server's own host begin at 0"):
        EngineHosts(spread_config(free_port(), data_parallel_start_rank=1))
    for first, num in ((1, 2), (3, 1), (1, 0)):
        settings = {"data_parallel_size": 2, "data_parallel_size_local": num, "data_parallel_start_rank": first}
        with pytest.raises(ConfigError, match=f"headless: this host would have engines from {first} on, {num} of them"):
            run_engine_host(nano(**settings))


def test_settings_of_a_host_of_its_own_and_of_the_server() -> None:
    own = dict.fromkeys(OWN_SETTINGS) | {"model": "/there", "threads": 2, "data_parallel_size_local": 1, "ops": "ref"}
    server = spread_config(29550, 3, ranks_secret_file=None, ops="native", threads=8).as_kwargs()
    found = settings_there(server, own)
    assert (found["model"], found["threads"], found["ops"]) == ("/there", 2, "native")
    assert (found["data_parallel_size"], found["data_parallel_size_local"]) == (3, 1)
    assert settings_there(server, {})["threads"] == 8
    assert other_settings(server, {"ops": "native", "model": "/x", "threads": 1}) == ""
    assert other_settings(server, {"ops": "ref"}).startswith("ops is 'ref' at the host and 'native' at the server;")
