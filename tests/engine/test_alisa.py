"""Row B25, ALISA: what a selection does not choose waits on the device, in host memory, or is computed again; where it
waits follows from memory alone, and no token from where it waits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from penstock.config.held import most_blocks
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, drain, real_engine, request, tiny
from tests.engine.test_kv_selection import CONTROLS, draw_knobs, expected, keeping_for, settings_of, workload

BUDGET = "20%"
OPTIONS = settings_of("alisa")


@pytest.mark.parametrize("host_blocks", [3, 12, 200])
def test_B25_no_token_depends_on_where_what_was_not_chosen_waits(host_blocks: int) -> None:
    """In pools that hold the longest sequence and little more, with a tier of some size: the naive model's tokens."""
    spec, weights = tiny("llama_gqa")
    rng = random.Random(f"aside-{host_blocks}")
    longest = max(len(r.prompt_token_ids) + r.max_tokens for r in workload(spec.vocab_size))
    least = most_blocks(keeping_for("alisa", BUDGET, OPTIONS), longest, 4)
    sent = 0
    for _ in range(3):
        knobs = replace(
            draw_knobs(rng, "alisa", BUDGET, rng.choice([0, 8])), block_size=4, host_blocks=host_blocks,
            num_blocks=least + rng.choice([0, 3, 12]), max_num_seqs=8, swap_tier=rng.choice(["host", "fastswitch"]),
        )  # fmt: skip
        core = real_engine(spec, weights, knobs)
        collector = disturbed(core, workload(spec.vocab_size), rng, CONTROLS, times=6, note=knobs)
        sent += core.kv.selections.num_sent
        prompt_interval = 8 if '"prompt_interval": 8' in (knobs.selector_config or "") else 0
        for request_id, samples in expected("llama_gqa", "alisa", BUDGET, prompt_interval, 4).items():
            got = collector.requests[request_id]
            assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (request_id, knobs)
        assert_idle(core)
    assert sent, "memory was meant to be short"


class Life(NamedTuple):
    """What happened, step by step: the first step that sent something to host memory, and that preempted somebody."""

    sends: int | None
    preempts: int | None
    tokens: dict[str, Any]


def live(num_blocks: int, host_blocks: int) -> Life:
    spec, weights = tiny("llama_gqa")
    core = real_engine(
        spec, weights,
        Knobs(block_size=4, num_blocks=num_blocks, host_blocks=host_blocks, budget=64, prefix_cache="radix",
              selector="alisa", kept=BUDGET, selector_config=OPTIONS),
    )  # fmt: skip
    rng, collector = random.Random(3), Collector()
    for i in range(4):
        prompt = [rng.randrange(3, spec.vocab_size) for _ in range(16)]
        core.add(request(prompt, request_id=str(i), max_tokens=64))
    sends = preempts = None
    for step in range(1000):
        if not core.has_work:
            break
        collector.take(core.step())
        core.kv.check_invariants(core.scheduler.running)
        sends = step if sends is None and core.kv.selections.num_sent else sends
        preempts = step if preempts is None and core.stats.num_preemptions else preempts
    assert_idle(core)
    return Life(sends, preempts, {name: c.tokens for name, c in collector.requests.items()})


def test_B25_phases_follow_from_free_blocks() -> None:
    """Room on the device: nothing moves. Less: blocks go to host memory, the sooner the less there is. No room there
    either: somebody is computed again, and only then, and not before. Tokens are the same."""
    ample = live(120, 200)
    assert (ample.sends, ample.preempts) == (None, None)
    short = [live(num_blocks, 200) for num_blocks in (80, 64, 40)]
    assert all(life.sends is not None and life.preempts is None for life in short)
    sends = [life.sends or 0 for life in short]
    assert sends[0] > sends[1] > sends[2], "the less, the sooner"
    both = live(64, 12)
    assert both.sends is not None
    assert both.preempts is not None
    assert both.sends == sends[1] < both.preempts
    none = live(64, 0)
    assert none.sends is None
    assert none.preempts is not None
    assert all(life.tokens == ample.tokens for life in (*short, both, none))


def test_B25_samples_of_a_prompt_do_not_write_into_each_others_blocks() -> None:
    """Three samples share what their prompt set aside, half a block, too: the same with blocks of a token."""
    spec, weights = tiny("llama_gqa")
    rng = random.Random(8)
    prompt = [rng.randrange(3, spec.vocab_size) for _ in range(13)]
    found = []
    for block_size in (8, 1):
        core = real_engine(
            spec, weights,
            Knobs(block_size=block_size, num_blocks=400, prefix_cache="none", budget=64, selector="alisa", kept="40%",
                  selector_config=OPTIONS),
        )  # fmt: skip
        core.add(request(prompt, request_id="n", n=3, max_tokens=30, temperature=1.2, seed=2))
        collector = Collector()
        drain(core, collector)
        found.append(collector.requests["n"].tokens)
        assert_idle(core)
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0].values()}) == 3, "they differ, so this can fail"
