"""The memory baselines (rows B02, B07, B08): the same tokens as ever, and what each does to memory, in counts."""

from __future__ import annotations

import gc
import math
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.engine import memory as study
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput
from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec
from penstock.core.page_ops import PageOp
from penstock.core.request import Request
from penstock.engine.core import EngineCore
from penstock.kv import KV_MANAGERS
from penstock.kv.contiguous import ContiguousManager
from penstock.kv.virtual import OS_PAGE_BYTES, lane_blocks
from penstock.kv.vtensor import VTensorManager
from penstock.kv.waste import Waste, waste
from penstock.launch.assemble import connect
from penstock.runner.chunks import ChunkedStorage
from penstock.runner.lazy import LazyStorage
from tests.engine.fake_model import VOCAB, FakeForward, spec
from tests.engine.harness import (
    Collector,
    Knobs,
    assert_idle,
    config_for,
    drain,
    fake_engine,
    plan_for,
    real_engine,
    request,
    run,
    tiny,
)
from tests.engine.naive import beam_search, fake_logits, generate
from tests.engine.test_laws_machine import EXAMPLES, EngineMachine, _case
from tests.engine.test_laws_machine import knobs as any_knobs
from tests.engine.test_rows import random_prompt, watch
from tests.sampled import draws
from tests.shared import shared

BASELINES = ("contiguous", "contiguous-pow2", "contiguous-oracle", "virtual", "vtensor")


# -- the laws -----------------------------------------------------------------------------------------------------


class BaselineMachine(EngineMachine):
    """The engine's laws, with each of the baselines as its memory."""

    @initialize(knobs=any_knobs, seed=st.integers(0, 2**32), allocator=st.sampled_from(BASELINES))
    def start(self, knobs: Knobs, seed: int, allocator: str) -> None:
        knobs.kv_allocator = allocator
        knobs.max_model_len = 64
        super().start(knobs, seed)


class SlotBaselineMachine(BaselineMachine):
    slots = True


