"""The memory that a sequence holds on its way is never more than planner and admission count."""

from __future__ import annotations

import json
import random

import pytest

from penstock.base.errors import CapacityError
from penstock.config import from_kwargs
from penstock.config.held import blocks_of, first_cut, most_blocks, num_over
from penstock.config.selection import Keeping
from penstock.core.sequence import NEVER
from penstock.launch.selection import keeping_of
from penstock.plan.resolve import resolve
from tests.unit.plan.test_plan import machine, model


def keeping(selector: str, budget: str, **options: int) -> Keeping:
    found = keeping_of(
        from_kwargs(model="m", kv_selector=selector, kv_budget=budget, kv_selector_config=json.dumps(options))
    )
    assert found is not None
    return found


def walk(k: Keeping, num_tokens: int, prompt_len: int, size: int) -> tuple[int, int]:
    """(the most blocks held, where the first cut was), selection by selection, all lines alike."""
    at, dropped, most, first = 0, 0, 0, NEVER
    while at < num_tokens:
        end = k.config.next_position(at, prompt_len)
        at = min(end, num_tokens)
        most = max(most, blocks_of(at - dropped, size))
        over = num_over(k, at, dropped, size) if at == end else 0
        if over > 0:
            first = min(first, at)
            dropped += over if k.drops == "tokens" else over * size
    return most, first


@pytest.mark.parametrize("selector", ["window", "streaming", "snapkv", "quest"])
def test_the_bound_holds_and_is_not_far_off(selector: str) -> None:
    rng = random.Random(selector)
    for _ in range(400):
        size = rng.choice([1, 4, 16])
        budget = rng.choice(["25%", "50%", "90%", "100%", "12", "40", "200"])
        options = {"prompt_interval": rng.choice([0, 1, 7, 16, 64]), "interval": rng.choice([1, 5, 64]), "sinks": 4}
        k = keeping(selector, budget, **options)
        prompt_len = rng.randrange(1, 500)
        num_tokens = rng.randrange(1, 600)
        held, first = walk(k, num_tokens, prompt_len, size)
        bound = most_blocks(k, num_tokens, size, prompt_len)
        assert held <= bound <= blocks_of(num_tokens, size), (selector, budget, options, size, prompt_len, num_tokens)
        assert bound <= most_blocks(k, num_tokens, size)
        if selector == "quest":
            assert bound == blocks_of(num_tokens, size)
        elif first != NEVER:
            assert first == first_cut(k, prompt_len, size)
            gap = max(options["prompt_interval"] or prompt_len, options["interval"])
            assert bound <= held + blocks_of(gap, size) + 3


def test_the_planner_counts_what_is_held_and_not_the_length() -> None:
    """512 positions through the memory of 100, for a selector that cuts the prompt on its way, and for no other."""
    spec, size = model(max_position=512), 4

    def plan(num_blocks: int, **options: object) -> int:
        config = from_kwargs(model="m", block_size=size, num_gpu_blocks_override=num_blocks, **options)
        return resolve(config, spec, machine(), keeping=keeping_of(config)).kv_capacity_tokens

    cut = {"kv_selector": "snapkv", "kv_budget": "24"}
    on_its_way = json.dumps({"prompt_interval": 32, "interval": 32})
    need = most_blocks(keeping("snapkv", "24", prompt_interval=32, interval=32), spec.max_position, size)
    assert need * size < 100 < spec.max_position
    assert plan(need, **cut, kv_selector_config=on_its_way) == spec.max_position
    with pytest.raises(CapacityError):
        plan(need - 1, **cut, kv_selector_config=on_its_way)
    with pytest.raises(CapacityError):
        plan(need, **cut)
