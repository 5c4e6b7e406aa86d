"""H01: a model shared out over ranks has the bits of one rank: logits, and what each rank keeps of keys and values."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from penstock.backends.native.backend import NativeBackend
from penstock.core.model_spec import Attention, ModelSpec
from penstock.ops.native.library import libraries, open_library
from penstock.ops.native.program import Pool
from penstock.parallel import shard as sharding
from penstock.parallel.comm import SharedComm, shared_memory
from penstock.plan.ranks import even_ranges, ranked_groups
from tests import specs
from tests.engine.harness import Knobs, config_for
from tests.native.running import ISAS, pytestmark_native
from tests.native.test_laws import in_turmoil
from tests.native.test_model import NATIVE, weights_as
from tests.native.test_stored import model as stored_model
from tests.paged import Paged, _planes
from tests.sampled import draws, some

pytestmark = pytestmark_native
SIZES = (2, 4)


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tiny models are shared out, too; 5 columns at a time, so that nothing depends on round numbers."""
    monkeypatch.setattr(sharding, "UNIT", 5)
    monkeypatch.setattr(sharding, "LEAST_ROWS", 2)
    return


def divides(spec: ModelSpec, size: int) -> bool:
    return all(layer.mixer.num_heads % size == 0 for layer in spec.layers if isinstance(layer.mixer, Attention))


class Ranked:
    """As `Paged`, on `size` ranks in threads. `comms`: of the ranks, where they share no memory."""

    def __init__(
        self, spec: ModelSpec, weights: Any, size: int, *, threads: int, sums: bool = False,
        whole_experts: bool = False, comms: Sequence[SharedComm] | None = None, **how: Any,
    ) -> None:  # fmt: skip
        memory = shared_memory(size)
        self.comms = comms or [SharedComm(memory, rank, size, slot_bytes=4096, spin_us=20) for rank in range(size)]
        os.close(memory)
        self.ranks, self.held = [], []
        for comm in self.comms:
            rank = Paged(spec, weights, **how)
            rank.groups, _ = ranked_groups(config_for(Knobs(ops="native", ranks=size)), spec, rank.groups)
            rank.planes = [_planes(g, 400, rank.block_size) for g in rank.groups]
            whole = rank.graph
            rank.graph, rows = sharding.shard(whole, rank.groups, comm, sums=sums, whole_experts=whole_experts)
            self.held.append((whole, rank.graph, rows))
            rank.on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), threads, spin_us=5)))
            self.ranks.append(rank)
        self._threads = ThreadPoolExecutor(size)

    def run(self, work: Any) -> list[dict[Any, Any]]:
        begun = [self._threads.submit(rank.run, work) for rank in self.ranks]
        return [{seq: np.array(rows) for seq, rows in future.result(60).items()} for future in begun]


CASES = [(name, size) for name in NATIVE for size in SIZES if divides(specs.make(name)[0], size)]


@pytest.mark.parametrize(("name", "size"), some(CASES))
def test_H01_logits_and_pages_are_those_of_one_rank(name: str, size: int) -> None:
    spec, weights = weights_as(name, "bfloat16")
    rng = random.Random(f"ranks-{name}-{size}")
    alone = Paged(spec, weights, kv_dtype="bfloat16")
    alone.on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), 1, spin_us=5)))
    ranked = Ranked(spec, weights, size, threads=rng.choice([1, 2]), kv_dtype="bfloat16")
    ids = {seq: [rng.randrange(3, spec.vocab_size) for _ in range(40)] for seq in "abc"}
    at = dict.fromkeys(ids, 0)
    for _ in range(6):
        work = {}
        for seq in rng.sample(sorted(ids), rng.choice([1, 2, 3])):
            count = min(rng.choice([1, 1, 2, 9]), 40 - at[seq])
            if count:
                work[seq] = (ids[seq][at[seq] : at[seq] + count], range(count))
                at[seq] += count
        if not work:
            continue
        want = {seq: np.array(rows) for seq, rows in alone.run(work).items()}
        for got in ranked.run(work):
            for seq, rows in want.items():
                assert np.array_equal(rows, got[seq], equal_nan=True), seq
    for rank, own in enumerate(ranked.ranks):
        for group, planes, parts in zip(own.groups, alone.planes, own.planes, strict=True):
            for plane, array in planes.items():
                heads, held = array.shape[-2], parts[plane].shape[-2]
                first = 0 if held == heads else rank * heads // size
                assert np.array_equal(array[..., first : first + held, :], parts[plane], equal_nan=True), (group, plane)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tied", [False, True])
def test_H01_stored_formats_are_shared_out_by_rows(tied: bool, size: int) -> None:
    """Codes of many formats, groups over inputs, blocks of rows and orders of inputs among them: nothing is rounded."""
    spec, weights = stored_model(tied)
    alone = Paged(spec, weights)
    alone.on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), 1, spin_us=5)))
    ranked = Ranked(spec, weights, size, threads=1)
    ids = [3 + i * 7 % 140 for i in range(20)]
    for chunk in (ids[:13], ids[13:14], ids[14:]):
        want = np.array(alone.one_go("a", chunk))
        for got in ranked.run({"a": (chunk, range(len(chunk)))}):
            assert np.array_equal(want, got["a"])


