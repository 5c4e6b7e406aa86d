"""H11, H12: sequences whose tokens are shared out over ranks have the logits of one rank, within 1e-5."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend
from penstock.base.errors import ConfigError, EngineError
from penstock.core.model_spec import Attention, Latent, ModelSpec, cache_groups
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.program import Pool
from penstock.parallel import shard as sharding
from penstock.parallel.comm import SharedComm, shared_memory
from penstock.plan.ranks import even_ranges, ranked_groups
from tests import specs
from tests.engine.harness import Knobs, config_for, plan_for, real_engine, request, run
from tests.native.running import ISAS, pytestmark_native
from tests.native.test_laws import in_turmoil
from tests.native.test_model import NATIVE, weights_as
from tests.paged import Paged, _planes
from tests.sampled import draws, some

pytestmark = pytestmark_native
SIZES = (2, 4)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiny models are shared out, too."""
    monkeypatch.setattr(sharding, "UNIT", 5)
    monkeypatch.setattr(sharding, "LEAST_ROWS", 2)


UNSTEADY = {"sandwich": 1e-4}
"""Norms of sums make a difference of 1e-7 a large one: native and reference operations differ by 4e-4 there."""


def model(name: str) -> tuple[ModelSpec, Any]:
    """Of those with latent attention the first layer: the second one's heads divide by three alone."""
    spec, weights = weights_as(name, "float32")
    if name == "latent":
        spec = msgspec.structs.replace(spec, layers=spec.layers[:1])
        weights = {key: w for key, w in weights.items() if not key.startswith("layers.1.")}
    return spec, weights


def shares(name: str, size: int) -> bool:
    """Whether any of its layers' tokens are shared out over so many ranks."""
    spec = model(name)[0]
    mixers = [layer.mixer for layer in spec.layers]
    if any(isinstance(m, Attention) and m.num_heads % size for m in mixers):
        return False
    plain = (m for m in mixers if type(m) in (Attention, Latent))
    return any(not getattr(m, "indexer", None) and not getattr(m, "reads_choice", False) for m in plain)


class Shared:
    """As `Paged`, on `size` ranks in threads, each of which has some tokens of every sequence."""

    def __init__(
        self, spec: ModelSpec, weights: Any, size: int, *, threads: int = 1, reduce: str = "flat",
        slot_bytes: int = 4096, **how: Any,
    ) -> None:  # fmt: skip
        memory = shared_memory(size, slot_bytes)
        self.comms = [SharedComm(memory, rank, size, slot_bytes=slot_bytes, spin_us=20) for rank in range(size)]
        os.close(memory)
        self.ranks, self.size = [], size
        for comm in self.comms:
            rank = Paged(spec, weights, **how)
            rank.groups, self.why = ranked_groups(
                config_for(Knobs(ops="native", ranks=size, by_tokens=reduce)), spec, rank.groups
            )
            rank.planes = [_planes(g, 400, rank.block_size) for g in rank.groups]
            rank.graph, _ = sharding.shard(rank.graph, rank.groups, comm, pairwise=reduce == "tree")
            rank.on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), threads, spin_us=5)))
            self.ranks.append(rank)
        self._threads = ThreadPoolExecutor(size)

    def run(self, work: Any) -> dict[Any, Any]:
        """What all ranks say alike."""
        begun = [self._threads.submit(rank.run, work) for rank in self.ranks]
        said = [{seq: np.array(rows) for seq, rows in future.result(60).items()} for future in begun]
        for other in said[1:]:
            for seq, rows in said[0].items():
                assert np.array_equal(rows, other[seq]), "all ranks have the same logits"
        return said[0]

    def given(self) -> list[tuple[int, int, int]]:
        """Exchanges, bytes and merged parts of each rank so far."""
        exchange = self.comms[0].exchange
        return [(*exchange.given(rank), exchange.merged(rank)) for rank in range(self.size)]


def alone(spec: ModelSpec, weights: Any, **how: Any) -> Paged:
    return Paged(spec, weights, **how).on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), 1, spin_us=5)))


def close(got: Any, want: Any, to: float = 1e-5) -> None:
    assert np.abs(got - want).max() <= to * np.abs(want).max()


CASES = [(name, size) for name in NATIVE for size in SIZES if shares(name, size)]


