"""Several engines behind a router: nobody is lost, processes change nothing, and routers do what they are for."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.base.errors import ConfigError, InputError
from penstock.config import from_kwargs
from penstock.plan.devices import find_device
from penstock.plan.simulated import device_plan
from penstock.route import ROUTERS
from penstock.route.prefix import PrefixRoute
from penstock.sim.metrics import metrics
from penstock.sim.replicas import Replicas, open_run
from penstock.sim.result import SimResult
from penstock.sim.routed import RoutedRuns, told_by
from penstock.sim.service import SimulatedService
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import TimedRequest, Workload, from_list
from tests.command import penstock

LOAD = synthetic("synthetic:poisson?rate=60&requests=90&prompt=200&output=12&output_cv=1&tenants=3", seed=2)


def service(**settings: object) -> SimulatedService:
    spec, device = find_spec("llama-3.1-8b"), find_device("l4")
    config = from_kwargs({}, model="llama-3.1-8b", max_model_len=4096, **settings)
    return SimulatedService("l4", spec, *device_plan(config, spec, device), device)


def columns(result: SimResult) -> np.ndarray:
    r = result.requests
    return np.array([r.arrival_s, r.scheduled_s, r.first_token_s, r.finish_s, r.num_prompt, r.num_output])


def test_one_replica_is_the_engine_itself() -> None:
    alone, one = service().run(LOAD), Replicas(service(), 1).run(LOAD)
    assert np.array_equal(columns(alone), columns(one))
    ours, theirs = metrics(alone), metrics(one)
    for m in (ours, theirs):
        m.pop("simulation")
    assert ours == theirs


def test_processes_change_nothing_and_everything_is_counted() -> None:
    apart = Replicas(service(), 5, processes=2).run(LOAD)
    here = Replicas(service(), 5, processes=1).run(LOAD)
    assert np.array_equal(columns(apart), columns(here))
    assert apart.requests.num_output.sum() == sum(r.num_output for r in LOAD) == apart.stats.num_sampled_tokens
    assert apart.series.counts[:, apart.counters.index("finished")].sum() == 90
    assert apart.series.counts.sum() == pytest.approx(here.series.counts.sum())
    assert set(apart.tenants) == {"tenant-0", "tenant-1", "tenant-2"}
    assert [apart.tenants[k] for k in apart.requests.tenant[:4]] == ["tenant-0", "tenant-1", "tenant-2", "tenant-0"]


def test_more_replicas_wait_less() -> None:
    jct = [float(np.mean(r.requests.finish_s - r.requests.arrival_s))
           for r in (Replicas(service(), n).run(LOAD) for n in (1, 4))]  # fmt: skip
    assert jct[1] < 0.8 * jct[0]


def test_least_requests_passes_by_who_is_busy() -> None:
    """Every second request is long: going round gives all of them to one of two."""
    requests = [TimedRequest(0.05 * k, 64, 200 if k % 2 == 0 else 2) for k in range(24)]
    workload = from_list("long and short", requests)
    spans = {
        router: Replicas(service(max_num_seqs=4), 2, router=router).run(workload).span_s
        for router in ("round-robin", "least-requests")
    }
    assert spans["least-requests"] < 0.8 * spans["round-robin"]


def test_prefix_brings_equal_beginnings_together() -> None:
    requests = [TimedRequest(0.2 * k, 600, 2, blocks=(k * k % 7,)) for k in range(40)]
    workload = from_list("shared", requests)
    hits = {
        router: Replicas(service(), 4, router=router).run(workload).hits["device"]
        for router in ("round-robin", "prefix")
    }
    assert hits["prefix"] > 1.3 * hits["round-robin"] > 0


def test_every_router_of_a_server_runs_here_and_loses_nobody() -> None:
    for name in ROUTERS.names():
        found = Replicas(service(), 3, router=name).run(LOAD)
        assert found.requests.num_output.sum() == sum(r.num_output for r in LOAD), name


def test_more_tokens_to_read_go_to_whoever_has_fewer() -> None:
    """By requests the two long prompts would meet at one engine."""
    sizes = [3000, 16, 3000]
    requests = [TimedRequest(0.001 * k, size, 2) for k, size in enumerate(sizes)]
    workload = from_list("long and short", requests)
    first = {
        router: Replicas(service(), 2, router=router).run(workload).requests.first_token_s[2]
        for router in ("least-requests", "least-tokens")
    }
    assert first["least-tokens"] < 0.9 * first["least-requests"]


def test_a_broken_workload_is_refused_from_a_process_too() -> None:
    broken = from_list("backwards", [TimedRequest(1.0, 4, 1), TimedRequest(2.0, 4, 1), TimedRequest(0.5, 4, 1)])
    for processes in (1, 2):
        with pytest.raises(InputError, match="arrives before"):
            Replicas(service(), 2, processes=processes).run(broken)
    with pytest.raises(ConfigError, match="from 1 to 1024"):
        Replicas(service(), 0).run(LOAD)
    with pytest.raises(ConfigError, match="unknown route_policy 'guess'"):
        Replicas(service(), 2, router="guess").run(LOAD)


def test_a_trace_in_a_row_and_with_other_lengths() -> None:
    hour = from_list("three", [TimedRequest(t, 8, 4, blocks=(1,)) for t in (0.0, 2.0, 4.0)], block_tokens=8)
    day = list(hour.repeated(3))
    assert [r.arrival_s for r in day] == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert hour.repeated(3).num_requests == 9
    small: Workload = hour.resized(0.25)
    assert [(r.num_prompt, r.num_output) for r in small] == [(2, 1)] * 3
    assert small.block_tokens == 2
    with pytest.raises(InputError, match="repeat"):
        hour.repeated(0)
    assert replace(hour, num_requests=None).repeated(2).num_requests is None


def test_the_command() -> None:
    trace = "synthetic:poisson?rate=40&requests=40&prompt=100&output=10"
    args = ("sim", "--trace", trace, "--device", "l4", "--max-model-len", "4096", "--replicas", "3")
    done = penstock(*args, "--router", "least-requests")
    assert done.returncode == 0, done.stderr
    assert "40" in done.stdout
    done = penstock(*args, "--disk-rates", "read=1e9")
    assert done.returncode == 1
    assert "--replicas" in done.stderr


def skewed(seed: int, count: int = 160, rate: float = 20.0) -> Workload:
    """One request in eight is twenty times as long, to read and to answer."""
    rng, now_s, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        long = rng.random() < 1 / 8
        requests.append(TimedRequest(now_s, 3200 if long else 160, 240 if long else 12))
    return from_list("skewed", requests)


def test_I10_least_kv_beats_round_robin_on_skewed_lengths() -> None:
    """On one trace, by each of two seeds: requests wait less, and the worst of them much less."""
    small = service(max_num_seqs=32, num_gpu_blocks_override=450)
    for seed in range(2):
        waits = {}
        for router in ("round-robin", "least-kv"):
            r = Replicas(small, 4, router=router).run(skewed(seed)).requests
            assert len(r.arrival_s) == 160, "policies are compared on the same requests"
            waits[router] = r.first_token_s - r.arrival_s
        assert np.mean(waits["least-kv"]) < 0.6 * np.mean(waits["round-robin"])
        assert np.percentile(waits["least-kv"], 95) < 0.75 * np.percentile(waits["round-robin"], 95)


def conversations(seed: int, talks: int = 60, turns: int = 6) -> Workload:
    """Each turn's prompt is all of the turns before and one piece more; talks take turns at random."""
    rng, left, now_s, requests, next_piece = random.Random(seed), [turns] * talks, 0.0, [], talks
    # A system prompt that all share, and a first word of each.
    texts: list[tuple[int, ...]] = [(0, talk + 1) for talk in range(talks)]
    while any(left):
        talk = rng.choice([n for n in range(talks) if left[n]])
        left[talk] -= 1
        next_piece += 1
        texts[talk] = (*texts[talk], next_piece)
        now_s += rng.expovariate(12)
        requests.append(TimedRequest(now_s, 64 * len(texts[talk]), 4, blocks=texts[talk]))
    return from_list("talks", requests, block_tokens=64)


