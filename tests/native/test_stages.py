"""H03: a model in stages has the bits of one rank: logits, and what each stage keeps of keys, values and states."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend
from penstock.backends.native.parts import parts_of
from penstock.base.errors import ConfigError
from penstock.core.model_spec import ModelSpec
from penstock.model.graph import NO_LAYER, Graph, Node, Value
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.program import Pool
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.table import CONTRACTS
from penstock.ops.tree import tree_mask
from penstock.parallel import shard as sharding
from penstock.parallel.comm import OneRank, Pipe, SharedComm, shared_memory
from penstock.parallel.pipe import SharedChannel, channel_memory
from penstock.parallel.stages import LINES, stage_of
from penstock.plan.ranks import ranked_groups
from penstock.plan.stages import stage_groups, stage_starts
from tests import specs
from tests.engine.harness import Knobs, config_for
from tests.native.running import ISAS, pytestmark_native
from tests.native.test_laws import in_turmoil
from tests.native.test_model import NATIVE, weights_as
from tests.native.test_ranks import divides
from tests.native.test_stored import model as stored_model
from tests.paged import Paged, _planes
from tests.sampled import draws, some

pytestmark = pytestmark_native
SHAPES = ((2, 1), (4, 1), (2, 2))
"""Stages, and ranks of each."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "UNIT", 5)
    monkeypatch.setattr(sharding, "LEAST_ROWS", 2)


def starts_of(spec: ModelSpec, num_stages: int) -> tuple[int, ...] | None:
    try:
        return stage_starts(config_for(Knobs(ops="native", stages=num_stages)), spec)
    except ConfigError:
        return None


def pool(threads: int) -> NativeBackend:
    return NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), threads, spin_us=5))


class Staged:
    """As `Paged`, on `num_stages` stages of `per` ranks each, in threads."""

    def __init__(
        self, spec: ModelSpec, weights: Any, num_stages: int, per: int = 1, *, threads: int = 1, parts: int = 0,
        slot_bytes: int = 4096, slots: int = 8, change: Callable[[Graph], None] = lambda graph: None, **how: Any,
    ) -> None:  # fmt: skip
        starts, size = starts_of(spec, num_stages), num_stages * per
        assert starts is not None
        self.starts = starts
        everyone, cuts = shared_memory(size), [channel_memory(slots, slot_bytes) for _ in range(size - per)]
        inside = [shared_memory(per) for _ in range(num_stages)] if per > 1 else []
        ring: dict[str, Any] = {"slots": slots, "slot_bytes": slot_bytes, "spin_us": 20}
        self.channels = [SharedChannel(fd, **ring) for fd in cuts]
        self.comms, self.ranks, self.held = [], [], []
        config = config_for(Knobs(ops="native", ranks=per, stages=num_stages))
        for rank in range(size):
            stage = rank // per
            pipe = Pipe(
                stage, starts,
                SharedComm(inside[stage], rank % per, per, slot_bytes=4096, spin_us=20) if per > 1 else None,
                SharedChannel(cuts[rank - per], **ring) if stage else None,
                SharedChannel(cuts[rank], **ring) if rank < len(cuts) else None, parts,
            )  # fmt: skip
            comm = SharedComm(everyone, rank, size, slot_bytes=4096, spin_us=20, pipe=pipe)
            one = Paged(spec, weights, **how)
            change(one.graph)
            whole, _ = ranked_groups(config, spec, one.groups)
            one.groups = stage_groups(whole, pipe.layers)
            one.planes = [_planes(g, 400, one.block_size) for g in one.groups]
            staged = stage_of(one.graph, whole, comm, pipe)
            self.held.append((one.graph, staged))
            one.graph, _ = sharding.shard(staged, one.groups, comm, body=pipe.inner or OneRank())
            one.on(pool(threads))
            self.ranks.append(one)
            self.comms.append(comm)
        for fd in (everyone, *cuts, *inside):
            os.close(fd)
        self._threads = ThreadPoolExecutor(size)

    def each(self, call: Any) -> list[Any]:
        begun = [self._threads.submit(call, rank) for rank in self.ranks]
        return [future.result(60) for future in begun]

    def run(self, work: Any) -> list[dict[Any, Any]]:
        return self.each(lambda rank: {seq: np.array(rows) for seq, rows in rank.run(work).items()})


