"""FEATURES row 51: many requests whose KV cannot all fit, with long outputs."""

from __future__ import annotations

import random

import pytest

from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, fake_engine, request
from tests.engine.naive import fake_logits, generate


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_two_hundred_requests_in_a_tenth_of_their_memory_make_steady_progress(policy: str) -> None:
    rng = random.Random(51)
    core, _ = fake_engine(
        Knobs(policy=policy, num_blocks=160, block_size=4, budget=64, max_num_seqs=32, conservativeness=1.0)
    )
    load, collector = [], Collector()
    for i in range(200):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(8, 24))]
        load.append(request(own, max_tokens=rng.randrange(60, 100), eos=(), tenant=f"t{i % 3}"))
        core.add(load[-1])
    needed = sum(-(-(len(r.prompt_token_ids) + r.max_tokens) // 4) for r in load)
    assert needed > 10 * 160
    idle_steps = 0
    while core.has_work:
        before = core.stats.num_sampled_tokens
        collector.take(core.step())
        idle_steps = 0 if core.stats.num_sampled_tokens > before else idle_steps + 1
        assert idle_steps < 5, "no progress"
    total = sum(len(r.prompt_token_ids) + r.max_tokens for r in load)
    wasted = core.stats.num_recomputed_tokens / total
    print(
        f"{core.stats.num_preemptions} preemptions, {core.stats.num_recomputed_tokens} of {total} tokens computed again"
    )
    assert wasted < 0.10
    for r in load:
        got = collector.requests[r.request_id]
        assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, r)
