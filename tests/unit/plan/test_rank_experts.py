"""H15: what a plan says of experts on ranks, and what it refuses."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from penstock.backends import BACKENDS
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.held_weights import HeldWeights
from penstock.core.machine import Machine
from penstock.core.model_spec import Attention, Experts, FeedForward, Layer, ModelSpec, Rope, Router, weight_shapes
from penstock.plan.ranks import expert_bytes, expert_ranges, rank_bytes
from penstock.plan.resolve import Plan, resolve
from tests import specs

MACHINE = Machine(num_cores=4, memory_bytes=1 << 36, available_bytes=1 << 36)


def mixture(num: int, width: int = 512, hidden: int = 512) -> ModelSpec:
    layer = Layer(
        mixer=Attention(num_heads=8, num_kv_heads=4, head_dim=64, rope=Rope(dim=64)),
        ffn=Experts(num_experts=num, top_k=2, expert=FeedForward(width=width), router=Router(renormalize=True)),
    )
    return ModelSpec(family="test", vocab_size=1024, hidden_size=hidden, layers=(layer,) * 3, max_position=256)


def plan(spec: ModelSpec, **settings: Any) -> Plan:
    config = from_kwargs(model="(test)", ops="native", dtype="float32", num_gpu_blocks_override=64, **settings)
    return resolve(config, spec, MACHINE, traits=BACKENDS.traits("native"))


def said(plan: Plan) -> str:
    (decision,) = (d for d in plan.decisions if d.name == "tensor_parallel_size")
    return decision.why


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("num", [5, 8])
def test_H15_a_rank_has_its_part_of_experts(num: int, size: int) -> None:
    """By outputs all ranks have as much; whole ones, the rank with most has what the numbers of experts say."""
    spec, held = mixture(num), HeldWeights("float32")
    one = 4 * 3 * 512 * 512
    assert expert_bytes(spec, held, size, whole_experts=False) == (3 * num * one, 3 * num * one // size)
    most = max(last - first for first, last in expert_ranges(num, size))
    assert expert_bytes(spec, held, size, whole_experts=True) == (3 * num * one, 3 * most * one)
    total = held.num_bytes(spec)
    rest = total - 3 * num * one
    assert rank_bytes(spec, held, total, size) == -(-total // size)
    assert abs(rank_bytes(spec, held, total, size, whole_experts=True) - (rest / size + 3 * most * one)) <= 1
    assert rank_bytes(spec, held, total, 1) == total


def test_H15_experts_that_are_too_narrow_are_whole_on_every_rank() -> None:
    held, spec = HeldWeights("float32"), mixture(8, width=200, hidden=256)
    shapes = weight_shapes(spec)
    down, others = (
        4 * sum(prod(s) for n, s in shapes.items() if ".experts." in n and n.endswith("down") == is_down)
        for is_down in (True, False)
    )
    assert expert_bytes(spec, held, 2, whole_experts=False) == (down + others, down // 2 + others)
    assert expert_bytes(spec, held, 4, whole_experts=False) == (down + others, down + others)


def test_a_model_without_experts_is_shared_out_evenly() -> None:
    spec, held = specs.make("llama_gqa")[0], HeldWeights("float32")
    assert rank_bytes(spec, held, 1001, 2) == 501
    assert rank_bytes(spec, held, 1001, 2, whole_experts=True) == 501


def test_H15_the_plan_says_what_ranks_have_of_experts() -> None:
    spec = mixture(5)
    assert "each rank has some outputs of every expert" in said(plan(spec, tensor_parallel_size=2))
    words = said(plan(spec, tensor_parallel_size=2, enable_expert_parallel=True))
    assert "each rank has 2 to 3 whole experts of a layer" in words
    assert "4 whole experts of a layer" in said(plan(mixture(8), tensor_parallel_size=2, enable_expert_parallel=True))
    small = mixture(8, width=100, hidden=128)
    assert "all of its small experts" in said(plan(small, tensor_parallel_size=2))
    assert "expert" not in said(plan(specs.make("llama_gqa")[0], tensor_parallel_size=2))


REFUSED: list[tuple[ModelSpec, dict[str, Any], str]] = [
    (specs.make("llama_gqa")[0], {"tensor_parallel_size": 2}, "this model has no experts; leave it away"),
    (specs.make("experts")[0], {}, "experts are shared out over ranks, and there is one; give tensor_parallel_size"),
    (mixture(3), {"tensor_parallel_size": 4}, "there are 3 experts in a layer for 4 ranks; use 3 at most"),
]


@pytest.mark.parametrize(("spec", "settings", "words"), REFUSED)
def test_H15_what_cannot_be_shared_out_is_one_sentence(spec: ModelSpec, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(spec, enable_expert_parallel=True, **settings)
    assert str(caught.value).startswith("enable_expert_parallel: ")
    assert words in str(caught.value)
    assert caught.value.field == "enable_expert_parallel"
    assert "\n" not in str(caught.value)
