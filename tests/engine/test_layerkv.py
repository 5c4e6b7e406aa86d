"""LayerKV (row B24): prompts enter with layers away; the same tokens as ever, sooner where memory is short."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from penstock.base.errors import ConfigError, EngineError
from penstock.config import from_kwargs
from penstock.core.cache_spec import CacheGroup, CacheSpec, PlaneSpec
from penstock.core.model_spec import ModelSpec, cache_spec
from penstock.core.page_ops import HOST, StreamOp
from penstock.core.request import Request
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.kv.layerkv import LayerKVManager, StreamRate
from penstock.ops.native.library import best_library
from penstock.plan.devices import device_preset
from penstock.plan.layerkv import check_layerkv
from penstock.runner.disk_pages import DiskPages
from penstock.sim.metrics import metrics
from penstock.sim.specs import find_spec
from penstock.sim.studies.study import Bench
from penstock.sim.synthetic import synthetic
from tests import specs
from tests.engine.harness import Knobs, fake_engine, plain_core, real_engine, request, run
from tests.engine.naive import beam_search, fake_logits, generate
from tests.engine.test_laws_machine import EngineMachine, _case
from tests.engine.test_laws_machine import knobs as any_knobs
from tests.engine.test_rows import random_prompt

LAYERS: tuple[None, ...] = (None,) * 6


def books(core: EngineCore) -> LayerKVManager:
    assert isinstance(core.kv, LayerKVManager)
    return core.kv


class LayerKVMachine(EngineMachine):
    """The engine's laws, with layers that leave whenever memory is short."""

    windows = LAYERS

    @initialize(knobs=any_knobs, seed=st.integers(0, 2**32))
    def start(self, knobs: Knobs, seed: int) -> None:
        knobs.kv_allocator = "layerkv"
        knobs.num_drafts = 0
        knobs.host_blocks = max(knobs.host_blocks, 64)
        knobs.num_blocks = 64 // knobs.block_size
        knobs.budget = max(knobs.budget, 8)
        knobs.max_num_seqs = 8
        EngineMachine.start(self, knobs, seed)


TestLayerKVLaws = _case(LayerKVMachine)


def mixed_load(rng: random.Random, n: int) -> list[Request]:
    load = []
    for i in range(n):
        prompt = random_prompt(rng, rng.randrange(1, 40))
        kw: dict[str, Any] = {}
        if i % 9 == 3:
            kw = {"beam_width": 3}
        elif i % 7 == 2:
            kw = {"n": 3, "temperature": 0.9, "seed": i}
        load.append(request(prompt, max_tokens=rng.randrange(1, 24), eos=[2] if i % 2 else [], **kw))
    return load


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("depth", [1, 2])
def test_layers_that_leave_change_no_token(depth: int, preemption: str) -> None:
    """More work than fits: samples, beams, preemption, layers that go and come back; against the naive answers."""
    k = Knobs(
        kv_allocator="layerkv", num_blocks=24, budget=24, max_num_seqs=8, max_model_len=64, depth=depth,
        host_blocks=60, preemption=preemption,
    )  # fmt: skip
    core, _ = fake_engine(k, windows=LAYERS)
    load = mixed_load(random.Random(5), 40)
    got = run(core, load)
    for r in load:
        c = got[r.request_id]
        if r.beam is not None:
            assert [(b[0], b[2]) for b in c.beams] == [(w[0], w[2]) for w in beam_search(fake_logits, r)]
        else:
            for i in range(r.n):
                assert (c.tokens[i], c.reasons[i]) == generate(fake_logits, r, i)
    assert books(core).num_layerwise > 3
    assert books(core).num_brought_back > 3
    assert core.stats.num_preemptions > 0, "this load must not fit"


def deep(name: str = "llama_gqa", times: int = 3) -> tuple[ModelSpec, dict[str, Any]]:
    """One of the small models, with its layers several times over."""
    spec, weights = specs.make(name)
    num = len(spec.layers)
    more = {
        f"layers.{n + num * i}.{rest}": array
        for key, array in weights.items()
        if key.startswith("layers.")
        for n, rest in [(int(key.split(".")[1]), key.split(".", 2)[2])]
        for i in range(times)
    }
    return msgspec.structs.replace(spec, layers=spec.layers * times), {**weights, **more}


def prompts(spec: ModelSpec, num: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        request(
            [rng.randrange(3, spec.vocab_size) for _ in range(rng.randrange(4, 40))], request_id=str(i),
            max_tokens=rng.randrange(1, 16),
        )
        for i in range(num)
    ]  # fmt: skip


SHORT = Knobs(kv_allocator="layerkv", num_blocks=16, host_blocks=64, budget=16, max_num_seqs=8, preemption="recompute")
"""Memory for one or two sequences."""


