"""H01: a model on ranks of several hosts, which are processes with sockets between them: tokens, kills, strangers."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from msgspec.structs import replace

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError, EngineError
from penstock.config import EngineConfig, from_kwargs
from penstock.executor import node_wire, nodes
from penstock.executor.node_wire import Alike, HostRefusedError, Joins, join
from penstock.executor.rank import RankSpec
from penstock.ops.native.abi import RELAY_HEAD
from penstock.ops.native.library import best_library
from penstock.parallel.comm import shared_memory
from penstock.runner.block_wire import PeerError
from tests.api.watch import grown, scrape, small
from tests.engine.hosts import Host, beside, free_port
from tests.engine.processes import assert_num_fds, nano, num_fds, running, within
from tests.engine.test_process_link import params
from tests.engine.test_process_rank import ended, watch_deaths
from tests.engine.test_rank_kills import ranks_of
from tests.unit.families.test_families import TINY, tiny_tensors, write_folder

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory without a name, /proc"),
    pytest.mark.skipif(best_library() is None, reason="no native library was built: no C++17 compiler"),
]
PROMPTS = ["Once upon a time", "The dog said that", "Once upon a time there was a cat. The cat"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=3),
    SamplingParams(temperature=1.1, seed=7, top_p=0.9, max_tokens=20, n=2),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1),
]
KILLS = int(os.environ.get("PENSTOCK_RANK_KILLS", "6"))


def said(model: str, **settings: Any) -> list[Any]:
    llm = LLM(model, ops="native", threads=1, max_model_len=128, **settings)
    try:
        outputs = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS, PARAMS)]  # the second time with hits
    finally:
        llm.engine.core.executor.close()
    return [(o.token_ids, o.text, o.logprobs) for output in outputs for o in output.outputs]


@pytest.mark.parametrize(("size", "num"), [(2, 2), (3, 3), (6, 2)])
def test_H01_tokens_of_several_hosts_are_those_of_one_rank(size: int, num: int, tmp_path: Path) -> None:
    model, port = nano().model.model, free_port()
    alone = said(model)
    others = [Host(model, port, tmp_path / f"{n}", ranks=size, hosts=num, host=n).start() for n in range(1, num)]
    with beside(*others):
        for _ in range(2):  # the same hosts have the second engine, too
            assert said(model, tensor_parallel_size=size, nnodes=num, master_port=port) == alone
        for host in others:
            assert host.said().count("begin") == 2
            assert "Traceback" not in host.said()


def test_H01_two_ranks_on_each_of_two_hosts(tmp_path: Path) -> None:
    """A model whose every product is shared out among four."""
    wide = TINY | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
                   "vocab_size": 600, "initializer_range": 0.02}  # fmt: skip
    tensors = {name: x * np.float32(0.05 if x.ndim > 1 else 1.0) for name, x in tiny_tensors(wide).items()}
    folder = str(write_folder(tmp_path / "m", wide, tensors))
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, detokenize=False)
    port = free_port()
    found = []
    with beside(Host(folder, port, tmp_path / "log", ranks=4).start()):
        both: list[dict[str, Any]] = [{}, {"tensor_parallel_size": 4, "nnodes": 2, "master_port": port}]
        for settings in both:
            llm = LLM(folder, ops="native", threads=1, skip_tokenizer_init=True, **settings)
            (output,) = llm.generate([{"prompt_token_ids": [5, 9, 300, 41]}], sampling)
            llm.engine.core.executor.close()
            assert output.outputs[0].logprobs is not None
            found.append([{k: v.logprob for k, v in step.items()} for step in output.outputs[0].logprobs])
    assert found[1] == found[0]


def ranked(port: int) -> EngineConfig:
    return nano(ops="native", tensor_parallel_size=2, threads=1, nnodes=2, master_port=port)


@within(240 + 10 * KILLS)
async def test_H01_streams_survive_kills_on_any_host_unchanged(tmp_path: Path) -> None:
    """A rank of the lead's host, one of the other, that host's process, which comes again, and the engine."""
    rng = random.Random(int(os.environ.get("PENSTOCK_RANK_SEED", "1")))
    prompts = [f"Once upon a time there was a number {i} that" for i in range(4)]
    async with running(nano(ops="native", threads=1)) as engine:
        calm = await asyncio.gather(*(engine.complete(f"calm{i}", prompts[i], params(i)) for i in range(4)))
    gc.collect()  # engines of other tests, whose sockets would go meanwhile
    before = num_fds()
    port = free_port()
    host = Host(nano().model.model, port, tmp_path / "log").start()
    gone: list[int] = []
    with beside(host):
        async with running(ranked(port), max_restarts_per_minute=10_000) as engine:
            client, deaths = engine.client, watch_deaths(engine)
            whoms = ["rank there", "host", "engine", "rank here"]
            while len(whoms) < KILLS:
                whoms.append(rng.choice(whoms[:4]))
            for number, whom in enumerate(whoms[:KILLS]):
                streams = [engine.submit(f"wild{number}-{i}", prompts[i], params(i)) for i in range(4)]
                wild = [asyncio.create_task(stream.result()) for stream in streams]
                goal = rng.randrange(1, 20)
                while client.state != "ready" or len(streams[0].output.outputs[0].token_ids) < goal:
                    await asyncio.sleep(0.005)
                assert engine.link.pid is not None
                pid = {
                    "rank there": host.ranks[0], "host": host.pid, "engine": engine.link.pid,
                    "rank here": ranks_of(engine)[0],
                }[whom]  # fmt: skip
                gone += [pid, *host.ranks, *ranks_of(engine)]
                os.kill(pid, signal.SIGKILL)
                await engine.until(lambda: client.state == "restarting")
                if whom == "host":
                    host.kill()
                    host.start()
                outputs = await asyncio.gather(*wild)
                for i, (a, b) in enumerate(zip(calm, outputs, strict=True)):
                    assert b.error is None, whom
                    assert a.outputs == b.outputs, f"stream {i} differs after the end of a {whom}"
                    assert a.prompt_logprobs == b.prompt_logprobs
            assert client.num_restarts == len(deaths) == KILLS
            await engine.until(lambda: client.state == "ready")
            last = [*ranks_of(engine), *host.ranks]
            assert len(last) == 2
        for _ in range(500):
            if all(map(ended, [*gone, *last])):
                break
            await asyncio.sleep(0.01)
        assert all(map(ended, [*gone, *last])), "a rank outlives its engine"
        assert host.process is not None
        assert host.process.poll() is None, "the host waits for the next engine"
    await assert_num_fds(before)


def test_what_crosses_between_hosts_is_counted(tmp_path: Path) -> None:
    port = free_port()
    others = [
        Host(nano().model.model, port, tmp_path / f"{n}", ranks=3, hosts=3, host=n).start() for n in (1, 2)
    ]  # fmt: skip
    settings: dict[str, Any] = {"ops": "native", "tensor_parallel_size": 3, "nnodes": 3, "master_port": port}
    with beside(*others), small(**settings, threads=1, engine_in_process=True) as live:
        before = scrape(live.url)
        body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert httpx.post(live.url + "/v1/completions", json=body, timeout=60).status_code == 200
        more = grown(before, scrape(live.url))
    exchanges, given = more["penstock:rank_exchanges_total"], more["penstock:rank_bytes_total"]
    assert exchanges > 0
    assert more["penstock:rank_wire_bytes_total"] == (given / 2 + exchanges * 3 * RELAY_HEAD) * 2


# -- who may come -----------------------------------------------------------------------------------------------------

OWN = Alike("0.1-a", "avx2", "k", "m", 2, 2)


class Lead:
    """`nodes.Nodes` that waits for host 1, in a thread."""

    def __init__(self, port: int, **settings: Any) -> None:
        self.port = port
        self.secret = node_wire.secret_of(settings.get("ranks_secret_file"), "127.0.0.1")
        config = nano(tensor_parallel_size=2, nnodes=2, master_port=port, **settings).as_kwargs()
        self._spec = replace(RankSpec(config={}, plan=None, model="m"), config=config)  # type: ignore[arg-type]
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until_s = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return
            except OSError:
                assert time.monotonic() < until_s, self.problem
                time.sleep(0.01)

    def _run(self) -> None:
        memory = shared_memory(2)
        try:
            nodes.Nodes(self._spec, memory, OWN, None).close()
        except BaseException as error:
            self.problem = error
        finally:
            os.close(memory)

    def over(self) -> str:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return str(self.problem)

    def joins(self, own: Alike = OWN, secret: bytes | None = None, **how: Any) -> Any:
        return join("127.0.0.1", self.port, secret or self.secret, own, Joins(**{"what": "node", "host": 1, **how}))


@contextmanager
def lead_of(monkeypatch: pytest.MonkeyPatch, seconds: float = 1.5, **settings: Any) -> Iterator[Lead]:
    monkeypatch.setattr(nodes, "NODES_S", seconds)
    monkeypatch.setattr(nodes, "RANKS_S", seconds)
    yield Lead(free_port(), **settings)


def test_a_host_that_does_not_come_is_a_sentence_with_what_to_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with lead_of(monkeypatch, 0.5) as lead:
        assert lead.over() == (
            "host 1 did not come within 0.5 s; run there: penstock serve MODEL --headless --tensor-parallel-size 2 "
            f"--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port {lead.port}"
        )


STRANGERS: list[tuple[bytes, str]] = [
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "it does not speak the protocol of ranks"),
    (b"\0" * 4096, "it does not speak the protocol of ranks"),
    (secrets.token_bytes(100), "it does not speak the protocol of ranks"),
    (b"PSTRANK\x07", "it speaks version 7 of the protocol, and this side version 1"),
    (node_wire.PREFACE + b"\0" * 64, "it has another secret"),
    (node_wire.PREFACE, "closed"),
    (b"", "closed"),
]


def test_strangers_are_refused_with_a_sentence_each_and_others_do_not_notice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with lead_of(monkeypatch, 3.0) as lead, caplog.at_level(logging.WARNING, "penstock.ranks"), ExitStack() as stack:
        while not caplog.records:
            time.sleep(0.01)  # the look whether it listens
        idle = stack.enter_context(socket.create_connection(("127.0.0.1", lead.port)))  # says nothing at all
        for data, words in STRANGERS:
            caplog.clear()
            with socket.create_connection(("127.0.0.1", lead.port)) as sock:
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
        stack.enter_context(lead.joins().sock)  # whoever belongs there gets in all the while
        assert "the ranks of other hosts do not connect" in lead.over()
        idle.close()


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"build": "0.0-b"}, "host 1 has another build of Penstock (0.0) than the lead (0.1); install the same on both"),
    ({"isa": "avx512"}, "host 1 computes with avx512 and the lead with avx2, whose bits differ; set PENSTOCK_CPU_ISA"),
    ({"kernels": "x"}, "native kernels of another build than the lead"),
    ({"model": "x"}, "host 1 has another model than the lead; give both the same files"),
    ({"ranks": 4}, "was started for 4 ranks on 2 hosts, and the lead for 2 on 2"),
    ({"hosts": 3}, "was started for 2 ranks on 3 hosts, and the lead for 2 on 2"),
]


def test_hosts_that_would_compute_otherwise_are_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    with lead_of(monkeypatch) as lead:
        for changed, words in OTHERS:
            with pytest.raises(HostRefusedError) as caught:
                lead.joins(replace(OWN, **changed))
            assert words in str(caught.value)
        with pytest.raises(HostRefusedError, match="node_rank 2 is none of 1"):
            lead.joins(host=2)
        with pytest.raises(PeerError, match="the engine that began these ranks is gone"):
            lead.joins(what="relay", group="x")
        node = lead.joins()
        with node.sock:
            with pytest.raises(PeerError, match="host 1 is there already"):
                lead.joins()
            begin = node_wire.hear(node, node_wire.Begin)
            assert (begin.first, begin.count) == (1, 1)
            with pytest.raises(PeerError, match="the engine that began these ranks is gone"):
                lead.joins(what="relay", group="x")
            with pytest.raises(HostRefusedError, match="rank 0 is none of host 1"):
                lead.joins(what="steps", group=begin.group, rank=0)
            assert "do not connect" in lead.over()


def test_whoever_has_another_secret_stays_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    with lead_of(monkeypatch, ranks_secret_file=str(file)) as lead:
        for other in (node_wire.secret_of(None, "127.0.0.1"), b"x" * 32):
            with pytest.raises(PeerError, match="did not accept the secret"):
                lead.joins(secret=other)
        lead.joins().sock.close()
        assert "lost" in lead.over(), "it was taken, and went"


def test_a_lead_without_the_secret_is_found_out() -> None:
    """It answers with a proof that is none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(node_wire.PREFACE + b"n" * 32)
                sock.recv(4096)
                sock.sendall(b"p" * 32)
                sock.recv(4096)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(PeerError, match="the lead has another secret"):
            join("127.0.0.1", listener.getsockname()[1], b"s", OWN, Joins("node", 1))
        thread.join(10)


