"""Draft models as drafters: they change no token, and what a draft model has seen of a text is never taken on trust.

A draft model that is the model itself must be right always. So anything short of that shows an entry that was missing,
stale or in the wrong place, whatever happened to the memory meanwhile.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.core.draft import ROOT
from penstock.core.model_spec import ModelSpec
from penstock.core.request import Control, Request
from penstock.drafters.draft_model import CATCH_UP, DraftModelDrafter
from penstock.engine.core import EngineCore
from penstock.sched.drafts.fixed import FixedDrafts
from penstock.sched.drafts.state import can_draft
from tests import specs
from tests.engine.harness import Collector, Knobs, assert_idle, drain, real_engine, request, run, tiny
from tests.engine.naive import generate
from tests.engine.test_laws_models import check, draw_knobs, expected, oracle, workload
from tests.native.running import pytestmark_native
from tests.sampled import draws

OPS = ["ref", "torch", pytest.param("native", marks=pytestmark_native)]
DraftSpecs = tuple[tuple[ModelSpec, Any], ...]


@cache
def noisy(name: str, share: float, seed: int = 0) -> tuple[ModelSpec, dict[str, Any]]:
    """The model with a share of noise on its weights: it often says the same, and not always."""
    spec, weights = tiny(name)
    rng = np.random.default_rng(seed)
    return spec, {
        n: (w + share * w.std() * rng.standard_normal(w.shape)).astype(np.float32) if w.ndim == 2 else w
        for n, w in weights.items()
    }


def drafted(name: str, draft_models: DraftSpecs, k: Knobs, num_drafts: int = 4, **more: Any) -> EngineCore:
    spec, weights = tiny(name)
    method = "draft-model" if len(draft_models) == 1 else "specinfer"
    model = ",".join(f"draft{i}" for i in range(len(draft_models)))
    return real_engine(
        spec, weights, k, drafts=FixedDrafts(num_drafts, 63), draft_models=draft_models,
        speculation={"method": method, "model": model, **more},
    )  # fmt: skip


def drafter_of(core: EngineCore) -> DraftModelDrafter:
    drafter = core.executor.runner.drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, DraftModelDrafter), "the drafter has failed"
    return drafter


def assert_always_right(core: EngineCore) -> None:
    stats = core.stats
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def turmoil(core: EngineCore, todo: list[Request], rng: random.Random, disturbances: int = 25) -> Collector:
    collector = Collector()
    rng.shuffle(todo)
    steps = 0
    while todo or core.has_work:
        while todo and rng.random() < 0.5:
            core.add(todo.pop())
        if core.groups and disturbances and rng.random() < 0.2:
            disturbances -= 1
            kind = rng.choice(["preempt", "preempt", "ragged", "reset_prefix_cache"])
            core.add(Control(kind=kind, request_id=rng.choice(sorted(core.groups))))
        collector.take(core.step())
        steps += 1
        assert steps < 5000, "starved"
    assert_idle(core)
    return collector


def knobs_for(rng: random.Random) -> Knobs:
    k = draw_knobs(rng)
    k.num_blocks = max(k.num_blocks, 160 // k.block_size + 1)
    k.window_blocks, k.num_slots, k.depth = 0, 24, 1
    k.budget = max(k.budget, 5)
    return k


PAIRS = [
    ("llama_gqa", "llama_mha"), ("llama_mha", "llama_gqa"), ("layernorm", "windowed"), ("slots", "llama_gqa"),
    ("windowed", "latent"), ("mamba2_hybrid", "llama_rope3"), ("latent", "layernorm"),
    ("entries", "llama_gqa"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "draft", "tree"),
    [(*pair, tree) for pair in PAIRS for tree in ("chain", "k-ary")]
    + [(*pair, tree) for pair in (PAIRS[0], PAIRS[4]) for tree in ("sequoia", "opt", "grown")],
)
@pytest.mark.sampled(12)
def test_D10_a_draft_model_changes_no_token(name: str, draft: str, tree: str) -> None:
    """Greedy, sampled, penalties, masks, n samples, beams and logprobs in one batch, disturbed as it runs."""
    rng = random.Random(f"draft-{name}-{draft}-{tree}")
    for num_drafts in (7, 3, 1)[: draws(2, 3)]:
        core = drafted(name, (tiny(draft),), knobs_for(rng), num_drafts, tree=tree)
        check(name, turmoil(core, workload(tiny(name)[0].vocab_size), rng))
        assert core.stats.num_draft_tokens > 0
        drafter_of(core)


@pytest.mark.parametrize("prefix", ["radix", "hash"])
def test_D10_entries_of_a_draft_wait_in_a_tier_with_the_blocks(prefix: str) -> None:
    knobs = Knobs(block_size=4, num_blocks=24, budget=64, host_blocks=200, offload=True, prefix_cache=prefix)
    core = drafted("llama_gqa", (tiny("llama_mha"),), knobs, 3)
    for _ in range(2):
        collector = Collector()
        for each in workload(tiny("llama_gqa")[0].vocab_size):
            core.add(each)
        drain(core, collector)
        check("llama_gqa", collector)
    assert_idle(core)
    assert core.kv.stats().num_loaded_blocks > 0
    assert core.stats.num_draft_tokens > 0
    drafter_of(core)


KEEPING = [
    "slots", "mamba2_hybrid", "rwkv5", "rwkv6", "qrwkv6", "rwkv7", "delta", "gated_lru", "mlstm", "diagonal",
    "retention", "shared", "entries",
]  # fmt: skip
"""Specs with states, which are taken back where drafts are rejected."""


@pytest.mark.parametrize("name", ["llama_gqa", "windowed", "scores", *KEEPING])
@pytestmark_native
def test_D10_a_draft_model_changes_no_token_native(name: str) -> None:
    from tests.native.test_laws import expected as native_expected

    tokens, _ = native_expected(name, "float32", "float32")
    rng = random.Random(f"native-draft-{name}")
    # States follow one path: what was rejected is taken back, and no draft model keeps one.
    keeps = name in KEEPING
    draft, rejected = tiny("llama_mha") if keeps else noisy(name, 0.3), 0
    for num_drafts, tree in ((5, "chain"), (7, "k-ary"), (1, "chain"))[: draws(2, 3)]:
        k = knobs_for(rng)
        k.ops = "native"
        core = drafted(name, (draft,), k, num_drafts, tree=tree)
        got = turmoil(core, workload(tiny(name)[0].vocab_size), rng).requests
        for request_id, samples in tokens.items():
            assert [(got[request_id].tokens[i], got[request_id].reasons[i]) for i in range(len(samples))] == samples
        assert keeps or 0 < core.stats.num_accepted_tokens < core.stats.num_draft_tokens
        rejected += core.stats.num_draft_tokens - core.stats.num_accepted_tokens
        drafter_of(core)
    assert rejected > 0


@pytest.mark.parametrize("tree", ["k-ary", "sequoia", "opt", "grown"])
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.sampled
def test_D24_D25_the_model_as_its_own_draft_knows_the_best_of_every_node(tree: str, ops: str) -> None:
    """Trees lose and move drafts while they grow: an entry in the wrong place would show as another first draft."""
    k = Knobs(budget=64, num_blocks=96, ops=ops)
    core = drafted("llama_gqa", (tiny("llama_gqa"),), k, 9, tree=tree)
    drafter = drafter_of(core)
    observe, seen = drafter.observe, [0, 0]

    def check_first(outcomes: Any) -> None:
        for outcome in outcomes:
            for node in (ROOT, *outcome.path):
                own = [t for t, p in zip(outcome.tree.token_ids, outcome.tree.parents, strict=True) if p == node]
                if own:
                    assert own[0] == outcome.choices[node + 1]
                    seen[0] += 1
            seen[1] += not outcome.tree.is_chain
        observe(outcomes)

    drafter.observe = check_first  # type: ignore[method-assign]
    requests = [request([3 + i, 4, 5, 6], max_tokens=40) for i in range(3)]
    got = run(core, requests)
    drafter_of(core)
    for r in requests:
        assert got[r.request_id].tokens[0] == generate(oracle("llama_gqa"), r)[0]
    assert seen[0] > 50
    assert seen[1] > 0, "no tree branched"


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_D10_the_model_as_its_own_draft_is_always_right(temperature: float, ops: str) -> None:
    """Under sampling too: both draw with the position's own number. 33 tokens, five a step."""
    k = Knobs(ops=ops, budget=64, block_size=4, num_blocks=128)
    core = drafted("llama_gqa", (tiny("llama_gqa"),), k)
    asked = [request([5 + i, 9, 4], max_tokens=33, temperature=temperature, seed=i) for i in range(3)]
    got = run(core, asked)
    assert_always_right(core)
    assert core.stats.num_drafts == 3 * 7, "32 tokens behind the first one: six drafts of four and one of one"
    for r in asked:
        if ops != "native":
            assert got[r.request_id].tokens[0] == generate(oracle("llama_gqa"), r)[0]


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", ["llama_gqa", "windowed"])
def test_D10_entries_of_a_draft_are_never_taken_on_trust(name: str, ops: str) -> None:
    """Shared prefixes, preemption (swap and recompute), chunks, forks, ragged tables, cache resets, processors: it is
    still always right."""
    rng = random.Random(f"right-{name}")
    for num_drafts in (1, 4, 6):
        k = knobs_for(rng)
        k.ops = ops
        core = drafted(name, (tiny(name),), k, num_drafts)
        asked = [r for r in workload(tiny(name)[0].vocab_size) if r.request_id != "masked"]  # it ends at a stop token
        turmoil(core, asked, rng)
        assert_always_right(core)
        drafter_of(core)