def test_H01_ranks_have_a_part_of_the_weights_each() -> None:
    """Every row of a product's weights is on one rank, but for heads that several need."""
    spec, weights = weights_as("llama_gqa", "bfloat16")
    ranked = Ranked(spec, weights, 2, threads=1)
    (whole, _, _), *_ = ranked.held
    for node in whole.nodes:
        if node.op == "linear":
            runs = sorted(rows[node.weights[0]] for _, _, rows in ranked.held)
            assert [runs[0][0], runs[0][1], runs[1][1]] == [0, runs[1][0], node.bound[0].shape[0]]


def test_H01_bytes_between_ranks_are_what_the_formula_says() -> None:
    """A rank gives its part of a row to each of the others: of what attention reads, of what it adds, of what the
    activation and the second product give, and of the logits."""
    spec, weights = weights_as("llama_gqa", "bfloat16")
    size, tokens = 2, 7
    ranked = Ranked(spec, weights, size, threads=1)
    ranked.run({"a": (list(range(3, 3 + tokens)), [tokens - 1])})
    mixers = [layer.mixer for layer in spec.layers]
    per_rank = [0] * size
    for rank in range(size):

        def own(width: int, unit: int = 5, rank: int = rank) -> int:
            first, last = even_ranges(width, size, unit)[rank]
            return last - first

        for n, mixer in enumerate(mixers):
            assert isinstance(mixer, Attention)
            assert spec.layers[n].ffn is not None
            rows = tokens if n < len(mixers) - 1 else 1  # behind the last keys and values the wanted row alone
            heads = mixer.num_heads * mixer.head_dim // size
            columns = heads + own(spec.hidden_size) + own(spec.layers[n].ffn.width) + own(spec.hidden_size)
            per_rank[rank] += 4 * rows * columns
        per_rank[rank] += 4 * own(spec.vocab_size)
    exchange = ranked.comms[0].exchange
    assert [exchange.given(rank)[1] for rank in range(size)] == per_rank
    assert {exchange.given(rank)[0] for rank in range(size)} == {4 * len(mixers) + 1}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["llama_gqa", "llama_mha", "llama_biased", "parallel", "sandwich", "slots"])
def test_H01_sums_of_ranks_are_within_what_they_declare_and_two_exchanges_a_layer(name: str, size: int) -> None:
    """Megatron's form: what attention read and the activation gave stays apart, a row of the residual goes round."""
    spec, weights = weights_as(name, "float32")
    if not divides(spec, size):
        pytest.skip("heads do not divide")
    alone = Paged(spec, weights)
    alone.on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), 1, spin_us=5)))
    ranked = Ranked(spec, weights, size, threads=1, sums=True)
    ids = [3 + i * 7 % 50 for i in range(12)]
    want = np.array(alone.one_go("a", ids))
    got = ranked.run({"a": (ids, range(12))})
    for other in got:
        assert np.array_equal(got[0]["a"], other["a"]), "all ranks have the same sum"
        assert np.allclose(want, other["a"], rtol=0, atol=1e-4 * np.abs(want).max())
    if name in ("llama_gqa", "llama_mha"):
        layers, exchange = len(spec.layers), ranked.comms[0].exchange
        first, last = even_ranges(spec.vocab_size, size, 5)[0]
        gathers, given = exchange.given(0)
        assert given == 4 * (size - 1) * 12 * (layers * 2 * spec.hidden_size + last - first)

        assert gathers == 2 * layers + 1
        assert not np.array_equal(want, got[0]["a"]), "the order of sums is another one"


def test_more_columns_than_a_slot_holds_come_in_pieces_of_rows() -> None:
    """4,096 bytes hold a row or a few; a step has hundreds."""
    spec, weights = weights_as("llama_gqa", "float32")
    alone = Paged(spec, weights)
    alone.on(NativeBackend(Pool(open_library(libraries()[ISAS[-1]]), 1, spin_us=5)))
    ranked = Ranked(spec, weights, 2, threads=2)
    ids = [3 + i % 50 for i in range(250)]
    want = np.array(alone.one_go("a", ids))
    for got in ranked.run({"a": (ids, range(250))}):
        assert np.array_equal(want, got["a"])


LAWS = some(
    [(name, "float32", "float32", size) for name, size in CASES],
    shows=lambda name, _, __, size: {size, *specs.kinds(name)},
)
LAWS += [("llama_gqa", "bfloat16", "int8", 2), ("windowed", "bfloat16", "float32", 2)]


@pytest.mark.parametrize(("name", "dtype", "kv_dtype", "size"), LAWS)
def test_H01_tokens_are_those_of_one_rank(name: str, dtype: str, kv_dtype: str, size: int) -> None:
    """The engine's laws on several ranks, which all decide the same."""
    in_turmoil(name, dtype, kv_dtype, random.Random(f"ranks-{name}-{dtype}-{size}"), draws(1, 4), ranks=size, depth=1)
