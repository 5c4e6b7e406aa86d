"""Hosts of ranks as nodes of a Ray cluster: a real one of three nodes on this machine, whose parts are killed."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM
from penstock.base.errors import ConfigError
from penstock.config import EngineConfig
from penstock.launch import ray_hosts
from penstock.launch.ray_hosts import RayHosts
from penstock.ops.native.library import best_library
from tests.engine.hosts import free_port
from tests.engine.processes import is_gone, nano, running, within
from tests.engine.test_engine_hosts import PROMPTS as SPREAD_PROMPTS
from tests.engine.test_engine_hosts import outputs_of, spread
from tests.engine.test_nodes import PARAMS, PROMPTS, said
from tests.engine.test_process_link import params
from tests.engine.test_process_rank import ended

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory without a name, /proc"),
    pytest.mark.skipif(best_library() is None, reason="no native library was built: no C++17 compiler"),
]
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Its own token is asked for, as Ray's clusters do where RAY_AUTH_MODE says so."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "token")  # read when Ray is imported
        patched.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        made = pytest.importorskip("ray.cluster_utils", reason="pip install ray")
        try:
            found = made.Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
            for _ in range(2):
                found.add_node(**NODE)
        except (OSError, RuntimeError) as error:  # before anything of ours has run
            pytest.skip(f"Ray's cluster does not start here: {str(error)[:200]}")
        patched.setenv("RAY_ADDRESS", found.address)
        yield found
        found.shutdown()


def ranked(hosts: int, **settings: Any) -> EngineConfig:
    return nano(
        ops="native", tensor_parallel_size=hosts, nnodes=hosts, threads=1, master_port=free_port(),
        distributed_executor_backend="ray", **settings,
    )  # fmt: skip


def nodes_of(hosts: RayHosts) -> list[str]:
    """Of the reserved bundles."""
    table = hosts._ray.util.placement_group_table(hosts._group)
    return [table["bundles_to_node_id"][host] for host in sorted(table["bundles_to_node_id"])]


def until(condition: Any, limit_s: float = 180.0) -> None:
    until_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_ranks_on_three_nodes_say_what_one_rank_says(cluster: Any) -> None:
    model = nano().model.model
    alone = said(model)
    llm = LLM(
        model, ops="native", threads=1, max_model_len=128, tensor_parallel_size=3, nnodes=3, master_port=free_port(),
        distributed_executor_backend="ray",
    )  # fmt: skip
    outputs = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS, PARAMS)]
    assert [(o.token_ids, o.text, o.logprobs) for output in outputs for o in output.outputs] == alone
    llm.engine.core.executor.close()
    del llm
    gc.collect()  # the cluster has everything back with it


def test_each_host_has_a_node_of_its_own_and_nothing_is_left_behind(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = RayHosts(ranked(3))
    ray = hosts._ray
    assert len(set(nodes_of(hosts))) == 3
    assert nodes_of(hosts)[0] == ray.get_runtime_context().get_node_id(), "the first host is this process"
    until(lambda: all(process for _, process in hosts.pids()))
    pids = [pid for pair in hosts.pids() for pid in pair]
    secret = hosts.config.execution.ranks_secret_file
    assert secret is not None
    assert os.stat(secret).st_mode & 0o077 == 0
    monkeypatch.setattr(ray_hosts, "PLACED_S", 0.5)
    with pytest.raises(ConfigError, match=r"reserve 1 processors on each of 2 nodes within 0.5 s: others have them"):
        RayHosts(ranked(2))
    monkeypatch.undo()
    hosts.close()
    until(lambda: all(map(ended, pids)))
    assert not os.path.exists(secret)
    again = RayHosts(ranked(3))  # what it had is free
    again.close()


@within(600)
async def test_streams_survive_the_end_of_an_actor_and_of_a_process(cluster: Any) -> None:
    prompts = [f"Once upon a time there was a number {i} that" for i in range(4)]
    async with running(nano(ops="native", threads=1)) as engine:
        calm = await asyncio.gather(*(engine.complete(f"calm{i}", prompts[i], params(i)) for i in range(4)))
    hosts = await asyncio.to_thread(RayHosts, ranked(2))
    try:
        async with running(hosts.config, max_restarts_per_minute=10_000) as engine:
            for which in (0, 1):  # the actor, its process
                await engine.until(lambda: engine.client.state == "ready", 180)
                pair = hosts.pids()[0]  # asked for before there are streams, which may end meanwhile
                streams = [engine.submit(f"wild{which}-{i}", prompts[i], params(i)) for i in range(4)]
                wild = [asyncio.create_task(stream.result()) for stream in streams]
                client = engine.client
                await engine.until(
                    lambda client=client, streams=streams: (
                        client.state == "ready" and len(streams[0].output.outputs[0].token_ids) >= 3
                    ),
                    180,
                )
                os.kill(pair[which], signal.SIGKILL)
                outputs = await asyncio.gather(*wild)
                assert [output.error for output in outputs] == [None] * 4
                assert [output.outputs for output in outputs] == [output.outputs for output in calm]
                await asyncio.to_thread(until, lambda pair=pair: ended(pair[1]))  # it does not outlive its actor
            assert client.num_restarts == 2
    finally:
        hosts.close()


@within(600)
async def test_H04_engines_on_nodes_of_a_cluster_come_again_and_streams_go_on(cluster: Any) -> None:
    """One here, two on nodes of their own; the end of an actor, then of the process that another one watches."""
    async with running(nano()) as alone:
        calm = await asyncio.gather(*(alone.complete(f"calm{i}", SPREAD_PROMPTS[i], params(i)) for i in range(6)))
    port = free_port()
    wanted = nano(data_parallel_size=3, threads=1, data_parallel_rpc_port=port, distributed_executor_backend="ray")
    hosts = await asyncio.to_thread(RayHosts, wanted)
    try:
        assert len(set(nodes_of(hosts))) == 3
        assert (hosts.config.execution.size_here, hosts.config.execution.distributed_executor_backend) == (1, "mp")
        async with spread(hosts.config) as engine:
            for host, which in ((0, 0), (1, 1)):  # the actor of engine 1, the process of engine 2
                await engine.until_state("ready", "ready", "ready")
                pair = hosts.pids()[host]
                streams, tasks = engine.streams(f"wild{host}")
                await engine.until_begun(streams)
                os.kill(pair[which], signal.SIGKILL)
                await engine.until(lambda host=host: engine.state(host + 1) == "away")
                outputs = await asyncio.gather(*tasks)
                assert outputs_of(outputs) == [output.outputs for output in calm]
                await asyncio.to_thread(until, lambda pair=pair: ended(pair[1]))
            await engine.until_state("ready", "ready", "ready")
            assert [one.num_restarts for one in engine.client.replicas] == [0, 1, 1]
    finally:
        hosts.close()


def test_a_node_that_is_lost_gives_its_host_to_another(cluster: Any) -> None:
    hosts = RayHosts(ranked(2))
    try:
        until(lambda: hosts.pids()[0][1])
        lost = nodes_of(hosts)[1]
        (node,) = [node for node in cluster.worker_nodes if node.node_id == lost]
        pid = hosts.pids()[0][1]
        cluster.remove_node(node, allow_graceful=False)
        until(lambda: is_gone(pid) or ended(pid))

        def moved() -> bool:
            try:
                return nodes_of(hosts)[1] not in (lost, "") and hosts.pids()[0][1] not in (0, pid)
            except hosts._ray.exceptions.RayError:
                return False  # its actor is being made again

        until(moved)
    finally:
        hosts.close()
        cluster.add_node(**NODE)


def test_what_a_cluster_cannot_have_is_said_before_anything_begins(cluster: Any) -> None:
    with pytest.raises(ConfigError, match="ray places the hosts of nnodes, and there is one"):
        RayHosts(nano(distributed_executor_backend="ray"))
    with pytest.raises(ConfigError, match="data_parallel_size: 5 hosts of 1 processors each want as many nodes"):
        RayHosts(nano(data_parallel_size=5, threads=1, distributed_executor_backend="ray"))
    with pytest.raises(ConfigError, match="5 hosts of 1 processors each want as many nodes, and of the cluster's 3"):
        RayHosts(ranked(5))


def test_without_a_cluster_or_without_ray_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_hosts, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"ray is not installed here; pip install 'penstock\[ray\]'"):
        RayHosts(ranked(2))


def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    ray = ray_hosts._ray()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"no Ray cluster answers \(.*refused.*\); start one"):
        RayHosts(ranked(2))