def test_I10_a_prefix_router_finds_nearly_what_one_big_cache_would() -> None:
    """Four engines whose memory is short of the load, and one of four times the memory; what they tell makes it so."""
    load = conversations(1)
    one = service(num_gpu_blocks_override=4 * 330).run(load).hits
    hits = {name: Replicas(service(num_gpu_blocks_override=330), 4, router=name).run(load).hits["device"]
            for name in ("prefix", "round-robin")}  # fmt: skip
    assert hits["prefix"] >= 0.9 * one["device"]
    assert hits["round-robin"] < 0.7 * one["device"]


def test_I10_simulated_engines_tell_what_they_hold() -> None:
    load, router = conversations(2, talks=20), PrefixRoute()
    each = service(num_gpu_blocks_override=200)
    told = told_by(each, router)
    assert told is not None
    runs = [open_run(each, load, False, told) for _ in range(2)]
    routed = RoutedRuns(router, runs, follows=True)
    most = 0
    for request in load:
        for run in runs:
            run.advance(request.arrival_s)
        routed.offer(request)
        for number, run in enumerate(runs):
            recorder = run.core.kv.events
            assert recorder is not None
            assert router._held[number] == set(recorder._device.values())
            most = max(most, router.num_held(number))
    for run in runs:
        run.advance(None)
    routed._hear()
    assert most > 150, "memory was full"
    assert not any(router._coming.values())
    assert not router._theirs
    assert told_by(service(enable_prefix_caching=False), router) is None
    assert told_by(each, ROUTERS.get("least-kv")()) is None