TestBaselineLaws = _case(BaselineMachine, draws(EXAMPLES // 2, EXAMPLES))
TestSlotBaselineLaws = _case(SlotBaselineMachine, draws(EXAMPLES // 2, EXAMPLES))


def mixed_load(rng: random.Random, n: int) -> list[Request]:
    load = []
    for i in range(n):
        prompt = random_prompt(rng, rng.randrange(1, 30))
        kw: dict[str, Any] = {}
        if i % 7 == 3:
            kw = {"beam_width": 3}
        elif i % 5 == 2:
            kw = {"n": 3, "temperature": 0.9, "seed": i}
        load.append(request(prompt, max_tokens=rng.randrange(1, 24), eos=[2] if i % 2 else [], **kw))
    return load


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("allocator", BASELINES)
def test_no_allocator_changes_a_token(allocator: str, depth: int) -> None:
    """More work than fits: samples, beams, preemption, swapping; against the naive answers."""
    k = Knobs(
        kv_allocator=allocator, num_blocks=40, budget=24, max_num_seqs=8, max_model_len=56, depth=depth,
        host_blocks=30, preemption="swap",
    )  # fmt: skip
    core, _ = fake_engine(k)
    load = mixed_load(random.Random(5), 40)
    got = run(core, load)
    for r in load:
        c = got[r.request_id]
        if r.beam is not None:
            assert [(b[0], b[2]) for b in c.beams] == [(w[0], w[2]) for w in beam_search(fake_logits, r)]
        else:
            for i in range(r.n):
                assert (c.tokens[i], c.reasons[i]) == generate(fake_logits, r, i)
    assert core.stats.num_forks > 0
    if allocator in ("contiguous-pow2", "virtual"):  # the budget of vtensor is whole chunks
        assert core.stats.num_preemptions > 0, "this load must not fit"
        assert core.stats.num_swaps > 0
    assert core.kv.stats().num_prefix_hit_tokens == 0, "baselines share nothing"


@pytest.mark.parametrize("allocator", BASELINES)
@pytest.mark.parametrize("model", ["slots", "latent", "layernorm"])
def test_real_models_give_the_tokens_of_the_paged_engine(allocator: str, model: str) -> None:
    shape, weights = tiny(model)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, shape.vocab_size) for _ in range(rng.randrange(2, 20))] for _ in range(5)]
    answers = {}
    for name in ("paged", allocator):
        core = real_engine(shape, weights, Knobs(kv_allocator=name, num_blocks=24, max_model_len=32, budget=8))
        load = [request(p, max_tokens=8, n=1 + i % 2, temperature=0.8, seed=i) for i, p in enumerate(prompts)]
        got = run(core, load)
        answers[name] = [got[r.request_id].tokens for r in load]
    assert answers[allocator] == answers["paged"]


# -- the runs -----------------------------------------------------------------------------------------------------


def test_an_unknown_allocator_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown KV allocator 'buddy'"):
        fake_engine(Knobs(kv_allocator="buddy"))
    assert set(KV_MANAGERS.names()) == {"paged", "layerkv", "modules", "contiguous-predicted", *BASELINES}


@pytest.mark.parametrize(
    ("allocator", "blocks"), [("contiguous", 16), ("contiguous-pow2", 4), ("contiguous-oracle", 7)]
)
def test_what_admission_reserves(allocator: str, blocks: int) -> None:
    """A prompt of 13 and 15 answers, in blocks of 4, where 64 is the longest: 27 slots are ever written."""
    core, _ = fake_engine(Knobs(kv_allocator=allocator, max_model_len=64))
    core.add(request(random_prompt(random.Random(0), 13), max_tokens=15))
    core.step()
    (seq,) = core.scheduler.running
    assert core.kv.num_held(seq) == blocks
    assert seq.tables[0].ids == list(range(blocks))


def test_an_outgrown_run_moves_and_may_overlap_itself() -> None:
    """Alone in a pool of one full-length run, a sequence in the middle of it can still double, downwards."""
    core, _ = fake_engine(Knobs(kv_allocator="contiguous-pow2", num_blocks=16, max_model_len=64, budget=64))
    first = request(random_prompt(random.Random(1), 16), max_tokens=1)
    long = request(random_prompt(random.Random(2), 14), max_tokens=50)
    core.add(first)
    core.add(long)
    collector = Collector()
    collector.take(core.step())
    places = []
    while core.has_work:
        runs = [seq.tables[0].ids for seq in core.scheduler.running if seq.request is long]
        places += [(run[0], len(run)) for run in runs]
        collector.take(core.step())
    assert places[0] == (4, 4)
    assert (0, 8) in places, "it moved down, over itself"
    assert places[-1] == (0, 16), "then it grew in place"
    assert collector.requests[long.request_id].tokens[0] == generate(fake_logits, long)[0]
    kv = core.kv
    assert isinstance(kv, ContiguousManager)
    assert kv.num_moved_blocks == 4
    assert core.stats.num_preemptions == 0


def test_growth_inside_a_reservation_copies_nothing_and_never_fails() -> None:
    for allocator in ("contiguous", "contiguous-oracle"):
        core, _ = fake_engine(Knobs(kv_allocator=allocator, num_blocks=32, max_model_len=64, budget=64))
        rng = random.Random(9)
        shapes = [(rng.randrange(1, 30), rng.randrange(1, 30)) for _ in range(30)]
        run(core, [request(random_prompt(rng, p), max_tokens=o) for p, o in shapes])
        kv = core.kv
        assert isinstance(kv, ContiguousManager)
        assert kv.num_moved_blocks == 0
        assert core.stats.num_preemptions == 0


# -- wastes -------------------------------------------------------------------------------------------------------


def test_the_wastes_of_one_sequence_are_what_the_definitions_say() -> None:
    """13 prompt tokens and 15 answers in blocks of 4; the longest is 64; the pool has 20 blocks."""
    expected = {
        # after the first step 13 are filled and 14 are still to come
        "paged": Waste(used=13, reserved=3, internal=0, external=0, cached=0, free=64),
        "contiguous": Waste(used=13, reserved=14, internal=37, external=16, cached=0, free=0),
        "contiguous-pow2": Waste(used=13, reserved=3, internal=0, external=0, cached=0, free=64),
        "contiguous-oracle": Waste(used=13, reserved=14, internal=1, external=0, cached=0, free=52),
        "virtual": Waste(used=13, reserved=3, internal=0, external=0, cached=0, free=64),
    }
    for allocator, want in expected.items():
        k = Knobs(kv_allocator=allocator, num_blocks=20, max_model_len=64, prefix_cache="none", max_num_seqs=1)
        core, _ = fake_engine(k)
        core.add(request(random_prompt(random.Random(0), 13), max_tokens=15))
        core.add(request([5], max_tokens=15))
        core.step()
        got = waste(core.kv, core.scheduler.running, core.scheduler.waiting[0])
        assert got == want, allocator
        assert got.total == 80


@cache
def measured(load: str, allocator: str, block_size: int = 16) -> study.Result:
    """One line of the study's table: some hundred requests in the memory of ten full-length sequences."""
    n = 100 if load == "uniform" else 200
    if load in study.TRACES:
        file, prompt, answer = study.TRACES[load]
        return study.measure(study.traced(shared("data", "traces", file), prompt, answer, n), allocator, block_size)
    return study.measure(getattr(study, load)(n), allocator, block_size)


@pytest.mark.parametrize("load", ["uniform", "lognormal", "azure conversations"])
def test_B02_B03_reserved_memory_against_paged(load: str) -> None:
    """The three wastes are measured; paging holds at least twice the batch of reserving the longest length."""
    results = {name: measured(load, name) for name in ("paged", *BASELINES)}
    paged, reserved, oracle = (results[n] for n in ("paged", "contiguous", "contiguous-oracle"))
    assert paged.batch >= 2 * reserved.batch
    assert paged.used >= 2 * reserved.used
    assert reserved.internal > 0.3, "the longest length is mostly never reached"
    assert reserved.used < 0.45
    assert oracle.internal < 0.02, "who knows the future reserves nothing in vain"
    assert oracle.reserved > 0.1, "but early"
    assert oracle.external > 0.1, "and runs do not fit into each other's gaps"
    # Paging: the last block of each sequence, nothing else; what is free is what the head of the queue cannot start in.
    assert paged.external == 0
    assert paged.worst_tail <= 15
    assert paged.reserved + paged.internal <= 15 * paged.peak / study.POOL_SLOTS
    assert paged.used >= 0.95
    for name, r in results.items():
        assert r.used + r.reserved + r.internal + r.external + r.free == pytest.approx(1), name
    # Virtual memory decides as paging does: it has the same blocks, only with addresses in order.
    assert (results["virtual"].used, results["virtual"].num_steps) == (paged.used, paged.num_steps)


def test_B03_long_prompts_gain_less_than_twice_the_batch() -> None:
    """Where prompts fill 62 % of the context (arXiv summaries), nobody can win 2x: utilisation is what rises."""
    paged, reserved = measured("vidur arxiv", "paged"), measured("vidur arxiv", "contiguous")
    assert paged.used >= 0.95
    assert 1.5 <= paged.batch / reserved.batch < 2


def test_B07_blocks_of_one_token_waste_nothing() -> None:
    fine, coarse = measured("lognormal", "paged", 1), measured("lognormal", "paged", 16)
    assert fine.reserved == fine.internal == fine.external == 0
    assert fine.batch >= coarse.batch
    assert fine.table_bytes > 15 * coarse.table_bytes, "the price: an entry per token"


@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
def test_B07_blocks_of_one_token_are_exact(prefix_cache: str) -> None:
    core, _ = fake_engine(Knobs(block_size=1, num_blocks=150, prefix_cache=prefix_cache, budget=24))
    load = mixed_load(random.Random(6), 25)
    for r in load:
        core.add(r)
    collector = Collector()
    while core.has_work:
        collector.take(core.step())
        w = waste(core.kv, core.scheduler.running)
        if all(seq.request.n == 1 and seq.request.beam is None for seq in core.scheduler.running):
            assert w.internal == w.reserved == 0
    assert_idle(core)
    for r in load:
        if r.beam is None:
            for i in range(r.n):
                assert collector.requests[r.request_id].tokens[i] == generate(fake_logits, r, i)[0]


# -- virtual memory -----------------------------------------------------------------------------------------------


def virtual_engine(layers: int, k: Knobs) -> tuple[EngineCore, LazyStorage]:
    """Tokens of 256 bytes per plane and layer: 16 of them fill a page of memory."""
    mixer = Attention(num_heads=1, num_kv_heads=1, head_dim=64)
    shape = ModelSpec(
        family="fake", vocab_size=VOCAB, hidden_size=1, max_position=512,
        layers=(Layer(mixer=mixer, ffn=FeedForward(width=1)),) * layers,
    )  # fmt: skip
    plan = plan_for(shape, k)
    core = connect(config_for(k), plan, FakeForward(plan.groups), VOCAB, check_invariants=True)
    storage = core.executor._runner.storage  # type: ignore[attr-defined]
    assert isinstance(storage, LazyStorage)
    return core, storage


MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*\n(?:[A-Z].*\n)*?Rss: +([0-9]+) kB$", re.M)


def resident_by_smaps(storage: LazyStorage) -> int:
    """Resident bytes of all mappings that hold planes, by the kernel's other account of it."""
    addresses = [array.ctypes.data for planes in storage.planes for array in planes.values()]
    total = 0
    for low, high, kilobytes in MAPPING.findall(Path("/proc/self/smaps").read_text()):
        first, end = int(low, 16), int(high, 16)
        if any(first <= a < end for a in addresses):
            total += int(kilobytes) * 1024
    return total


@pytest.mark.parametrize("layers", [1, 2])
def test_B08_resident_memory_follows_tokens_within_a_page_per_tensor(layers: int) -> None:
    """Measured from the operating system after every step, over preemptions and ends; the tokens stay exact."""
    gc.collect()  # mappings of other tests would share lines of smaps with ours
    k = Knobs(kv_allocator="virtual", num_blocks=48, max_model_len=256, max_num_seqs=6, budget=40)
    core, storage = virtual_engine(layers, k)
    assert storage.num_bytes == 6 * 256 * layers * 2 * 256, "addresses for six full-length sequences"
    assert storage.resident_bytes() == 0
    token_bytes, budget_bytes = layers * 256, 48 * 4 * layers * 256
    rng = random.Random(4)
    load = [request(random_prompt(rng, rng.randrange(1, 60)), max_tokens=rng.randrange(1, 60)) for _ in range(25)]
    for r in load:
        core.add(r)
    collector = Collector()
    in_step: list[dict[int, int]] = []

    def see(output: SchedulerOutput) -> None:
        """What each sequence on the rank holds while this step runs."""
        in_step.append({s.seq_id: s.num_computed + s.num_inflight for s in core.scheduler.running})

    watch(core, see)
    most = 0
    while core.has_work:
        collector.take(core.step())
        resident = storage.resident_bytes()
        if len(in_step) % 32 == 1:  # its text grows with all that other tests have mapped
            assert resident == resident_by_smaps(storage), "two accounts of the kernel disagree"
        held = in_step[-1]
        used = 2 * token_bytes * sum(held.values())  # keys and values
        assert used <= resident <= used + 2 * len(held) * OS_PAGE_BYTES
        most = max(most, resident)
    assert_idle(core)
    assert core.stats.num_preemptions > 3
    assert most > 0.8 * 2 * budget_bytes
    for r in load:
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]
    # What the last ones held goes back with the next step.
    core.add(request([5], max_tokens=1))
    drain(core, collector)
    assert storage.resident_bytes() == 2 * OS_PAGE_BYTES


