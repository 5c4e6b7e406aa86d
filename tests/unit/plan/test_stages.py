"""H03: where a model is cut into stages, and what each of them keeps."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import msgspec
import numpy as np
import pytest

from penstock.base.errors import ConfigError
from penstock.core.cache_spec import CacheGroup, CacheSpec, PlaneSpec
from penstock.core.held_weights import HeldWeights
from penstock.core.model_spec import cache_groups
from penstock.core.page_ops import LoadOp, PageOp, StoreOp
from penstock.plan.drafts import DraftPlan
from penstock.plan.rank_plan import rank_plan
from penstock.plan.stages import (
    cut_places,
    even_cuts,
    layer_weights,
    stage_groups,
    stage_share,
    stage_starts,
    widest_groups,
)
from penstock.runner.stage_storage import StageStorage
from penstock.runner.storage import Storage
from tests import specs
from tests.engine.harness import Knobs, config_for, plan_for


def test_H03_the_heaviest_stage_is_as_light_as_any_cut_makes_it() -> None:
    rng = random.Random(3)
    for _ in range(200):
        weights = [rng.choice([1, 2, 5, 40]) for _ in range(rng.randint(2, 9))]
        places = sorted(rng.sample(range(1, len(weights)), rng.randint(1, len(weights) - 1)))
        size = rng.randint(1, len(places) + 1)
        found = even_cuts(weights, places, size)
        assert (found[0], found[-1], len(found)) == (0, len(weights), size + 1)
        assert set(found[1:-1]) <= set(places)
        cuts = ([0, *inner, len(weights)] for inner in combinations(places, size - 1))
        best = min(max(sum(weights[a:b]) for a, b in pairwise(cut)) for cut in cuts)
        assert max(sum(weights[a:b]) for a, b in pairwise(found)) == best


@pytest.mark.parametrize("name", specs.ALL)
def test_H03_no_cut_parts_layers_that_share_keys_and_values(name: str) -> None:
    spec, _ = specs.make(name)
    for first in cut_places(spec):
        for n, layer in enumerate(spec.layers):
            if layer.kv_from is not None:
                assert (layer.kv_from < first) == (n < first)
    most = len(cut_places(spec)) + 1
    starts = stage_starts(config_for(Knobs(ops="native", stages=most)), spec)
    assert starts == () if most == 1 else len(starts) == most + 1
    with pytest.raises(ConfigError, match="pipeline_parallel_size: "):
        stage_starts(config_for(Knobs(ops="native", stages=most + 1)), spec)


def test_H03_every_layer_of_a_group_is_on_one_stage_and_the_widest_suffices() -> None:
    spec, _ = specs.make("windowed")
    groups = cache_groups(spec, "float32")
    for size in range(2, len(spec.layers) + 1):
        starts = stage_starts(config_for(Knobs(ops="native", stages=size)), spec)
        stages = [stage_groups(groups, range(a, b)) for a, b in pairwise(starts)]
        for whole, most, *own in zip(groups, widest_groups(groups, starts), *stages, strict=True):
            assert sorted(n for group in own for n in group.layers) == list(whole.layers)
            assert len(most.layers) == max(len(group.layers) for group in own)
        assert max(layer_weights(spec)) / spec.num_params < stage_share(spec, starts) <= 1
    assert widest_groups(groups, ()) == groups
    assert stage_share(spec, ()) == 1.0


def test_H03_a_rank_s_plan_has_its_layers_and_all_of_a_draft_model_s() -> None:
    spec, _ = specs.make("llama_gqa")
    plan = plan_for(spec, Knobs(ops="native", stages=2))
    draft = CacheGroup(len(plan.groups), plan.groups[0].spec, (0, 1))
    drafting = DraftPlan(name="d", groups=(draft.index,), held=HeldWeights("float32"), weight_bytes=0, max_len=9)
    plan = msgspec.structs.replace(plan, groups=(*plan.groups, draft), drafts=(drafting,))
    own = [rank_plan(plan, rank, 2) for rank in range(4)]
    assert own[0] == own[1] != own[2] == own[3]
    assert [*own[0].groups[0].layers, *own[2].groups[0].layers] == [*plan.groups[0].layers]
    assert all(one.groups[-1] == draft for one in own)
    alone = msgspec.structs.replace(plan, stages=())
    assert rank_plan(alone, 3, 4) is alone


def test_H03_pages_of_whole_slabs_move_where_a_stage_has_them() -> None:
    """Zeroes, copies, and both ways to the host: what a stage has is what the whole has of its layers."""
    spec = CacheSpec("paged", (PlaneSpec("k", 1, 2, "float32"),))
    whole = (CacheGroup(0, spec, (0, 1, 3)), CacheGroup(1, spec, (2,)))
    ops = [
        StoreOp(0, 3, 6, 3), PageOp(0, -1, 3, 3), PageOp(0, 6, 0, 3), LoadOp(0, 6, 9, 3, move=5),
        StoreOp(1, 2, 0, 1), LoadOp(1, 0, 1, 1, move=6),
    ]  # fmt: skip
    for layers in ((0, 1), (2, 3), (3,)):
        own = stage_groups(whole, layers)
        all_of_it = Storage(whole, (4, 4), 2, host_slabs=(4, 4))
        part = StageStorage(own, (4, 4), 2, host_slabs=(4, 4), whole=whole)
        lines = [[i for i, n in enumerate(group.layers) if n in layers] for group in whole]
        rng = np.random.default_rng(7)
        for g, planes in enumerate(all_of_it.planes):
            planes["k"][:] = rng.random(planes["k"].shape)
            part.planes[g]["k"][:] = _of(planes["k"], lines[g])
        assert part.apply(ops) == all_of_it.apply(ops) == {5: True, 6: True}
        for g, planes in enumerate(all_of_it.planes):
            assert np.array_equal(part.planes[g]["k"], _of(planes["k"], lines[g]))
    with pytest.raises(AssertionError, match="a part of a slab"):
        StageStorage(whole, (4, 4), 2, whole=whole).apply([PageOp(0, -1, 4, 3)])


def _of(plane: np.ndarray, lines: list[int]) -> np.ndarray:
    """Pages [4 * lines, S, 1, 2] of some layers of all."""
    return plane.reshape(4, -1, *plane.shape[1:])[:, lines].reshape(-1, *plane.shape[1:])