@pytest.mark.parametrize(
    ("ops", "kv_dtype", "tier"),
    [("ref", "float32", "host"), ("native", "float32", "disk"), ("native", "int8", "host"), ("ref", "int8", "disk")],
)
def test_B24_blocks_of_layers_give_the_tokens_of_whole_ones(ops: str, kv_dtype: str, tier: str) -> None:
    """On kernels, with memory that is short, so that layers go, and come back, in the middle of prompts and answers."""
    if ops == "native" and best_library() is None:
        pytest.skip("no native kernels")
    spec, weights = deep()
    ample = real_engine(spec, weights, Knobs(ops=ops, kv_dtype=kv_dtype, num_blocks=400, prefix_cache="none"))
    core = real_engine(spec, weights, changed(SHORT, ops=ops, kv_dtype=kv_dtype, swap_tier=tier))
    wanted = {k: c.tokens for k, c in run(ample, prompts(spec, 24, 1)).items()}
    assert {k: c.tokens for k, c in run(core, prompts(spec, 24, 1)).items()} == wanted
    kv = books(core)
    assert kv.num_layerwise > 5
    assert kv.num_brought_back > 5
    assert core.stats.num_preemptions > 0


def changed(knobs: Knobs, **changes: Any) -> Knobs:
    return Knobs(**{**vars(knobs), **changes})