CASES = [
    (name, stages, per) for name in NATIVE for stages, per in SHAPES
    if starts_of(specs.make(name)[0], stages) is not None and (per == 1 or divides(specs.make(name)[0], per))
]  # fmt: skip


def test_H03_every_kind_of_model_is_cut() -> None:
    assert len({name for name, _, _ in CASES}) >= 0.8 * len(NATIVE)


@pytest.mark.parametrize(("name", "stages", "per"), some(CASES))
def test_H03_logits_and_pages_are_those_of_one_rank(name: str, stages: int, per: int) -> None:
    spec, weights = weights_as(name, "bfloat16")
    rng = random.Random(f"stages-{name}-{stages}-{per}")
    alone = Paged(spec, weights, kv_dtype="bfloat16")
    alone.on(pool(1))
    staged = Staged(
        spec, weights, stages, per, threads=rng.choice([1, 2]), parts=rng.randint(1, 4), kv_dtype="bfloat16"
    )
    ids = {seq: [rng.randrange(3, spec.vocab_size) for _ in range(40)] for seq in "abc"}
    at = dict.fromkeys(ids, 0)
    for _ in range(6):
        work = {}
        for seq in rng.sample(sorted(ids), rng.choice([1, 2, 3])):
            count = min(rng.choice([1, 1, 2, 9]), 40 - at[seq])
            if count:
                work[seq] = (ids[seq][at[seq] : at[seq] + count], range(count))
                at[seq] += count
        want = {seq: np.array(rows) for seq, rows in alone.run(work).items()}
        for got in staged.run(work):
            for seq, rows in want.items():
                assert np.array_equal(rows, got[seq], equal_nan=True), seq
    for number, one in enumerate(staged.ranks):
        layers = range(staged.starts[number // per], staged.starts[number // per + 1])
        for whole, own, planes, parts in zip(alone.groups, one.groups, alone.planes, one.planes, strict=True):
            lines = [i for i, layer in enumerate(whole.layers) if layer in layers]
            assert len(lines) == len(own.layers)
            for plane, array in planes.items():
                heads, held = array.shape[-2], parts[plane].shape[-2]
                first = 0 if held == heads else number % per * heads // per
                there = array.reshape(400, -1, *array.shape[1:])[:, lines][..., first : first + held, :]
                here = parts[plane].reshape(400, len(lines), *parts[plane].shape[1:])
                assert np.array_equal(there, here, equal_nan=True), (own, plane)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_H03_a_step_in_parts_has_the_bits_of_the_whole(parts: int) -> None:
    """A text that is cut within the step, several of them, one token each, and rows that nobody wants."""
    spec, weights = weights_as("llama_gqa", "float32")
    alone = Paged(spec, weights)
    alone.on(pool(1))
    staged = Staged(spec, weights, 2, parts=parts, threads=2)
    ids = [3 + i * 7 % 50 for i in range(60)]
    steps: list[Any] = [
        {"a": (ids[:37], range(37))}, {"a": (ids[37:38], [0]), "b": (ids[:9], [8]), "c": (ids[:11], [])},
        {"a": (ids[38:40], [1]), "b": (ids[9:10], [0]), "c": (ids[11:30], [0, 18])}, {"b": (ids[10:14], [])},
    ]  # fmt: skip
    for work in steps:
        want = {seq: np.array(rows) for seq, rows in alone.run(work).items()}
        for got in staged.run(work):
            for seq, rows in want.items():
                assert np.array_equal(rows, got[seq]), seq
    pieces = [channel.sent.pieces for channel in staged.channels]
    assert pieces == [channel.received.pieces for channel in staged.channels]
    width = spec.hidden_size * 4
    tokens = sum(len(own) for work in steps for own, _ in work.values())
    assert [channel.sent.num_bytes for channel in staged.channels] == [tokens * width], "each row crosses once"


def test_H03_hidden_states_are_on_all_ranks_and_give_the_same_logits_again() -> None:
    spec, weights = weights_as("llama_gqa", "float32")
    alone = Paged(spec, weights)
    alone.on(pool(1))
    staged = Staged(spec, weights, 2, parts=3)
    ids = [3 + i * 7 % 50 for i in range(20)]
    plans = []
    for one in (alone, *staged.ranks):
        one._tables["a"] = [np.zeros((1, 0), np.int32) for _ in one.groups]
        one.lens["a"] = 20
        one._grow("a")
        numbers = np.arange(20, dtype=np.int32)
        groups = tuple(GroupPlan(g.pages_per_slab, one.block_size, (one._tables["a"][g.index],)) for g in one.groups)
        ints = [np.array(ids, np.int32), numbers, np.array([0, 20], np.int32), np.array([20], np.int32)]
        plans.append(
            StepPlan(*ints, np.array([4, 19], np.int32), groups, hidden_indices=np.array([0, 7, 19], np.int32))
        )
    want, states = (np.array(x) for x in alone.program.run_pooling(plans[0], alone.planes))
    again = np.array(alone.program.run_head(states, alone.planes))
    of = dict(zip(map(id, staged.ranks), plans[1:], strict=True))

    def both(one: Any) -> Any:
        logits, hidden = (np.array(x) for x in one.program.run_pooling(of[id(one)], one.planes))
        return logits, hidden, np.array(one.program.run_head(hidden, one.planes))

    for logits, hidden, head in staged.each(both):
        assert np.array_equal(logits, want)
        assert np.array_equal(hidden, states)
        assert np.array_equal(head, again)


def read_again(graph: Graph) -> None:
    """The last layer reads, besides, what the first one gave."""
    early, late = graph.residuals[1], graph.residuals[-2]
    layer = len(graph.residuals) - 2
    at = next(i for i, node in enumerate(graph.nodes) if node.layer == layer)
    both = Node("add", [late, early], layer=layer)
    both.out = Value(both, late.width, late.rows, name="both")
    for node in graph.nodes[at:]:
        node.inputs = [replace(v, maker=both) if v.same(late) else v for v in node.inputs]
    graph.nodes.insert(at, both)
    graph.head += 1


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_H03_what_is_read_further_down_goes_through_the_stages_between(stages: int) -> None:
    spec, weights = weights_as("fixed_experts", "float32")
    alone, plain = Paged(spec, weights), Paged(spec, weights)
    read_again(alone.graph)
    ids = [3 + i * 7 % 50 for i in range(15)]
    want = np.array(alone.on(pool(1)).one_go("a", ids))
    assert not np.array_equal(want, plain.on(pool(1)).one_go("a", ids)), "it matters"
    staged = Staged(spec, weights, stages, parts=2, change=read_again)
    for got in staged.run({"a": (ids, range(15))}):
        assert np.array_equal(want, got["a"])


def test_H03_stored_formats_are_cut_too() -> None:
    spec, weights = stored_model(True)
    alone = Paged(spec, weights)
    alone.on(pool(1))
    staged = Staged(spec, weights, 2, parts=2)
    ids = [3 + i * 7 % 140 for i in range(20)]
    for chunk in (ids[:13], ids[13:14], ids[14:]):
        want = np.array(alone.one_go("a", chunk))
        for got in staged.run({"a": (chunk, range(len(chunk)))}):
            assert np.array_equal(want, got["a"])


def test_H03_a_stage_has_its_own_layers_and_no_others() -> None:
    spec, weights = weights_as("llama_gqa", "bfloat16")
    staged = Staged(spec, weights, 2)
    found = []
    for stage, (_, graph) in enumerate(staged.held):
        layers = range(staged.starts[stage], staged.starts[stage + 1])
        assert {node.layer for node in graph.nodes} <= {*layers, NO_LAYER}
        assert [sum(node.op == op for node in graph.nodes) for op in ("send", "receive")] == [1 - stage, stage]
        found.append(sum(node.op == "embed" for node in graph.nodes))
    assert found == [1, 0], "the table is read where the text comes in"


def test_more_than_a_slot_holds_comes_in_pieces_and_few_slots_are_enough() -> None:
    """Rows of 250 tokens through two slots of a few rows each: the sender waits for slots alone."""
    spec, weights = weights_as("llama_gqa", "float32")
    alone = Paged(spec, weights)
    alone.on(pool(1))
    staged = Staged(spec, weights, 2, slots=2, slot_bytes=1024, threads=2)
    ids = [3 + i % 50 for i in range(250)]
    want = np.array(alone.one_go("a", ids))
    for got in staged.run({"a": (ids, range(250))}):
        assert np.array_equal(want, got["a"])
    assert staged.channels[0].sent.pieces > 20


def test_H03_a_stage_goes_on_while_the_next_one_is_not_there_yet() -> None:
    """The first stage of two does all parts of a step although nobody takes them; only the head needs the other."""
    spec, weights = weights_as("llama_gqa", "float32")
    staged = Staged(spec, weights, 2, parts=4)
    ids = [3 + i * 7 % 50 for i in range(40)]
    first = staged._threads.submit(staged.ranks[0].run, {"a": (ids, [39])})
    for _ in range(2000):
        if staged.channels[0].sent.num_bytes == 40 * spec.hidden_size * 4:
            break
        __import__("time").sleep(0.001)
    assert staged.channels[0].sent.num_bytes == 40 * spec.hidden_size * 4
    assert staged.channels[0].received.pieces == 0
    assert not first.done()
    staged.ranks[1].run({"a": (ids, [39])})
    first.result(60)


def test_every_operation_that_looks_at_a_cache_is_counted_anew() -> None:
    looking = {c.name for c in CONTRACTS if "layer of the" in c.bound}
    assert looking == set(LINES)


def test_parts_of_a_step_are_runs_of_tokens_and_trees_stay_whole() -> None:
    mask, depths = tree_mask([-1, 0, 0, 1])
    masks = np.concatenate([np.zeros(5, np.uint64), mask, np.zeros(3, np.uint64)])
    positions = np.concatenate([np.arange(10, 15), 7 + depths, np.arange(3)]).astype(np.int32)
    tables = tuple(np.arange(8, dtype=np.int32)[None] + 8 * b for b in range(3))
    plan = StepPlan(
        np.arange(12, dtype=np.int32), positions, np.array([0, 5, 9, 12], np.int32), np.array([15, 11, 3], np.int32),
        np.array([4, 5, 6, 7, 8, 11], np.int32), (GroupPlan(1, 4, tables),), mask=masks,
    )  # fmt: skip
    for most in range(2, 12):
        parts = parts_of(plan, plan.logits_indices, most, 1)
        assert 2 <= len(parts) <= most
        assert np.concatenate([p.plan.token_ids for p in parts]).tolist() == list(range(12))
        assert sorted(np.concatenate([p.places for p in parts]).tolist()) == list(range(6))
        tree = [p for p in parts if p.plan.mask is not None and p.plan.mask.any()]
        assert len(tree) == 1, "the tree is in one part"
        for part in parts:
            p = part.plan
            assert plan.token_ids[plan.logits_indices[part.places]].tolist() == p.token_ids[part.rows].tolist()
            for b in range(len(p.seq_lens)):
                rows = slice(*p.query_start_loc[b : b + 2])
                whole = int(p.groups[0].tables[b][0, 0]) // 8
                later = int(plan.query_start_loc[whole + 1] - p.token_ids[rows][-1] - 1)
                assert p.seq_lens[b] == plan.seq_lens[whole] - later
    assert parts_of(plan, plan.logits_indices, 4, 7) == []
    forgot = replace(plan.groups[0], dropped=(None, None, None))
    assert parts_of(replace(plan, groups=(forgot,)), plan.logits_indices, 4, 1) == []


LAWS = some(
    [(name, "float32", "float32", stages, per) for name, stages, per in CASES if (stages, per) != (4, 1)],
    shows=lambda name, _, __, *shape: {shape, *specs.kinds(name)},
)
LAWS += [("llama_gqa", "bfloat16", "int8", 2, 1), ("windowed", "bfloat16", "float32", 2, 1)]


@pytest.mark.parametrize(("name", "dtype", "kv_dtype", "stages", "per"), LAWS)
def test_H03_tokens_are_those_of_one_rank(name: str, dtype: str, kv_dtype: str, stages: int, per: int) -> None:
    """The engine's laws on stages: prefixes, preemption, swapping, forks, at any number of parts. Who alone makes lines
    of a table differ, KV selectors, is refused."""
    rng = random.Random(f"stages-{name}-{dtype}-{stages}-{per}")
    parts = rng.choice([None, 1, 2, 3, 4])
    controls = ["preempt", "preempt", "reset_prefix_cache"]
    in_turmoil(
        name, dtype, kv_dtype, rng, draws(1, 4), controls, ranks=per, stages=stages, microbatches=parts, depth=1
    )  # fmt: skip