@pytest.mark.parametrize(("name", "size", "reduce"), some((*case, how) for case in CASES for how in ("flat", "tree")))
def test_H11_H12_logits_are_those_of_one_rank_and_pages_hold_a_ranks_own_tokens(
    name: str, size: int, reduce: str
) -> None:
    spec, weights = model(name)
    rng = random.Random(f"tokens-{name}-{size}")
    one = alone(spec, weights)
    ranked = Shared(spec, weights, size, threads=rng.choice([1, 2]), reduce=reduce)
    ids = {seq: [rng.randrange(3, spec.vocab_size) for _ in range(44)] for seq in "abc"}
    at = dict.fromkeys(ids, 0)
    for _ in range(8):
        work = {}
        for seq in rng.sample(sorted(ids), rng.choice([1, 2, 3])):
            count = min(rng.choice([1, 1, 2, 9]), 44 - at[seq])
            if count:
                work[seq] = (ids[seq][at[seq] : at[seq] + count], range(count))
                at[seq] += count
        want = {seq: np.array(rows) for seq, rows in one.run(work).items()} if work else {}
        got = ranked.run(work) if work else {}
        for seq, rows in want.items():
            close(got[seq], rows, UNSTEADY.get(name, 1e-5))
    shared = 0
    for rank, own in enumerate(ranked.ranks):
        for group, planes, parts in zip(own.groups, one.planes, own.planes, strict=True):
            step = group.spec.ranks
            shared += step > 1
            for plane, array in planes.items():
                mine = array[:, rank % step :: step] if step > 1 else array
                assert parts[plane].shape == mine.shape, "1 / size of the memory"
                assert np.array_equal(np.isnan(mine), np.isnan(parts[plane])), "a rank writes its own tokens alone"
                there = ~np.isnan(mine)
                if there.any() and not np.array_equal(mine[there], parts[plane][there]):
                    close(parts[plane][there], mine[there], UNSTEADY.get(name, 1e-5))
    assert shared, "something is shared out"


@pytest.mark.parametrize(("kv_dtype", "to"), [("bfloat16", 2e-2), ("int8", 5e-2)])
def test_H11_keys_and_values_of_fewer_bits_go_the_same_way(kv_dtype: str, to: float) -> None:
    """Codes differ where a number lies between two of them, so this is about scales and places, not about bits."""
    spec, weights = weights_as("llama_mqa", "float32")
    ids = [3 + i * 7 % 60 for i in range(40)]
    want = np.array(alone(spec, weights, kv_dtype=kv_dtype).one_go("a", ids))
    close(Shared(spec, weights, 4, kv_dtype=kv_dtype).run({"a": (ids, range(40))})["a"], want, to)


@pytest.mark.parametrize("reduce", ["flat", "tree"])
@pytest.mark.parametrize("name", ["llama_mqa", "scores", "latent", "windowed"])
def test_H11_a_row_has_its_bits_in_every_batch(name: str, reduce: str) -> None:
    spec, weights = model(name)
    size = 4 if shares(name, 4) else 2
    ids = [3 + i * 11 % 50 for i in range(60)]
    want = Shared(spec, weights, size, reduce=reduce).run({"a": (ids, range(60))})["a"]
    busy, rng, at = Shared(spec, weights, size, threads=2, reduce=reduce, seed=3), random.Random(name), 0
    while at < 60:
        count = min(rng.choice([1, 1, 3, 8, 17]), 60 - at)
        work = {"a": (ids[at : at + count], range(count))}
        for other in range(rng.choice([0, 1, 3])):
            tokens = [rng.randrange(3, 50) for _ in range(rng.choice([1, 2, 12]))]
            work[at, other] = (tokens, [len(tokens) - 1])
        work = {seq: work[seq] for seq in rng.sample(list(work), len(work))}
        assert np.array_equal(busy.run(work)["a"], want[at : at + count])
        at += count


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reduce", ["flat", "tree"])
def test_H11_H12_bytes_of_a_step_are_the_formula_and_know_nothing_of_the_context(reduce: str, size: int) -> None:
    """A layer gathers q, k and v, merges what ranks found of (W + 2) numbers a head, and then goes on as ever."""
    spec, weights = weights_as("llama_mqa", "float32")
    ranked = Shared(spec, weights, size, reduce=reduce, slot_bytes=1 << 16)
    grown = []
    for length in (5, 150):
        ranked.run({length: ([3 + i % 40 for i in range(length)], [length - 1])})
        before = ranked.given()
        ranked.run({length: ([7], [0])})
        grown.append(
            [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(before, ranked.given(), strict=True)]
        )
    assert grown[0] == grown[1], "a step of one token gives as much behind 5 tokens as behind 150"
    layers = len(spec.layers)
    for rank in range(size):

        def own(width: int, unit: int = 5, rank: int = rank) -> int:
            first, last = even_ranges(width, size, unit)[rank]
            return last - first

        columns = merged = 0
        for layer in spec.layers:
            m = layer.mixer
            assert isinstance(m, Attention)
            assert layer.ffn is not None
            columns += m.num_heads * m.head_dim // size
            apart = m.head_dim > 5 * (size - 1)  # k and v are one head each
            columns += 2 * own(m.head_dim) * apart
            columns += m.num_heads * m.value_dim // size + 2 * own(spec.hidden_size) + own(layer.ffn.width)
            merged += m.num_heads // size * (m.value_dim + 2)
        want = 4 * (size - 1) * (columns + merged + own(spec.vocab_size))
        exchanges, num_bytes, parts = grown[0][rank]
        assert num_bytes == want, rank
        turns = 1 if reduce == "flat" else size.bit_length() - 1
        assert exchanges == layers * (5 + 2 * apart + turns) + 1
        assert parts == layers * (size - 1 if reduce == "flat" else size.bit_length() - 1), "n - 1, or log2 n"