@pytest.mark.parametrize("depth", [1, 2])
def test_B19_a_column_whose_keys_and_values_are_on_the_disk_runs_together(depth: int) -> None:
    """Eight sequences with memory for two: all decode in every step, none waits, nobody is preempted; same tokens."""
    spec, weights = deep()
    load = [request([3 + i, 5, 7 + i] * 6, request_id=str(i), max_tokens=20) for i in range(8)]
    ample = real_engine(spec, weights, Knobs(num_blocks=400, prefix_cache="none"))
    wanted = {k: c.tokens for k, c in run(ample, load).items()}
    blocks = -(-40 // SHORT.block_size)
    knobs = changed(
        SHORT, num_blocks=8 * 2 * blocks // len(spec.layers) + 2, host_blocks=8 * blocks, swap_tier="disk",
        layer_rows=8, max_model_len=40, depth=depth, budget=160,
    )  # fmt: skip
    core = real_engine(spec, weights, knobs)
    assert {k: c.tokens for k, c in run(core, load).items()} == wanted
    kv, pages = books(core), core.executor.runner.storage.tiers[HOST]  # type: ignore[attr-defined]
    late = real_engine(spec, weights, changed(knobs, num_blocks=knobs.num_blocks + blocks // 3))
    late.add(load[0])
    for _ in range(16):
        late.step()
    assert books(late).num_brought_back > 0, "who is alone uses what nobody needs"
    for item in load[1:]:
        late.add(item)
    for _ in range(2):
        late.step()
    assert len(books(late)._inside) == 8, "and leaves room for all others"
    assert late.stats.num_preemptions == 0
    assert kv.num_layerwise >= 6, "they have their layers away"
    assert (kv.num_waits, core.stats.num_preemptions) == (0, 0)
    assert core.stats.num_steps < 20 + 20, "they decode together"
    assert pages.num_read > 0
    assert pages.num_written > 0


def test_what_waits_on_the_disk_comes_back_past_the_cache(tmp_path: Path) -> None:
    """Drawn pages of whole sectors, of several planes: what was written is read, wherever it lies; what the disk
    changed is noticed where that is asked for; a disk without room, and one that fails, are told of in a sentence."""
    spec = CacheSpec("paged", (PlaneSpec("k", 2, 16, "float32"), PlaneSpec("v", 4, 16, "bfloat16")))
    group, rng = CacheGroup(0, spec, tuple(range(5))), np.random.default_rng(1)
    planes = {p: rng.integers(0, 99, (60, 32, h, 16)).astype(d) for p, h, d in (("k", 2, "f4"), ("v", 4, "u2"))}
    pages = DiskPages((group,), (12,), 32, checked=True, folder=tmp_path)
    before = {name: plane.copy() for name, plane in planes.items()}
    source, there = (rng.permutation(60).astype(np.int32) for _ in range(2))
    pages.write(0, there, planes, source)
    for plane in planes.values():
        plane[:] = 0
    for part in np.array_split(rng.permutation(60), 7):
        assert pages.read(0, there[part], planes, source[part])
    assert all((planes[name] == plane).all() for name, plane in before.items())
    assert pages.num_read == pages.num_written == sum(plane.nbytes for plane in before.values())
    os.pwrite(pages._fds[0], b"changed", 4096)
    assert not all(pages.read(0, there[i : i + 1], planes, source[i : i + 1]) for i in range(60))
    with pytest.raises(ConfigError, match=r"swap_space: .* give less"):
        DiskPages((group,), (1 << 40,), 32, folder=tmp_path)
    pages._fds[-1], fd = os.open(tmp_path, os.O_RDONLY), pages._fds[-1]
    with pytest.raises(EngineError, match="see to the disk"):
        pages.read(0, there, planes, source)
    os.close(fd)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_with_layers_away_replays(tmp_path: Path, depth: int) -> None:
    """What was decided by measured seconds is decided again: they are in the log."""
    spec, weights = deep()
    knobs = changed(SHORT, depth=depth)
    core = real_engine(spec, weights, knobs)
    core.recorder = Recorder()
    emitted, todo = [], prompts(spec, 24, 2)
    while todo or core.has_work:
        for item in todo[:2]:
            core.add(item)
        todo = todo[2:]
        emitted += core.step()
    assert books(core).num_layerwise > 3
    core.recorder.save(tmp_path / "run.log")
    assert replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, knobs, e, c), depth=depth) == emitted


def test_B24_the_first_token_comes_sooner_on_average() -> None:
    """A simulated device whose memory holds four of the sequences that come; what that costs the others is told."""
    bench = Bench(find_spec("llama-3.1-8b"), device_preset("h100-sxm"), scale=1.0, seed=1)
    token_bytes = sum(c.num_bytes for layer in bench.spec.layers if (c := cache_spec(layer, bench.spec.dtype)))
    text = "synthetic:poisson?rate=4&prompt=2000&prompt_cv=0.3&output=200&output_cv=0.5&requests=40"
    found = {}
    for allocator in ("paged", "layerkv"):
        result, _, _ = bench.run_with_stats(
            synthetic(text, 1), allocator, kv_allocator=allocator, kv_cache_memory_bytes=4 * 2200 * token_bytes,
            prefix_cache="none", swap_space=64.0, max_model_len=4096,
            schedule_conservativeness=1.0,
        )  # fmt: skip
        found[allocator] = metrics(result)["latency_s"]
    print({name: (m["ttft"]["mean"], m["tpot"]["mean"], m["jct"]["mean"]) for name, m in found.items()})
    assert found["layerkv"]["ttft"]["mean"] < 0.5 * found["paged"]["ttft"]["mean"]
    growth = found["layerkv"]["tpot"]["mean"] / found["paged"]["tpot"]["mean"]
    assert 1.0 < growth < 4.0
    assert found["layerkv"]["jct"]["mean"] < 1.25 * found["paged"]["jct"]["mean"]


def test_who_decodes_beside_others_keeps_the_bound() -> None:
    """With a bound of nothing no step moves layers for a decode while somebody with whole blocks decodes."""
    core, _ = fake_engine(changed(SHORT, num_blocks=36, budget=64), windows=LAYERS)
    kv = books(core)
    kv._most_s = 1e-9
    kv.rate.stepped(0, 0.001)
    kv.rate.stepped(100, 0.002)
    away: set[int] = set()
    submit = core.executor.submit

    def watch(output: Any) -> None:
        away.update(kv._away)
        moving = any(isinstance(op, StreamOp) for op in output.page_ops)
        whole = [row for row in output.scheduled if row.seq_id not in away]
        if moving and whole and all(row.num_tokens == 1 for row in output.scheduled):
            late = [row for row in output.scheduled if row.seq_id in kv._away]
            assert not late, "a decode moved layers"
        submit(output)

    core.executor.submit = watch  # type: ignore[method-assign]
    load = [request(random_prompt(random.Random(i), 40), request_id=str(i), max_tokens=30) for i in range(12)]
    got = run(core, load)
    assert all(got[r.request_id].tokens[0] == generate(fake_logits, r, 0)[0] for r in load)
    assert kv.num_waits > 5
    assert kv.num_layerwise > 3


def test_the_rate_of_moving_pages() -> None:
    rate = StreamRate()
    assert rate.step_s(5) is None
    for pages in (0, 0, 0):
        rate.stepped(pages, 0.01)
    assert rate.step_s(5) is None, "one kind of steps"
    for pages in (100, 300):
        rate.stepped(pages, 0.01 + pages * 1e-5)
    assert rate.step_s(0) == pytest.approx(0.01)
    assert rate.step_s(200) == pytest.approx(0.012)


FULL = CacheSpec("paged", (PlaneSpec("k", 1, 8, "float32"),))
WINDOW = CacheSpec("window", (PlaneSpec("k", 1, 8, "float32"),), window=4)


@pytest.mark.parametrize(
    ("settings", "groups", "why"),
    [
        ({"swap_space": 0.0}, [(FULL, 6)], "give swap_space"),
        ({"swap_tier": "fastswitch"}, [(FULL, 6)], "use host"),
        ({"speculative_config": {"method": "ngram"}}, [(FULL, 6)], "use one of them"),
        ({}, [(FULL, 3), (WINDOW, 3)], "use paged"),
        ({}, [(FULL, 5)], "use paged"),
    ],
)
def test_where_layers_cannot_be_away(settings: dict[str, Any], groups: list[Any], why: str) -> None:
    config = from_kwargs(model="(test)", **({"kv_allocator": "layerkv", "swap_space": 1.0} | settings))
    made, at = [], 0
    for i, (kept, num) in enumerate(groups):
        made.append(CacheGroup(i, kept, tuple(range(at, at + num))))
        at += num
    with pytest.raises(ConfigError, match=why):
        check_layerkv(config, tuple(made), 6)
    check_layerkv(from_kwargs(model="(test)"), tuple(made), 6)
