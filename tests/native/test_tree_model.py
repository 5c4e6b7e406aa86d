"""Trees of drafts through whole models, reference and native: every node's logits are those of its path alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.backends.native.forward import NativeForward
from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.core.matrix_format import parse_scheme
from penstock.core.model_spec import ModelSpec, cache_specs
from penstock.families.registry import open_model
from penstock.launch.bundled import bundled_model
from penstock.ops.plan import GroupPlan, StepPlan
from penstock.ops.tree import path, tree_mask
from penstock.runner.storage import Storage
from penstock.weights.load import load_weights
from tests import specs
from tests.native.running import ISAS, each_isa, pool, pytestmark_native
from tests.native.test_model import NATIVE, text
from tests.paged import Paged
from tests.sampled import draws, some


@dataclass(frozen=True)
class Job:
    """What a sequence runs: tokens, and on which one each hangs (none: each on the one before)."""

    ids: Sequence[int]
    parents: Sequence[int] = field(default=())


class Trees(Paged):
    """Steps with trees. All tokens give logits; `accept` says how a sequence goes on after its tree."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, npt.NDArray[Any]], **more: Any) -> None:
        num_slabs = 800 + 4000 // more.get("block_size", 4)
        super().__init__(spec, weights, num_slabs=num_slabs, **more)
        self.storage = Storage(self.groups, [num_slabs] * len(self.groups), self.block_size, poison=True)
        self.planes = list(self.storage.planes)

    def step(self, work: Mapping[Any, Job]) -> dict[Any, F32]:
        bounds, positions, masks = [0], [], []
        for seq, job in work.items():
            start = self.lens.get(seq, 0)
            count = len(job.ids)
            bounds.append(bounds[-1] + count)
            if job.parents:
                mask, depths = tree_mask(job.parents)
            else:
                mask, depths = np.zeros(count, np.uint64), np.arange(count, dtype=np.int32)
            masks.append(mask)
            positions.append(depths + np.int32(start))
            self.lens[seq] = start + count
            self._grow(seq)
        groups = tuple(
            GroupPlan(len(g.layers), self.block_size, tuple(self._tables[seq][g.index] for seq in work))
            for g in self.groups
        )
        ids = np.concatenate([np.array(job.ids, np.int32) for job in work.values()])
        lens = np.array([self.lens[seq] for seq in work], np.int32)
        plan = StepPlan(
            ids, np.concatenate(positions), np.array(bounds, np.int32), lens, np.arange(len(ids), dtype=np.int32),
            groups, mask=np.concatenate(masks),
        )  # fmt: skip
        logits = self.program.run(plan, self.planes)
        out = {seq: logits[a:b].copy() for seq, (a, b) in zip(work, pairwise(bounds), strict=True)}
        for seq, job in work.items():
            if job.parents:
                self.lens[seq] -= len(job.ids)
            else:
                self._give_up(seq)
        return out

    def accept(self, seq: Any, nodes: Sequence[int]) -> None:
        start = self.lens[seq]
        slots = start + np.arange(len(nodes), dtype=np.int32)
        self.storage.move_slots(self._tables[seq], start + np.array(nodes, np.int32), slots)
        self.lens[seq] += len(nodes)
        self._give_up(seq)


@cache
def nano() -> tuple[ModelSpec, dict[str, npt.NDArray[Any]]]:
    folder = bundled_model("nano")
    assert folder is not None
    checkpoint = open_model(folder)
    return checkpoint.spec, load_weights(checkpoint.weights, checkpoint.spec, "bfloat16")


def made(name: str) -> tuple[ModelSpec, dict[str, npt.NDArray[Any]]]:
    return nano() if name == "nano" else specs.make(name)


def model(name: str, isa: str | None, threads: int = 1, **more: Any) -> Trees:
    trees = Trees(*made(name), **more)
    if isa is not None:
        program: Any = NativeForward(
            trees.graph, trees.groups, pool(isa, threads), parse_scheme("none"), max_tokens=200
        )
        trees.program = program
    return trees


def random_parents(rng: random.Random, count: int) -> list[int]:
    near = rng.random() < 0.5
    return [-1, *(rng.randrange(max(0, i - 3) if near else 0, i) for i in range(1, count))]


