"""A store of blocks on the virtual clock: what is read and written takes time, and the books are the engine's own."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.base.clock import VirtualClock
from penstock.base.errors import InputError
from penstock.config import from_kwargs
from penstock.core.page_ops import DISK
from penstock.core.request import Request
from penstock.core.step_shape import StepShape
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, replay
from penstock.executor.sim import SimExecutor
from penstock.executor.sim_files import DiskRates, SimFolder
from penstock.kv.tier_facts import counters_of
from penstock.plan.simulated import sim_plan
from penstock.sim.build import build_sim
from penstock.sim.driver import SimLimits, hits_by_tier, simulate
from penstock.sim.metrics import metrics
from penstock.sim.specs import find_spec
from penstock.sim.store import LOOK_S, SimStore, parse_rates
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import TimedRequest, from_list
from tests.engine.fake_model import spec as fake_spec
from tests.engine.harness import Collected, Knobs, assert_idle, fake_engine, plain_core, plan_for, request, run, tiny

INSTANT = DiskRates(1e15, 1e15, 0.0, 0.0)
TEXT = [3 + i * 7 % 23 for i in range(50)]


class Timer:
    """A second for each step with tokens."""

    name = "second"

    def __init__(self, step_s: float = 1.0, copy_bytes_per_s: float = 1e12) -> None:
        self._step_s, self._copy = step_s, copy_bytes_per_s

    def step_s(self, shape: StepShape) -> float:
        return self._step_s if shape.num_tokens else 0.0

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / self._copy


def sim_core(
    k: Knobs, folder: SimFolder, clock: VirtualClock, *, limit_bytes: int = 1 << 30, timer: Any = None,
    name: str = "llama_gqa",
) -> tuple[EngineCore, SimStore]:  # fmt: skip
    spec = fake_spec(slots=False) if name == "fake" else tiny(name)[0]
    store = SimStore.of(plan_for(spec, k), limit_bytes, folder, load=k.kv_load_policy)
    executor = SimExecutor(timer or Timer(), clock, vocab_size=spec.vocab_size, depth=k.depth, files=store.files)
    core = plain_core(spec, k, executor, clock, store=store.settings)
    core.store_news = store.news
    return core, store


def ended(store: SimStore, clock: VirtualClock) -> None:
    """The engine ends when all is written."""
    clock.advance_to(clock.now() + 60.0)
    store.close()


def answer(core: EngineCore, text: list[int], **more: Any) -> Collected:
    r = request(text, **({"max_tokens": 2} | more))
    return run(core, [r])[r.request_id]


def test_a_load_takes_what_its_bytes_take() -> None:
    """12 blocks, two readers, 0.3 s a block: six rounds."""
    clock, folder = VirtualClock(), SimFolder(INSTANT)
    core, store = sim_core(Knobs(budget=64), folder, clock)
    assert answer(core, TEXT).cached == 0
    ended(store, clock)
    size = store.settings.block_bytes
    assert len(folder.blocks) == 12
    folder.rates = DiskRates(read_bytes_per_s=size * 2 / 0.25, write_bytes_per_s=1e15, read_s=0.05, write_s=0.0)
    core, store = sim_core(Knobs(budget=64), folder, clock)
    began_s = clock.now()
    got = answer(core, TEXT, max_tokens=1)
    assert got.cached == 48
    assert clock.now() - began_s == pytest.approx(6 * 0.3 + 1.0), "the load, and a step"
    assert counters_of(core.kv)["tier_read_bytes:disk"] == 12 * size


def test_others_run_while_blocks_are_read_and_a_step_waits_for_copies_alone() -> None:
    clock, folder = VirtualClock(), SimFolder(INSTANT)
    core, store = sim_core(Knobs(budget=64), folder, clock)
    answer(core, TEXT)
    ended(store, clock)
    folder.rates = DiskRates(1e15, 1e15, read_s=0.75, write_s=0.0)
    core, store = sim_core(Knobs(budget=64), folder, clock, timer=Timer(1.0, store.settings.block_bytes / 5.0))
    other = request([9] * 6, max_tokens=8)
    began_s, when = clock.now(), dict[str, list[float]]()
    core.add(reader := request(TEXT, max_tokens=1))
    core.add(other)
    while core.has_work:
        for out in core.step():
            when.setdefault(out.request_id, []).append(clock.now() - began_s)
    # A block of the other's is full after its prompt, and after its tokens 3 and 7: the step behind waits 5 s for its
    # copy. The blocks have come after 4.5 s: the step that begins then hears of it, and the next one has the reader.
    assert when[other.request_id] == pytest.approx([1, 7, 8, 14, 15, 16, 17, 23])
    assert when[reader.request_id] == pytest.approx([14])


def test_a_restart_finds_what_real_files_give(tmp_path: Path) -> None:
    """The same requests, one after the other, over real files and simulated ones: the same hits of each tier."""
    rng = random.Random(3)
    stems = [[rng.randrange(3, 28) for _ in range(30)] for _ in range(3)]
    texts = [[*rng.choice(stems)[: rng.randrange(4, 30)], *(rng.randrange(3, 28) for _ in range(9))] for _ in range(40)]
    clock, folder = VirtualClock(), SimFolder(INSTANT)
    told: list[list[Any]] = [[], []]
    for part in (texts[:20], texts[20:]):
        k = Knobs(num_blocks=24, budget=64, kv_offload=f"disk:{tmp_path},1GiB")
        real, _ = fake_engine(k)
        virtual, store = sim_core(replace(k, kv_offload="none"), folder, clock, name="fake")
        for core, found in zip((real, virtual), told, strict=True):
            for text in part:
                found.append(answer(core, text, max_tokens=1).cached)
                if core is real:
                    files = core.executor._runner.storage.outside.tiers[DISK]  # type: ignore[attr-defined]
                    while files._waiting_bytes:
                        pass
                answer(core, [5], max_tokens=1)  # hears of it
            found.append(hits_by_tier(core.kv))
        files.close()
        ended(store, clock)
    assert told[0] == told[1]
    assert told[0][-1]["disk"] > 0


def test_what_was_lost_is_computed_and_no_longer_known() -> None:
    clock, folder = VirtualClock(), SimFolder(INSTANT)
    core, store = sim_core(Knobs(budget=64), folder, clock)
    answer(core, TEXT)
    ended(store, clock)
    core, store = sim_core(Knobs(budget=64), folder, clock)
    core.step()  # it has looked
    lost = next(path for path in folder.blocks if path.endswith("-5"))
    del folder.blocks[lost]
    answer(core, TEXT, max_tokens=1)
    assert core.kv.stored is not None
    assert (core.kv.stored.tiers[0].num_lost, core.stats.num_failed_loads) == (1, 1)
    assert core.kv.stored.tiers[0].num_loaded == 11 + 5, "what stood before it was read again"
    assert lost in folder.blocks, "and written anew"
    assert_idle(core)


def test_a_disk_that_does_not_answer_is_given_up() -> None:
    clock, folder = VirtualClock(), SimFolder(INSTANT)
    core, store = sim_core(Knobs(budget=64), folder, clock)
    answer(core, TEXT)
    ended(store, clock)
    folder.rates = DiskRates(read_bytes_per_s=1.0)
    core, store = sim_core(Knobs(budget=64), folder, clock)
    began_s = clock.now()
    answer(core, TEXT, max_tokens=1)
    patience_s = 5.0 + 12 * store.settings.block_bytes / 20e6
    assert clock.now() - began_s == pytest.approx(patience_s + 1.0)


def test_too_much_that_waits_to_be_written_is_not_kept() -> None:
    clock = VirtualClock()
    core, store = sim_core(Knobs(budget=64), folder := SimFolder(), clock)
    folder.rates = DiskRates(write_s=100.0, most_waiting_bytes=3 * store.settings.block_bytes)
    answer(core, TEXT)
    answer(core, [5])
    assert core.kv.stored is not None
    assert len(folder.blocks) == 3
    assert core.kv.stored.tiers[0].num_refused == 9


def test_a_small_store_keeps_the_beginnings_and_two_engines_hear_of_each_other() -> None:
    clock, folder = VirtualClock(), SimFolder(INSTANT)
    size = sim_core(Knobs(), SimFolder(), VirtualClock())[1].settings.block_bytes
    one, first = sim_core(Knobs(budget=64), folder, clock, limit_bytes=8 * size)
    two, second = sim_core(Knobs(budget=64), folder, clock, limit_bytes=8 * size)
    answer(one, TEXT)
    assert {path.rpartition("-")[2] for path in folder.blocks} == {f"{n:x}" for n in range(8)}
    assert answer(two, TEXT, max_tokens=1).cached == 32, "it looks when it begins"
    assert two.kv.stored is not None
    assert not two.kv.stored.tiers[0].index.evicts
    other = [60 - t for t in TEXT]
    answer(one, other)
    assert answer(two, other, max_tokens=1).cached == 0
    two.kv.reset_prefix_cache()
    clock.advance_to(clock.now() + LOOK_S)
    assert answer(two, other, max_tokens=1).cached == 32
    assert two.kv.stored.tiers[0].num_loaded == 16
    for core in (one, two):
        assert core.kv.stored is not None
        core.kv.stored.tiers[0].index.check_invariants()
    first.close()
    clock.advance_to(clock.now() + LOOK_S)
    answer(two, [5])
    assert two.kv.stored.tiers[0].index.evicts, "the other has left"
    assert folder.evictor is second


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["wait", "cake"])
def test_a_run_with_loads_is_replayed_from_its_log(policy: str, depth: int) -> None:
    lengths = "prompt=60&output=12&prompt_cv=1&output_cv=1&shared=32"
    workload = synthetic(f"synthetic:gamma?rate=4&cv=2&requests=120&{lengths}&groups=6", seed=4)
    k = Knobs(num_blocks=40, budget=24, depth=depth, host_blocks=16, offload=True, kv_load_policy=policy)
    clock, folder = VirtualClock(), SimFolder(DiskRates(1e6, 1e6, 0.01, 0.01))
    spec, _ = tiny("llama_gqa")
    core, store = sim_core(k, folder, clock, limit_bytes=200 << 10, timer=Timer(0.05))
    core.recorder = recorder = Recorder()
    limits = SimLimits(spec.max_position, k.num_blocks * k.block_size, spec.vocab_size, truncate=True)
    result = simulate(core, clock, workload, limits)
    assert_idle(core)
    assert core.kv.stored is not None
    assert core.kv.stored.tiers[0].num_loaded > 20, core.kv.stats()
    assert core.kv.stored.tiers[0].index.num_evicted > 0
    assert result.hits["disk"] > 0
    assert result.hits["host"] > 0
    assert metrics(result)["prefix_cache"]["tokens_by_tier"] == hits_by_tier(core.kv)

    def again(executor: Any, clock: Any) -> EngineCore:
        return plain_core(spec, k, executor, clock, store=store.settings)

    assert replay(recorder.iterations, again, depth=depth)
    taken = [item for i in recorder.iterations for item in i.intake if not isinstance(item, Request)]
    assert taken, "the news of the store are in the log"


def test_the_setting_of_the_server_is_the_simulator_s() -> None:
    """Two conversations that push each other out of memory: with a disk they return."""
    spec = find_spec("llama-3.1-8b")
    turns = [TimedRequest(10.0 * n, 512 * (1 + n // 2), 1, blocks=tuple(100 * (n % 2) + i for i in range(1 + n // 2)))
             for n in range(12)]  # fmt: skip
    found = {}
    for offload in ("none", "disk:unused,20GiB"):
        sizes = {"num_gpu_blocks_override": 110, "block_size": 32, "max_model_len": 3200}
        config, plan = sim_plan(from_kwargs(model="(test)", kv_offload=offload, **sizes), spec, 2 * 10**12)
        clock = VirtualClock()
        core = build_sim(config, spec, plan, Timer(0.01), clock, folder=SimFolder(parse_rates("read=1e9,seconds=0")))
        result = simulate(core, clock, from_list("turns", turns), SimLimits(3200, 3520, spec.vocab_size))
        assert result.hits["queried"] == sum(turn.num_prompt for turn in turns)
        found[offload] = result
    with_disk, without = found["disk:unused,20GiB"], found["none"]
    assert without.hits["disk"] == 0
    assert with_disk.hits["disk"] > 0
    assert with_disk.requests.cached.sum() > without.requests.cached.sum()


def test_rates_are_read_and_refused() -> None:
    assert parse_rates("read=2e8, seconds=0.01") == DiskRates(read_bytes_per_s=2e8, read_s=0.01, write_s=0.01)
    for text in ("", "read", "read=0", "read=nan", "speed=3", "seconds=-1"):
        with pytest.raises(InputError, match="disk-rates"):
            parse_rates(text)
