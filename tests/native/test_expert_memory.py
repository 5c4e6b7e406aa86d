"""Experts that are not all in memory: the tokens are those of a model that is."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tools.expert_predictor import recall, record

from penstock.backends.native.experts import ORDERS, PREDICTORS
from penstock.backends.native.experts.activations import ActivationMatching
from penstock.backends.native.experts.cache import ExpertCache, LayerExperts, Piece
from penstock.backends.native.experts.left import LeftExperts
from penstock.backends.native.experts.predictor import LayerRun
from penstock.backends.native.experts.trained import fit
from penstock.backends.native.forward import NativeForward
from penstock.base.errors import ConfigError, EngineError
from penstock.config import from_kwargs
from penstock.core.events import EXPERT_COUNTS
from penstock.core.matrix_format import parse_scheme
from penstock.engine.core import EngineCore
from penstock.ops.native.direct_file import PAGE
from penstock.ops.native.filed import FiledStack, WeightFile, page_sum, stack_sums
from penstock.ops.native.packed_file import PackedStore
from penstock.sched.drafts.fixed import FixedDrafts
from tests.engine.harness import Collector, Knobs, disturbed, real_engine, request
from tests.engine.test_laws_models import CONTROLS, draw_knobs, workload
from tests.native.running import ISAS, pool, pytestmark_native
from tests.native.test_laws import expected
from tests.native.test_model import native, weights_as
from tests.sampled import draws

pytestmark = pytestmark_native
NAMES = ("experts", "fixed_experts", "entries")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))


def experts_of(core: EngineCore) -> Any:
    executor: Any = core.executor
    return executor._runner._forward.stops.cache


def sizes(name: str) -> tuple[int, int, int]:
    """Bytes of a slot, the most experts of a layer, and all."""
    spec, weights = weights_as(name, "float32")
    cache = experts_of(real_engine(spec, weights, Knobs(ops="native", expert_bytes=1 << 30)))
    counts = [b - a for a, b in zip(cache.bounds, cache.bounds[1:], strict=False)]
    return cache.slot_bytes, max(counts), cache.bounds[-1]


@pytest.mark.parametrize("name", NAMES)
def test_C71_C73_C74_tokens_do_not_depend_on_which_experts_are_in_memory(name: str, tmp_path: Any) -> None:
    spec, weights = weights_as(name, "float32")
    tokens, beams = expected(name, "float32", "float32")
    rng = random.Random(f"experts-{name}")
    slot_bytes, least, most = sizes(name)
    for draw in range(draws(2, 40)):
        knobs = draw_knobs(rng)
        knobs.ops, knobs.kv_dtype = "native", "float32"
        knobs.num_blocks = max(knobs.num_blocks, 64 // knobs.block_size + 1)
        knobs.expert_bytes = slot_bytes * rng.randint(least, most) + rng.randrange(slot_bytes)
        knobs.expert_eviction = rng.choice(ORDERS.names())
        knobs.expert_prediction = rng.choice(["none", *PREDICTORS.names()])
        if knobs.expert_prediction == "trained":
            drawn = np.random.default_rng(draw).standard_normal((spec.hidden_size, most), np.float32)
            np.savez(tmp_path / "map.npz", map=drawn, mean=np.zeros(most, np.float32))
            knobs.expert_prediction = f"trained:{tmp_path / 'map.npz'}"
        drafting: dict[str, Any] = {}
        if rng.random() < 0.5:
            knobs.depth, knobs.num_slots = 1, 24
            knobs.num_blocks, knobs.window_blocks, knobs.budget = max(knobs.num_blocks, 41), 0, max(knobs.budget, 16)
            drafting = {"drafts": FixedDrafts(3, 63), "speculation": {"method": "ngram", "prompt_lookup_min": 1}}
        core = real_engine(spec, weights, knobs, **drafting)
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, note=knobs)
        for request_id, samples in tokens.items():
            got = collector.requests[request_id]
            assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (draw, request_id, knobs)
        found = collector.requests["beam"].beams
        assert [(b[0], b[2]) for b in found] == [(b[0], b[2]) for b in beams], (draw, knobs)


class Source:
    """A file of `num` experts in two stacks, each matrix full of its own number."""

    def __init__(self, path: Any, num: int, *, num_bytes: int = 5000 * 8) -> None:
        self.path, self.num, self.num_bytes = path, num, num_bytes
        data = [np.full(num_bytes, 1 + i, np.uint8) for i in range(2 * num)]
        whole = np.concatenate([*data, np.zeros(-len(data) * num_bytes % PAGE, np.uint8)])
        path.write_bytes(whole.tobytes())
        with path.open("rb") as file:
            self.file = WeightFile(file.fileno(), str(path))
        stacks = []
        for s in range(2):
            offset = s * num * num_bytes
            part = whole[offset : offset + num * num_bytes]
            stacks.append(
                FiledStack(self.file, offset, num_bytes, stack_sums(iter([(offset, part)]), offset, num_bytes, num))
            )
        self.pieces = [[Piece(0, stacks[0], i), Piece(2, stacks[1], i)] for i in range(num)]

    def check(self, cache: ExpertCache, experts: list[int]) -> None:
        for expert in experts:
            for stack, (_, address) in enumerate(cache.addresses(expert)):
                found = ctypes.string_at(address, self.num_bytes)
                assert found == bytes([1 + stack * self.num + expert]) * self.num_bytes, expert

    def layers(self, sizes: list[int]) -> list[LayerExperts]:
        ends = np.cumsum(sizes).tolist()
        return [
            LayerExperts(str(n), self.pieces[end - size : end])
            for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]


def test_what_was_asked_for_is_there_whatever_was_expected(tmp_path: Any) -> None:
    sizes = [4, 6, 3]
    source = Source(tmp_path / "experts", sum(sizes))
    rng = random.Random(1)
    for draw in range(draws(12, 200)):
        layers = source.layers(sizes)
        slots = rng.randint(max(sizes), sum(sizes))
        cache = ExpertCache(layers, slots * 2 * 12 * PAGE, ORDERS.get(rng.choice(ORDERS.names())))
        for _ in range(20):
            layer = rng.randrange(3)
            chosen = np.array(sorted(rng.sample(range(sizes[layer]), rng.randint(1, sizes[layer]))))
            experts = cache.ask(layer, chosen)
            for _ in range(rng.randrange(3)):
                later = rng.randrange(3)
                cache.expect(later, np.array(rng.sample(range(sizes[later]), rng.randint(1, sizes[later]))))
            cache.wait(experts)
            assert len({*cache.slots[cache.slots >= 0].tolist()}) == np.count_nonzero(cache.slots >= 0), draw
            source.check(cache, experts.tolist())


def test_what_is_needed_stays_while_everything_else_is_still_coming(tmp_path: Any) -> None:
    source = Source(tmp_path / "experts", 13)
    read, needed_reads, go_on, begun = source.file.read, [0], threading.Event(), threading.Semaphore(0)

    def gated(offset: int, into: Any) -> None:
        expert = (offset + PAGE - 1) // source.num_bytes % 13
        if expert >= 10:
            begun.release()
            assert go_on.wait(60), "three that are needed have come"
        read(offset, into)
        if 4 <= expert < 10:
            needed_reads[0] += 1
            if needed_reads[0] == 6:  # two of each
                go_on.set()

    source.file.read = gated  # type: ignore[method-assign]
    cache = ExpertCache(source.layers([4, 6, 3]), 6 * 2 * 12 * PAGE, ORDERS.get("lifo"))
    cache.wait(cache.ask(0, np.arange(4)))
    cache.expect(2, np.arange(3))
    for _ in range(3):
        assert begun.acquire(timeout=60)
    experts = cache.ask(1, np.arange(6))  # three find room; the others wait until what was expected has come
    cache.wait(experts)
    source.check(cache, experts.tolist())


def damaged(path: Any) -> None:
    with path.open("r+b") as file:
        file.seek(3 * 40000 + 77)
        file.write(b"\xff")


@pytest.mark.parametrize(
    ("harm", "says"), [(damaged, "was changed"), (lambda path: os.truncate(path, 2 * PAGE), "was changed")]
)
def test_a_file_that_changes_under_the_engine_gives_a_sentence_and_no_token(
    tmp_path: Any, harm: Any, says: str
) -> None:
    source = Source(tmp_path / "experts", 4)
    cache = ExpertCache(source.layers([4]), 1 << 30, ORDERS.get("lru"))
    harm(source.path)
    for _ in range(2):  # and again: what could not be read has not become something that is there
        experts = cache.ask(0, np.array([3]))
        with pytest.raises(EngineError, match=f"{says} while its weights were in use; start again"):
            cache.wait(experts)


def test_sums_tell_pages_apart_and_can_be_added() -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 5 * PAGE, np.uint8)
    swapped = np.concatenate([data[PAGE : 2 * PAGE], data[:PAGE], data[2 * PAGE :]])
    assert page_sum(data, 0) != page_sum(swapped, 0)
    for cut in (8, PAGE, PAGE + 64, 3 * PAGE - 8):
        assert (page_sum(data[:cut], 0) + page_sum(data[cut:], cut)) % 2**64 == page_sum(data, 0)
        assert (page_sum(data[:cut], 640) + page_sum(data[cut:], 640 + cut)) % 2**64 == page_sum(data, 640)


def test_a_memory_below_one_layer_is_refused() -> None:
    spec, weights = weights_as("experts", "float32")
    with pytest.raises(ConfigError, match=r"expert_memory_bytes: 4096 holds 0 of 15 experts.*give at least"):
        real_engine(spec, weights, Knobs(ops="native", expert_bytes=4096))
    for more in ({"weight_memory_bytes": 1 << 20}, {"packed_weights": "streamed"}):
        with pytest.raises(ConfigError, match=r"expert_memory_bytes: .* whole layers do; give only one of them"):
            from_kwargs(model="x", expert_memory_bytes=1 << 20, **more)


@pytest.mark.parametrize("scheme", ["none", "int4-wo:32"])
def test_a_later_start_leaves_experts_in_the_file_of_packed_weights(tmp_path: Any, scheme: str) -> None:
    whole = native("experts", ISAS[-1], scheme=scheme)
    work = {"a": ([5, 3, 9, 4, 7, 6], [3, 5])}
    logits = whole.run(work)["a"].copy()
    program: Any = whole.program
    store, key = PackedStore(tmp_path / "weights"), "0" * 64
    assert store.save(key, program.matrices)
    matrices = store.load(key, leave=True)
    assert matrices is not None
    left = {name for name, packed in matrices.items() if packed.filed is not None}
    assert left == {name for name in matrices if ".experts." in name}
    slot_bytes, least, _ = sizes("experts")
    paged = native("experts", ISAS[-1], scheme=scheme)
    made: Any = NativeForward(
        paged.graph, paged.groups, pool(ISAS[-1], 1), parse_scheme(scheme), max_tokens=16, matrices=matrices,
        leave=LeftExperts(slot_bytes * least, "lru", "router"),
    )  # fmt: skip
    paged.program = made
    assert np.array_equal(paged.run(work)["a"], logits)
    assert made.expert_counts[EXPERT_COUNTS.index("expert_read_bytes")] > 0
    with store.path(key).open("r+b") as file:  # of the last expert
        file.seek(-PAGE, os.SEEK_END)
        file.write(b"\x55" * 64)
    assert store.load(key, leave=True) is None


def test_C71_hits_grow_with_the_memory_and_last_in_first_out_keeps_what_order_of_use_puts_out(tmp_path: Any) -> None:
    sizes = [5] * 6
    source = Source(tmp_path / "experts", 30, num_bytes=64)
    rng = random.Random(2)
    routes = [np.array(sorted(rng.sample(range(5), 2))) for _ in range(6)]
    trace = []
    for _ in range(60):  # layers in turns; a choice is kept for some steps
        for n in range(6):
            if rng.random() < 0.2:
                routes[n] = np.array(sorted(rng.sample(range(5), 2)))
            trace.append((n, routes[n]))
    hits: dict[str, list[float]] = {}
    for name in ("lru", "lifo"):
        for slots in (5, 8, 15, 30):
            cache = ExpertCache(source.layers(sizes), slots * 2 * PAGE, ORDERS.get(name))
            assert cache.num_slots == slots
            for layer, chosen in trace:
                cache.wait(cache.ask(layer, chosen))
            counts = cache.counts
            assert counts.num_expert_hits + counts.num_expert_misses == 2 * len(trace)
            assert counts.expert_read_bytes == counts.num_expert_misses * 2 * PAGE
            hits.setdefault(name, []).append(counts.num_expert_hits / (2 * len(trace)))
    for rates in hits.values():
        assert rates == sorted(rates)
        assert rates[-1] > 0.95
    # Six layers of two each pass between two uses: less than that is of no use to order of use.
    assert hits["lru"][1] < 0.1 < 0.2 < hits["lifo"][1], hits


def test_C73_a_trained_predictor_foresees_more_than_the_most_used_and_fetches_what_it_misses(tmp_path: Any) -> None:
    spec, weights = weights_as("experts", "float32")
    rng = random.Random(3)
    texts = [[rng.randrange(3, spec.vocab_size) for _ in range(40)] for _ in range(30)]

    def serve(core: EngineCore) -> list[list[int]]:
        collector = Collector()
        for i, text in enumerate(texts):
            core.add(request(text, request_id=str(i), max_tokens=2))
        while core.has_work:
            collector.take(core.step(), 0)
        return [collector.requests[str(i)].tokens[0] for i in range(len(texts))]

    knobs = Knobs(ops="native", expert_bytes=1 << 30, prefix_cache="none", num_blocks=128)
    core = real_engine(spec, weights, knobs)
    executor: Any = core.executor
    recorder = record(executor._runner, lambda: serve(core))
    rows, used = np.concatenate(recorder.rows[0]), recorder.used()
    cut = len(rows) * 3 // 4
    found, mean = fit(rows[:cut], used[:cut])
    likely, usual = rows[cut:] @ found + mean, np.broadcast_to(mean, (len(rows) - cut, len(mean)))
    # The first layer's own choice is known by then.
    own, sizes_of = slice(recorder.sizes[0], None), recorder.sizes[1:]
    foreseen, frequent = (recall(guess[:, own], used[cut:, own], sizes_of) for guess in (likely, usual))
    assert foreseen > 1.05 * frequent, (foreseen, frequent)
    np.savez(tmp_path / "map.npz", map=found, mean=mean)
    slot_bytes, least, _ = sizes("experts")
    small = real_engine(
        spec,
        weights,
        replace(knobs, expert_bytes=slot_bytes * least, expert_prediction=f"trained:{tmp_path / 'map.npz'}"),
    )
    assert serve(small) == serve(core)
    stats = small.stats
    assert stats.num_experts_foreseen > 0 < stats.num_expert_misses  # told, and fetched where it was wrong
    assert stats.expert_stall_s > 0


@pytest.mark.parametrize(
    ("prediction", "says"),
    [
        ("trained", "trained needs a file"), ("trained:/nowhere", "cannot be read as a predictor"),
        ("oracle", "choose one of"), ("router:3", "takes no option"),
    ],
)  # fmt: skip
def test_a_prediction_that_cannot_be_had_is_refused(prediction: str, says: str) -> None:
    spec, weights = weights_as("experts", "float32")
    with pytest.raises(ConfigError, match=f"expert_prediction.*{says}"):
        real_engine(spec, weights, Knobs(ops="native", expert_bytes=1 << 30, expert_prediction=prediction))


def topics(rng: np.random.Generator, topic: int, steps: int) -> list[npt.NDArray[np.int64]]:
    """Routing of one sequence, [layers, K] a step: mostly its topic's experts, whatever step it is."""
    liked = np.random.default_rng([7, topic]).permuted(np.tile(np.arange(16), (4, 1)), axis=1)
    found = []
    for _ in range(steps):
        chance = np.full(16, 0.01)
        chance[:5] = 1.0
        picks = [rng.choice(16, 2, replace=False, p=chance / chance.sum()) for _ in range(4)]
        found.append(np.stack([liked[n][p] for n, p in enumerate(picks)]))
    return found