def check(name: str, isa: str | None, *, num_nodes: int, prefix: int, draw: int, **more: Any) -> None:
    rng = random.Random(f"{name} {draw}")
    vocab = made(name)[0].vocab_size
    ids = text(vocab, prefix)
    block_size, threads = rng.choice([1, 4, 7, 16, 32]), rng.choice([1, 2, 3])
    trees = model(name, isa, threads, block_size=block_size, seed=draw, **more)
    if rng.random() < 0.5:
        trees.make_ragged("a")
    plain = model(name, isa, **more)
    trees.step({"a": Job(ids), "b": Job(ids[:9])})
    for turn in range(2):
        start = len(ids)
        parents, other = random_parents(rng, num_nodes), random_parents(rng, 8)
        drafted, others = ([rng.randrange(3, vocab) for _ in range(n)] for n in (num_nodes, 8))
        work = {"a": Job(drafted, parents), "b": Job([5, 6]), ("c", turn): Job(others, other), ("d", turn): Job(ids)}
        order = list(work.items())
        rng.shuffle(order)
        got = trees.step(dict(order))
        masks = tree_mask(parents)[0].tolist()
        leaves = sorted(set(range(num_nodes)) - set(parents))
        for leaf in rng.sample(leaves, min(3, len(leaves))):
            nodes = path(masks[leaf], leaf)
            alone = plain.one_go((turn, leaf), [*ids, *(drafted[n] for n in nodes)])[start:]
            assert np.array_equal(got["a"][nodes], alone), f"{name}, draw {draw}, path {nodes}"
        leaf = max(leaves, key=lambda n: len(path(masks[n], n)))
        nodes = path(masks[leaf], leaf)
        plain.one_go(("slow", turn), ids)
        one_by_one = [plain.one_go(("slow", turn), [drafted[n]]).copy() for n in nodes]
        assert np.array_equal(got["a"][nodes], np.concatenate(one_by_one))
        assert np.array_equal(got[("d", turn)], plain.one_go(("d", turn), ids))
        trees.accept("a", nodes)
        ids = (*ids, *(drafted[n] for n in nodes))


@pytestmark_native
@each_isa
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_nano_native(isa: str, kv_dtype: str) -> None:
    for draw in range(draws(1, 2)):
        check("nano", isa, num_nodes=24, prefix=250, draw=draw, kv_dtype=kv_dtype)


def test_nano_reference() -> None:
    check("nano", None, num_nodes=12, prefix=30, draw=0)


def keeps_states(name: str) -> bool:
    """Of such, and of entries of several tokens, only chains can be verified."""
    kept = [own for layer in cache_specs(specs.make(name)[0], "float32") for own in layer]
    return any(own.kind == "slot" or any(p.every for p in own.page_planes) for own in kept)


@pytestmark_native
@each_isa
@pytest.mark.parametrize("name", [name for name in NATIVE if not keeps_states(name)])
def test_every_native_shape(isa: str, name: str) -> None:
    check(name, isa, num_nodes=20, prefix=60, draw=1)


@pytest.mark.parametrize(
    ("name", "attention"), [(name, "ref") for name in specs.ALL] + [(n, "ref-online") for n in some(specs.ALL, 12)]
)
def test_every_shape_in_the_reference(name: str, attention: str) -> None:
    """Layers whose state follows one path say so."""
    trees = model(name, None)
    if keeps_states(name):
        trees.step({"a": Job(text(trees.spec.vocab_size, 5))})
        with pytest.raises(EngineError, match="cannot run a tree"):
            trees.step({"a": Job([4, 5, 6], [-1, 0, 0])})
        return
    check(name, None, num_nodes=12, prefix=20, draw=2, attention=attention)


@pytestmark_native
def test_a_path_that_is_not_moved_is_not_found() -> None:
    """What the test of acceptance rests on."""
    isa = ISAS[-1]
    trees, ids = model("llama_gqa", isa), text(made("llama_gqa")[0].vocab_size, 20)
    trees.step({"a": Job(ids)})
    trees.step({"a": Job([7, 8, 9], [-1, 0, 0])})
    trees.lens["a"] += 2
    wrong = trees.step({"a": Job([10])})["a"]
    assert not np.array_equal(wrong, model("llama_gqa", isa).one_go("b", [*ids, 7, 9, 10])[-1:])