def test_other_machines_need_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        node_wire.secret_of(None, "0.0.0.0")
    assert "ranks_secret_file: other hosts can reach 0.0.0.0, so ranks need a secret there" in str(caught.value)
    assert node_wire.secret_of(None, "localhost")


def test_a_port_that_is_taken_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock, pytest.raises(ConfigError, match="it is taken"):
        node_wire.listen("127.0.0.1", sock.getsockname()[1])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 3, "nnodes": 2}, "nnodes: 2 hosts cannot have equally many of 3 ranks; use 1 or 3"),
    ({"tensor_parallel_size": 1, "nnodes": 2}, "2 hosts cannot have equally many of 1 ranks; use 1, or another"),
    ({"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 1}, "the engine is on the host with node_rank 0"),
    ({"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 2}, "node_rank: 2 is none of 0 ... 1"),
    ({"node_rank": 1}, "node_rank: 1 is none of 0 ... 0 (nnodes 1)"),
    ({"tensor_parallel_size": 2, "nnodes": 2, "enable_lora": True}, "enable_lora: it names files that ranks on other"),
    ({"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "0.0.0.0"}, "ranks_secret_file: other hosts can reach"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_hosts_that_cannot_be_are_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(nano().model.model, ops="native", **settings)
    assert words in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_a_host_says_at_once_what_is_wrong_with_it(tmp_path: Path) -> None:
    host = Host(nano().model.model, 1, tmp_path / "log", ranks=2, hosts=2, host=2)
    assert host.start().process.wait(60) != 0  # type: ignore[union-attr]
    assert "headless: this host has node_rank 2 of nnodes 2" in host.said()
    assert "Traceback" not in host.said()


def test_a_host_with_another_instruction_set_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "NODES_S", 5.0)
    port = free_port()
    host = Host(nano().model.model, port, tmp_path / "log").start(PENSTOCK_CPU_ISA="base")
    with beside(host):
        host.until_says("waiting for the lead")
        with pytest.raises(EngineError, match="host 1 did not come within 5 s"):
            said(nano().model.model, tensor_parallel_size=2, nnodes=2, master_port=port)
        assert host.process is not None
        assert host.process.wait(60) != 0
        assert "computes with base and the lead with" in host.said()
        assert "Traceback" not in host.said()


def test_the_plan_says_what_each_host_has() -> None:
    from penstock.core.machine import Machine
    from penstock.launch.build import plan_of

    machine = Machine(num_cores=4, memory_bytes=8 << 30, available_bytes=8 << 30)
    config = from_kwargs(model=nano().model.model, ops="native", tensor_parallel_size=6, nnodes=2)
    (decision,) = (d for d in plan_of(config, machine).decisions if d.name == "tensor_parallel_size")
    assert "3 on each of 2 hosts" in decision.why