class Later:
    """Nobody drafts before `begin` steps with decodes."""

    name = "later"

    def __init__(self, begin: int, num_drafts: int) -> None:
        self.begin, self._room = begin, (num_drafts, 63)

    def begin_step(self, running: Any, now_s: float | None = None) -> Any:
        decoding = can_draft(running)
        if not decoding:
            return {}
        self.begin -= 1
        return {} if self.begin >= 0 else {seq.seq_id: self._room for seq in decoding}

    def observe(self, output: Any, result: Any) -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass


def test_D10_a_prefix_that_the_draft_has_not_seen_is_caught_up_with() -> None:
    prompt = [3 + (7 * i) % 50 for i in range(40)]
    spec, weights = tiny("llama_gqa")
    core = real_engine(
        spec, weights, Knobs(budget=64), drafts=(later := Later(4, 4)), draft_models=(tiny("llama_gqa"),),
        speculation={"method": "draft-model", "model": "same"},
    )  # fmt: skip
    run(core, [request(prompt, max_tokens=5)])
    drafter = drafter_of(core)
    assert (core.stats.num_drafts, drafter.num_caught_up) == (0, 0), "the blocks are cached without draft entries"
    later.begin = 0
    for seen in (False, True):
        before = drafter.num_caught_up
        got = run(core, [r := request([*prompt, 8], max_tokens=12)])[r.request_id]
        assert got.cached >= 40
        assert got.tokens[0] == generate(oracle("llama_gqa"), r)[0]
        assert_always_right(core)
        num_steps = 3  # 11 tokens, five a step
        few = num_steps + 1 + 2  # each newest token, the one before the first, and the last drafts of full drafts
        caught_up = drafter.num_caught_up - before
        assert caught_up <= few if seen else 41 < caught_up <= 41 + few