def test_H09_tokens_go_round_so_that_every_rank_reads_as_many_keys() -> None:
    """Counted by the kernels, token by token: a rank has at most one more than another, however long the text is."""
    spec, weights = weights_as("llama_mqa", "float32")
    ranked = Shared(spec, weights, 4)
    for i in range(120):
        ranked.run({"a": ([3 + i % 40], [0])})
    read = [rank.program.keys_read[0] for rank in ranked.ranks]
    assert sum(read) == len(spec.layers) * 120 * 121 // 2, "every key once"
    assert max(read) * 4 / sum(read) < 1.04


def test_more_parts_than_a_slot_holds_come_in_pieces_of_rows() -> None:
    spec, weights = weights_as("llama_gqa", "float32")
    ids = [3 + i % 50 for i in range(250)]
    want = np.array(alone(spec, weights).one_go("a", ids))
    for reduce in ("flat", "tree"):
        close(
            Shared(spec, weights, 2, threads=2, reduce=reduce, slot_bytes=2048).run({"a": (ids, range(250))})["a"], want
        )


LAWS = [("llama_mqa", 2, "flat"), ("llama_gqa", 4, "tree"), ("scores", 2, "flat"), ("windowed", 2, "tree"),
        ("yoco", 4, "flat"), ("slots", 4, "flat")]  # fmt: skip


@pytest.mark.parametrize(("name", "size", "reduce"), LAWS)
def test_H11_tokens_depend_on_nothing_but_the_request(name: str, size: int, reduce: str) -> None:
    """The engine's laws: prefixes, preemption, swapping, samples, beams. Logits differ by 1e-5, no token does."""
    if not shares(name, size):
        pytest.skip("heads do not divide")
    rng = random.Random(f"tokens-{name}-{size}")
    for _ in range(draws(1, 6)):
        block_size = size * rng.choice([1, 2, 4])
        in_turmoil(name, "float32", "float32", rng, 1, ranks=size, by_tokens=reduce, depth=1, block_size=block_size)


def test_B17_a_request_longer_than_one_rank_could_hold_ends_on_two() -> None:
    """Of the same memory for each rank two have twice the tokens; the request's are those of one large rank."""
    spec, weights = weights_as("llama_mqa", "float32")
    small = Knobs(ops="native", block_size=4, num_blocks=12, prefix_cache="none", max_model_len=128)
    two = Knobs(
        ops="native", block_size=4, num_blocks=24, prefix_cache="none", max_model_len=128, ranks=2, by_tokens="flat"
    )
    large = Knobs(ops="native", block_size=4, num_blocks=24, prefix_cache="none", max_model_len=128)
    held = plan_for(spec, small).kv_bytes
    assert plan_for(spec, two).kv_bytes == held
    told = request([3 + i * 7 % 50 for i in range(40)], request_id="long", max_tokens=50)
    found = {}
    for name, knobs in (("two", two), ("large", large)):
        core = real_engine(spec, weights, knobs)
        if name == "two":
            assert [rank.storage.num_bytes for rank in core.executor.runners] == [held, held]
        found[name] = run(core, [told])["long"].tokens[0]
        core.executor.close()
    assert found["two"] == found["large"]
    assert len(found["two"]) == 50
    core = real_engine(spec, weights, small)
    with pytest.raises(EngineError, match="the KV pool is too small"):
        run(core, [told])
    core.executor.close()


def test_what_needs_all_tokens_stays_whole_and_is_said() -> None:
    def ranked(name: str, size: int) -> Any:
        spec = specs.make(name)[0]
        config = config_for(Knobs(ops="native", ranks=size, by_tokens="flat"))
        return ranked_groups(config, spec, cache_groups(spec, "float32"))

    groups, why = ranked("slots", 2)
    assert {g.spec.kind: g.spec.ranks for g in groups} == {"slot": 1, "paged": 2}
    assert why == "each rank keeps 1 of 2 tokens of 2 layers, and all of 2"
    for name, size in (("indexed", 3), ("indexed", 2), ("latent", 2), ("entries", 2), ("mamba", 2)):
        with pytest.raises(ConfigError, match="nothing that this model keeps can be shared out by tokens"):
            ranked(name, size)