def test_C74_matrices_of_like_sequences_foresee_more_than_recency_and_frequency() -> None:
    rng = np.random.default_rng(0)
    predictor = ActivationMatching([None] * 4, [16] * 4)
    counts = np.zeros((4, 16))
    recall = dict.fromkeys(("matched", "recent", "frequent"), 0)
    last: dict[int, list[int]] = {n: [] for n in range(4)}
    for sequence in range(40):
        held_out = sequence >= 24
        gone = [sequence - 1] if sequence else []
        for step, routes in enumerate(topics(rng, sequence % 6, 6)):
            predictor.begin([sequence], gone if not step else [])
            for n in range(4):
                run = LayerRun(n, routes[n][None], np.zeros((1, 1), np.float32), np.zeros(1, np.int32))
                predictor.after(run)
                likely = predictor.expected(predictor.running[sequence]).reshape(4, 16)
                if held_out and n < 3:
                    actual = {*routes[n + 1].tolist()}
                    recall["matched"] += len(actual & {*np.argsort(-likely[n + 1])[:2].tolist()})
                    recall["recent"] += len(actual & {*last[n + 1][:2]})
                    recall["frequent"] += len(actual & {*np.argsort(-counts[n + 1])[:2].tolist()})
                if not held_out:
                    np.add.at(counts[n], routes[n], 1)
                last[n] = [*routes[n].tolist(), *(e for e in last[n] if e not in routes[n])]
    assert recall["matched"] > 1.1 * recall["recent"], recall
    assert recall["matched"] > 1.5 * recall["frequent"], recall