def test_D10_catching_up_is_bounded_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.drafters.draft_model.CATCH_UP", 16)
    assert CATCH_UP == 2048
    prompt = [3 + (7 * i) % 50 for i in range(70)]
    core = drafted("llama_gqa", (tiny("llama_gqa"),), Knobs(budget=256))
    drafter = drafter_of(core)
    sizes = []
    real = drafter.forward.run
    drafter.forward.run = lambda work: sizes.append(sum(len(w.token_ids) for w in work)) or real(work)  # type: ignore
    asked = [request(prompt, max_tokens=20), request(prompt[:3], max_tokens=20)]
    got = run(core, asked)
    for r in asked:
        assert got[r.request_id].tokens[0] == generate(oracle("llama_gqa"), r)[0]
    assert max(sizes) == 16
    assert_always_right(core)


def test_a_draft_model_made_for_fewer_positions_stops_there() -> None:
    spec, weights = tiny("llama_gqa")
    short = msgspec.structs.replace(spec, max_position=20)
    core = drafted("llama_gqa", ((short, weights),), Knobs(budget=64))
    r = request([5, 9, 4], max_tokens=40)
    assert run(core, [r])[r.request_id].tokens[0] == generate(oracle("llama_gqa"), r)[0]
    assert_always_right(core)
    assert drafter_of(core).name == "draft-model"
    assert 12 <= core.stats.num_accepted_tokens <= 20


