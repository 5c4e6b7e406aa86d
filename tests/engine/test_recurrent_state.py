"""Catalogue row C34: states in the engine. Constant bytes, continuous batching, prefix hits at checkpoints only."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from penstock.core.request import Request
from tests.engine.harness import Collector, Knobs, assert_idle, drain, real_engine, request, run, tiny
from tests.oracle import NaiveModel

BLOCK, EVERY = 4, 16


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_C34_state_bytes_are_constant_over_10_000_tokens(name: str) -> None:
    """One slab of one slot group from the first token to the last, of the size the spec says; and the right tokens."""
    spec, weights = tiny(name)
    spec = msgspec.structs.replace(spec, max_position=2**20)
    k = Knobs(num_slots=3, budget=499, prefix_cache="none")
    core = real_engine(spec, weights, k)
    storage = core.executor._runner.storage  # type: ignore[attr-defined]
    (group,) = storage.planes
    arrays = {plane: (array.nbytes, array.ctypes.data) for plane, array in group.items()}
    per_sequence = sum(nbytes for nbytes, _ in arrays.values()) // k.num_slots
    mixer = spec.layers[0].mixer
    assert mixer is not None
    assert per_sequence == len(spec.layers) * mixer.cache("float32").num_bytes
    prompt = np.random.default_rng(34).integers(3, 61, 9_900).tolist()
    core.add(request(prompt, request_id="long", max_tokens=100))
    collector = Collector()
    steps = 0
    while core.has_work:
        collector.take(core.step())
        stats = core.kv.stats().groups
        assert [g.used + g.quarantined <= 1 and g.total == k.num_slots for g in stats] == [True]
        steps += 1
    assert steps >= 9_900 // 499 + 99
    assert arrays == {plane: (array.nbytes, array.ctypes.data) for plane, array in group.items()}
    got = collector.requests["long"].tokens[0]
    assert len(prompt) + len(got) == 10_000
    rows = NaiveModel(spec, weights).logits([*prompt, *got[:-1]])[len(prompt) - 1 :]
    assert got == rows.argmax(axis=-1).tolist()


def prompts(vocab: int) -> dict[str, list[int]]:
    """`first` of 46 tokens leaves checkpoints at 16, 32 and 44; the others part from it where their names say."""
    rng = np.random.default_rng(7)
    first = rng.integers(3, vocab, 46).tolist()
    tail = rng.integers(3, vocab, 12).tolist()
    cuts = {str(n): [*first[:n], (first[n] + 1) % vocab, *tail] for n in (15, 16, 17, 31, 32, 40, 43, 44, 45)}
    return {"first": first, **cuts}


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
@pytest.mark.parametrize(
    "name",
    [
        "mamba",
        "mamba2",
        "mamba2_hybrid",
        "gated_lru",
        "mlstm",
        "diagonal",
        "gated_diagonal",
        "retention",
        "shared",
        "rwkv6",
        "qrwkv6",
    ],
)
@pytest.mark.sampled
def test_C34_prefix_hits_stand_at_checkpoints_and_change_no_token(name: str, prefix_cache: str) -> None:
    """Multiples of 16 and the last whole block of the prompt, also where 43 of 44 tokens are known; steps
    of 23 tokens are cut to end there."""
    spec, weights = tiny(name)

    def engine(cache: str) -> dict[str, tuple[list[int], int]]:
        core = real_engine(
            spec, weights, Knobs(block_size=BLOCK, budget=23, checkpoint_tokens=EVERY, prefix_cache=cache)
        )
        out = {}
        for case, prompt in prompts(spec.vocab_size).items():
            r = request(prompt, request_id=case, max_tokens=8)
            got = run(core, [r])[case]
            out[case] = got.tokens[0], got.cached
        return out

    with_cache, without = engine(prefix_cache), engine("none")
    assert {case: tokens for case, (tokens, _) in with_cache.items()} == {c: t for c, (t, _) in without.items()}
    assert all(cached == 0 for _, cached in without.values())
    hits = {case: cached for case, (_, cached) in with_cache.items()}
    assert hits == {
        "first": 0, "15": 0, "16": 16, "17": 16, "31": 16, "32": 32, "40": 32, "43": 32, "44": 44, "45": 44,
    }  # fmt: skip


@pytest.mark.parametrize("prefix_cache", ["radix", "hash"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["mamba2", "mamba2_hybrid"])
def test_B32_states_are_kept_where_prompts_part_and_at_the_end(name: str, depth: int, prefix_cache: str) -> None:
    """The first prompt that parts from known text finds nothing there and leaves a state, the second one begins from
    it; the next turn begins at the last whole block of the answer. No token changes."""
    spec, weights = tiny(name)
    naive = NaiveModel(spec, weights)
    knobs = Knobs(
        block_size=BLOCK, checkpoint_tokens=BLOCK, checkpoint_rule="branch", prefix_cache=prefix_cache, depth=depth
    )
    core = real_engine(spec, weights, knobs)
    known = prompts(spec.vocab_size)

    def ask(prompt: list[int], case: str) -> tuple[list[int], int]:
        got = run(core, [request(prompt, request_id=case, max_tokens=9)])[case]
        assert got.tokens[0] == naive.greedy(prompt, 9), case
        return got.tokens[0], got.cached

    answer, _ = ask(known["first"], "first")
    assert ask(known["31"], "a")[1] == 0
    assert ask([*known["31"][:30], 1, 2, 3], "b")[1] == 28  # where "a" parted
    assert ask([*known["first"], *answer, 5, 6, 7], "turn")[1] == 52  # of 55, the last of which was never run
    assert ask([*known["first"], 9], "again")[1] == 28  # not at the prompt's end: the state went on from there
    assert ask([*known["first"], 8], "once more")[1] == 44  # now it is a branch
    (states,) = (g for g in core.kv.stats().groups if g.total == Knobs().num_slots)
    assert states.evictable <= 2 * 6


def test_C34_generated_text_leaves_checkpoints_too() -> None:
    """The next turn of a conversation resumes at a multiple of 16 within the answer, not at the answer's end."""
    spec, weights = tiny("mamba2")
    core = real_engine(spec, weights, Knobs(block_size=BLOCK, checkpoint_tokens=EVERY))
    prompt = prompts(spec.vocab_size)["first"][:20]
    answer = run(core, [request(prompt, request_id="a", max_tokens=40)])["a"].tokens[0]
    turn = request([*prompt, *answer, 5, 6, 7], request_id="b", max_tokens=8)
    got = run(core, [turn])["b"]
    assert got.cached == 48
    assert got.tokens[0] == NaiveModel(spec, weights).greedy(turn.prompt_token_ids, 8)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_C34_continuous_batching_on_states(name: str) -> None:
    """Requests of many lengths arrive while others run, more of them than slots; each gets the text it gets alone."""
    spec, weights = tiny(name)
    rng = np.random.default_rng(3)
    todo: list[Request] = [
        request(rng.integers(3, spec.vocab_size, n).tolist(), request_id=str(n), max_tokens=5 + n % 11)
        for n in (1, 2, 3, 9, 17, 30, 31, 45, 60)
    ]
    core = real_engine(spec, weights, Knobs(num_slots=4, budget=13, prefix_cache="none"))
    collector = Collector()
    company = 0
    for r in todo:
        core.add(r)
        for _ in range(2):
            collector.take(core.step())
            company = max(company, core.kv.stats().groups[0].used)
    drain(core, collector)
    assert_idle(core)
    assert company == 4
    naive = NaiveModel(spec, weights)
    for r in todo:
        assert collector.requests[r.request_id].tokens[0] == naive.greedy(r.prompt_token_ids, r.max_tokens), (
            r.request_id
        )
