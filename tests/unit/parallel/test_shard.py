"""Models shared out over ranks in threads that hand each other arrays, on the reference operations."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.reference import ReferenceBackend
from penstock.core.model_spec import Attention
from penstock.parallel import shard as sharding
from penstock.parallel.comm import LocalGroup, SharedComm, shared_memory
from penstock.parallel.shard import head_ranges
from penstock.plan.ranks import even_ranges, ranked_groups
from tests import specs
from tests.engine.harness import Knobs, config_for
from tests.engine.processes import num_fds
from tests.paged import Paged, _planes


def fits(name: str) -> bool:
    layers = specs.make(name)[0].layers
    return all(layer.mixer.num_heads % 2 == 0 for layer in layers if isinstance(layer.mixer, Attention))


@pytest.mark.parametrize("name", [name for name in specs.ALL if fits(name)])
def test_H01_every_kind_of_layer_on_two_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without native kernels, too. What no rule knows runs whole; the numbers are those of one rank, as far as
    numpy's products of some rows have the bits of all rows."""
    monkeypatch.setattr(sharding, "UNIT", 5)
    monkeypatch.setattr(sharding, "LEAST_ROWS", 2)
    spec, weights = specs.make(name)
    alone = Paged(spec, weights)
    ranks = []
    for comm in LocalGroup(2).comms():
        rank = Paged(spec, weights)
        rank.groups, _ = ranked_groups(config_for(Knobs(ops="native", ranks=2)), spec, rank.groups)
        rank.planes = [_planes(g, 400, rank.block_size) for g in rank.groups]
        rank.graph, rows = sharding.shard(rank.graph, rank.groups, comm)
        assert rows, "something is shared out"
        ranks.append(rank.on(ReferenceBackend()))
    ids = [3 + i * 7 % 50 for i in range(14)]
    for chunk in (ids[:9], ids[9:10], ids[10:]):
        want = np.array(alone.one_go("a", chunk))

        def run(rank: Paged, chunk: list[int] = chunk) -> Any:
            return np.array(rank.one_go("a", chunk))

        with ThreadPoolExecutor(2) as pool:
            for got in pool.map(run, ranks):
                assert np.allclose(want, got, rtol=0, atol=1e-4 * np.abs(want).max())


def test_ranges_cover_everything_once_and_end_with_heads() -> None:
    for width in (5, 64, 100, 151_936):
        for size in (1, 2, 3, 7):
            runs = even_ranges(width, size, 1)
            assert [first for first, _ in runs] == [0, *(last for _, last in runs)][:-1]
            assert runs[-1][1] == width
    assert even_ranges(300, 2, 64) == ((0, 128), (128, 300))
    assert head_ranges(6, 8, 3) == ((0, 16), (16, 32), (32, 48))
    assert head_ranges(2, 8, 4) == ((0, 8), (0, 8), (8, 16), (8, 16))


def test_memory_of_ranks_takes_no_descriptor_and_is_given_back() -> None:
    before, mapped = num_fds(), Path("/proc/self/maps").read_text().count("penstock-ranks")
    for _ in range(20):
        memory = shared_memory(2)
        ends = [SharedComm(memory, rank, 2) for rank in range(2)]
        os.close(memory)
        assert num_fds() == before
        assert ends[0].exchange.given(1) == (0, 0)
    del ends
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("penstock-ranks") == mapped