@pytest.mark.parametrize("layers", [1, 2])
def test_B08_a_kernel_without_tables_sees_one_array(layers: int) -> None:
    """What it reads through plain strides is what the paged gather reads; with one layer it is contiguous bytes."""
    k = Knobs(kv_allocator="virtual", num_blocks=48, max_model_len=128, budget=64, prefix_cache="none")
    core, storage = virtual_engine(layers, k)
    prompts = [random_prompt(random.Random(i), 13 + 9 * i) for i in range(3)]
    for p in prompts:
        core.add(request(p, max_tokens=20))
    for _ in range(6):
        core.step()
    assert len(core.scheduler.running) == 3
    for seq in core.scheduler.running:
        ids = seq.tables[0].ids
        n = -(-seq.num_computed // 4)
        for layer in range(layers):
            for name in ("k", "v"):
                plain = storage.history(0, name, layer, ids[0], n)
                plane = storage.planes[0][name]
                assert np.shares_memory(plain, plane)
                assert plain.flags.c_contiguous == (layers == 1)
                gathered = plane[[slab * layers + layer for slab in ids[:n]]]
                assert np.array_equal(plain, gathered)
                tokens = plain.reshape(-1, 1, 64)[: seq.num_computed, 0, 0].astype(int) - 1
                assert tokens.tolist() == seq.token_ids[: seq.num_computed].tolist()


def test_B08_lanes_begin_at_pages_and_the_budget_is_memory_not_addresses() -> None:
    plan = plan_for(spec(slots=False), Knobs(max_model_len=100))
    blocks = lane_blocks(plan.groups, 4, 100)
    assert blocks * 4 >= 100
    assert blocks * 4 * 2 * 4 % OS_PAGE_BYTES == 0, "tokens x layers x bytes"
    core, _ = fake_engine(Knobs(kv_allocator="virtual", num_blocks=20, max_model_len=64, max_num_seqs=8, budget=64))
    rng = random.Random(2)
    load = [request(random_prompt(rng, 24), max_tokens=30) for _ in range(6)]
    for r in load:
        core.add(r)
    collector = Collector()
    most = 0
    while core.has_work:
        collector.take(core.step())
        stats = core.kv.stats().groups[0]
        assert stats.total == 20
        assert stats.used <= 20
        most = max(most, stats.used)
    assert most >= 18
    assert core.stats.num_preemptions > 0
    assert_idle(core)


# -- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2])
def test_B09_growth_copies_nothing_and_chunks_go_from_one_sequence_to_the_next(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over preemptions, swaps and ends: exact; memory is what the chunks are, and its fragmentation is counted."""
    monkeypatch.setattr("penstock.kv.vtensor.CHUNK_BYTES", 4096)
    k = Knobs(kv_allocator="vtensor", num_blocks=48, max_model_len=256, max_num_seqs=6, budget=40, host_blocks=40)
    core, storage = virtual_engine(layers, k)
    kv = core.kv
    assert isinstance(storage, ChunkedStorage)
    assert isinstance(kv, VTensorManager)
    chunk_bytes = kv.chunk_blocks * 4 * layers * 256
    assert chunk_bytes == OS_PAGE_BYTES
    assert storage.resident_bytes() == 0
    copies: list[PageOp] = []
    addresses: dict[int, int] = {}
    watch(core, lambda out: copies.extend(op for op in out.page_ops if isinstance(op, PageOp) and op.src >= 0))
    rng = random.Random(4)
    load = [request(random_prompt(rng, rng.randrange(1, 60)), max_tokens=rng.randrange(1, 60)) for _ in range(25)]
    for r in load:
        core.add(r)
    collector, shares = Collector(), []
    while core.has_work:
        collector.take(core.step())
        for seq in core.scheduler.running:
            first = addresses.setdefault((seq.seq_id << 20) + seq.num_preemptions, seq.tables[0].ids[0])
            assert seq.tables[0].ids[0] == first, "it grows where it is"
        live = [s for s in core.scheduler.running if s.tables]
        blocks = [math.ceil(s.num_computed / 4) for s in live]
        held = sum(math.ceil(n / kv.chunk_blocks) for n in blocks)
        assert held <= kv.chunks_held <= 48 // kv.chunk_blocks
        assert 0 <= kv.fragmentation < 1
        shares.append(kv.fragmentation)
        assert storage.resident_bytes() <= 2 * 48 // kv.chunk_blocks * chunk_bytes
    assert_idle(core)
    assert core.stats.num_preemptions > 3
    assert not copies, "nothing is copied to grow"
    assert max(shares) > 0.1
    assert kv.fragmentation == 0.0
    for chunks in storage.chunks.values():
        assert chunks.num_reused > 5 * chunks.num_chunks / 2, "what one gave up another has"
    for r in load:
        assert collector.requests[r.request_id].tokens[0] == generate(fake_logits, r)[0]


def test_B09_a_chunk_of_one_sequence_is_mapped_for_another_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.kv.vtensor.CHUNK_BYTES", 4096)
    core, storage = virtual_engine(1, Knobs(kv_allocator="vtensor", num_blocks=48, max_model_len=256, max_num_seqs=2))
    assert isinstance(storage, ChunkedStorage)
    core.add(request([5] * 40, max_tokens=2))
    drain(core, Collector())
    core.add(request([6] * 9, max_tokens=1))  # it carries what was given up
    drain(core, Collector())
    [keys, values] = storage.chunks.values()
    for chunks in (keys, values):
        assert (chunks.num_chunks, chunks.num_reused) == (3, 1)
        assert sorted([*chunks.free, *chunks.mapped.values()]) == [0, 1, 2]