def mean_accepted(name: str, draft_models: DraftSpecs, num_drafts: int, **more: Any) -> float:
    core = drafted(name, draft_models, Knobs(budget=256, num_blocks=256, block_size=4), num_drafts, **more)
    rng = random.Random(5)
    asked = [request([rng.randrange(3, 60) for _ in range(6)], max_tokens=60) for _ in range(8)]
    got = run(core, asked)
    for r in asked:
        assert got[r.request_id].tokens[0] == generate(oracle(name), r)[0]
    return core.stats.num_accepted_tokens / core.stats.num_drafts


def test_D11_a_merged_tree_accepts_no_less_than_the_best_chain() -> None:
    """At an equal number of verified drafts a step, greedy, against either draft model alone."""
    drafts = (noisy("llama_gqa", 0.12, 1), noisy("llama_gqa", 0.12, 2))
    for num_drafts in (8, 4)[: draws(1, 2)]:
        alone = [mean_accepted("llama_gqa", (draft,), num_drafts) for draft in drafts]
        merged = mean_accepted("llama_gqa", drafts, num_drafts)
        assert merged > max(alone), f"{merged} with a tree of {num_drafts} drafts, {alone} with chains"


@pytest.mark.parametrize(("name", "num_drafts"), [("llama_gqa", 3), ("llama_gqa", 9), ("slots", 5), ("windowed", 6)])
def test_D11_merged_drafts_change_no_token(name: str, num_drafts: int) -> None:
    rng = random.Random(f"merged-{name}-{num_drafts}")
    for more in ({}, {"tree": "k-ary"}, {"tree": "opt"}):
        draft_models = (tiny("llama_gqa"), tiny("llama_mha"))
        core = drafted(name, draft_models, knobs_for(rng), num_drafts, **more)
        check(name, turmoil(core, workload(tiny(name)[0].vocab_size), rng))
        assert core.stats.num_draft_tokens > 0
        assert core.executor.runner.drafter is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_D11_entries_of_merged_drafts_are_never_taken_on_trust(temperature: float) -> None:
    """The model itself among the drafters is right whatever the others draft: where a tree puts its drafts elsewhere
    than it had run them, it runs them again."""
    core = drafted("llama_gqa", (noisy("llama_gqa", 0.3), tiny("llama_gqa")), Knobs(budget=128, num_blocks=128), 8)
    merged = core.executor.runner.drafter  # type: ignore[attr-defined]
    same = merged.drafters[1]
    proposed: list[tuple[int, list[int]]] = []
    real = same.propose

    def propose(jobs: Any) -> Any:
        trees = real(jobs)
        proposed.extend((len(j.tokens), list(t.token_ids)) for j, t in zip(jobs, trees, strict=True))
        return trees

    same.propose = propose
    r = request([5, 9, 4], max_tokens=60, temperature=temperature, seed=3)
    text = [5, 9, 4, *run(core, [r])[r.request_id].tokens[0]]
    assert text[3:] == generate(oracle("llama_gqa"), r)[0]
    assert len(proposed) > 8
    for known, tokens in proposed:
        assert tokens[: len(text) - known] == text[known : known + len(tokens)]


def test_D11_a_drafter_of_another_kind_takes_part() -> None:
    """A model and prompt lookup: the model itself among them is always right, as far as its drafts are kept."""
    spec, weights = tiny("llama_gqa")
    core = real_engine(
        spec, weights, Knobs(budget=64), drafts=FixedDrafts(6, 63), draft_models=(tiny("llama_gqa"),),
        speculation={"method": "specinfer", "model": "ngram, same"},
    )  # fmt: skip
    r = request([5, 9, 4, 5, 9, 4, 5], max_tokens=40)
    assert run(core, [r])[r.request_id].tokens[0] == generate(oracle("llama_gqa"), r)[0]
    assert core.stats.num_accepted_tokens / core.stats.num_drafts > 3
    assert [d.name for d in core.executor.runner.drafter.drafters] == ["ngram", "draft-model"]  # type: ignore


def test_all_specs_that_take_part_share_a_vocabulary() -> None:
    assert expected("llama_gqa")
    assert {specs.make(n)[0].vocab_size for n in ("llama_gqa", "llama_mha", "windowed", "slots", "latent")} == {61}
