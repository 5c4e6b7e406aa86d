"""The laws, with an adapter drawn for each request: tokens are those of the request alone with its adapter, whatever
its company, drafts, preemptions, forks, stores and what of the adapters is in memory."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import LLM, LoRARequest, SamplingParams
from penstock.backends.native.adapted import AdaptedNative
from penstock.base.errors import ConfigError, ModelError
from penstock.core.adapter import AdapterRef, namespace_of, number_of
from penstock.core.kv_events import DEVICE, HOST, BlockStored
from penstock.core.request import Request
from penstock.core.sequence import Sequence
from penstock.engine.record import Recorder, load, replay
from penstock.sched.adapters import PATIENCE, WithAdapters
from penstock.sched.policy.fcfs import Fcfs
from penstock.text.decisions import DecisionQuestion
from tests import specs
from tests.adapting import made, nano, nano_folder
from tests.engine import test_kv_selection as kv_selection
from tests.engine.events import Follower
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, plain_core, real_engine, request, run
from tests.engine.naive import beam_search, generate
from tests.engine.test_laws_models import CONTROLS, draw_knobs, workload
from tests.native.running import ISAS
from tests.native.test_adapters import paged
from tests.native.test_coded_adapters import deltas
from tests.sampled import draws

COUNT = 4
OPS = ["ref", *(["native"] if ISAS else [])]


def ref_of(number: int) -> AdapterRef:
    return AdapterRef(b"adapter %d" % number, str(number), 1000, f"named {number}")


@cache
def parts(name: str, number: int) -> Any:
    """Low-rank pairs; of the last, codes that are added."""
    if number == COUNT - 1:
        found = deltas(specs.make(name)[0], number, 2, 32)[0]
        return {n: part for n, part in found.items() if n.endswith((".q", ".down"))}
    return made(specs.make(name)[0], number, rank=2 + number, share=0.8)


@cache
def logits(name: str, ops: str, number: int | None) -> Any:
    backend = "ref" if ops == "ref" else f"native-{ISAS[-1]}-1"

    one = paged(name, backend, adapters=None if number is None else {0: parts(name, number)})
    one.adapters = {} if number is None else {"a": 0}
    return cache(one.alone)


def adapted(asked: Request, number: int | None) -> Request:
    if number is None:
        return asked
    rules = msgspec.structs.replace(asked.rules, adapter=ref_of(number))
    return msgspec.structs.replace(asked, rules=rules, namespace=namespace_of(asked.namespace, ref_of(number)))


def numbered(name: str, rng: random.Random) -> dict[str, int | None]:
    return {r.request_id: rng.choice([None, *range(COUNT)]) for r in workload(specs.make(name)[0].vocab_size)}


def check(name: str, ops: str, numbers: dict[str, int | None], collector: Collector, note: Any) -> None:
    for r in workload(specs.make(name)[0].vocab_size):
        got, of = collector.requests[r.request_id], logits(name, ops, numbers[r.request_id])
        if r.beam is not None:
            assert [b[0] for b in got.beams] == [b[0] for b in beam_search(of, r)], (r.request_id, note)
            continue
        expected = [generate(of, r, i) for i in range(r.n)]
        assert [(got.tokens[i], got.reasons[i]) for i in range(r.n)] == expected, (r.request_id, note)


@pytest.mark.parametrize(("name", "ops"), [*(("llama_gqa", ops) for ops in OPS), ("slots", "ref")])
def test_J25_J24_tokens_depend_on_the_request_and_its_adapter_alone(name: str, ops: str, tmp_path: Path) -> None:
    spec, weights = specs.make(name)
    for draw in range(draws(3 if name == "llama_gqa" else 1, 12)):
        rng = random.Random(f"adapters-{name}-{draw}")
        numbers, knobs = numbered(name, rng), draw_knobs(rng)
        knobs.ops, knobs.adapters, knobs.adapters_held = ops, rng.choice([1, 2, 4]), 4
        knobs.num_blocks = max(knobs.num_blocks, 64 // knobs.block_size + 1)
        if name == "llama_gqa" and draw % 3 == 1:
            knobs.num_drafts, knobs.depth = 3, 1
        if name == "llama_gqa" and draw % 3 == 2:
            knobs.kv_offload, knobs.prefix_cache, knobs.host_blocks = f"disk:{tmp_path},1GiB", "radix", 0
        drafting = {"speculation": {"method": "ngram", "num_speculative_tokens": 3}} if knobs.num_drafts else {}
        core = real_engine(spec, weights, knobs, load_adapter=lambda ref: parts(name, int(ref.path)), **drafting)
        asked = [adapted(r, numbers[r.request_id]) for r in workload(spec.vocab_size)]
        collector = disturbed(core, asked, rng, CONTROLS, note=knobs)
        check(name, ops, numbers, collector, (numbers, knobs))
        assert_idle(core)


def engine(ops: str = "ref", adapters: int = 2, held: int = 2, load: Any = None, max_num_seqs: int = 8) -> Any:
    spec, weights = specs.make("llama_gqa")
    knobs = draw_knobs(random.Random(1))
    knobs.ops, knobs.adapters, knobs.adapters_held, knobs.depth, knobs.wire = ops, adapters, held, 1, True
    knobs.prefix_cache, knobs.block_size, knobs.num_blocks, knobs.budget = "radix", 4, 128, 64
    knobs.max_num_seqs, knobs.policy, knobs.threshold = max_num_seqs, "fcfs", 0
    return real_engine(
        spec, weights, knobs, load_adapter=load or (lambda ref: parts("llama_gqa", int(ref.path)))
    )  # fmt: skip


def test_tenants_displace_each_others_adapters_without_losing_tokens() -> None:
    """One place for adapters, three tenants: all get it in turn."""
    spec, weights = specs.make("llama_gqa")
    knobs = Knobs(policy="fair", adapters=1, adapters_held=2, num_blocks=128, budget=32, max_num_seqs=4, wire=True)
    core = real_engine(spec, weights, knobs, load_adapter=lambda ref: parts("llama_gqa", int(ref.path)))
    asked = []
    for i in range(12):
        tenant = 0 if i < 8 else 1 + i % 2
        r = request([5 + i, 9, 3, 17, 21], request_id=str(i), max_tokens=24 if i < 8 else 4, tenant=f"t{tenant}")
        asked.append((adapted(r, tenant), tenant))
    collector, todo = Collector(), list(asked)
    while todo or core.has_work:
        for r, _ in todo[:2]:
            core.add(r)
        todo = todo[2:]
        collector.take(core.step())
    for r, number in asked:
        assert collector.requests[r.request_id].tokens[0] == generate(logits("llama_gqa", "ref", number), r, 0)[0]
    assert core.stats.num_preemptions > 0
    assert_idle(core)


PROMPT = [5, 9, 3, 17, 21, 8, 30, 2, 11, 6, 40, 12]


def test_J25_blocks_of_one_adapter_are_never_those_of_another() -> None:
    core = engine()
    for round in range(2):
        asked = [
            adapted(request(PROMPT, request_id=f"{round}-{n}", max_tokens=6), n) for n in (None, 0, 1, 2)
        ]  # fmt: skip
        found = run(core, asked)
        for n in (None, 0, 1, 2):
            got = found[f"{round}-{n}"]
            assert got.tokens[0] == generate(logits("llama_gqa", "ref", n), asked[0], 0)[0]
    assert core.stats.num_prefix_hit_tokens == 4 * 8, "each finds its own two blocks, and no other's"


def test_J26_two_hundred_adapters_with_memory_for_twenty() -> None:
    """Each request has another one, in an order that no cache of twenty can keep up with: all are right."""
    name, many = "llama_gqa", 200
    spec, _ = specs.make(name)
    loads: list[int] = []

    def load(ref: AdapterRef) -> Any:
        loads.append(int(ref.path))
        return made(spec, int(ref.path), rank=1 + int(ref.path) % 8, share=0.3)

    core = engine("native" if ISAS else "ref", adapters=8, held=20, load=load)
    rng = np.random.default_rng(5)
    order = [int(n) for n in rng.permutation(many)] + [int(n) for n in rng.integers(0, 12, 40)]
    asked = [adapted(request(PROMPT[:5], request_id=str(i), max_tokens=2), n) for i, n in enumerate(order)]
    found = run(core, asked)
    backend = f"native-{ISAS[-1]}-1" if ISAS else "ref"
    for i in [*range(0, many, 19), *range(many, len(order), 7)]:
        alone = paged(name, backend, adapters={0: load(ref_of(order[i]))})
        alone.adapters = {"a": 0}
        assert found[str(i)].tokens[0] == alone.greedy({"a": PROMPT[:5]}, 2)["a"], order[i]
    stats = core.stats
    assert set(loads) == set(range(many))
    assert stats.num_adapters_wanted >= len(order)
    assert 0 < stats.num_adapter_hits < stats.num_adapters_wanted
    assert stats.num_adapters_given_up >= many - 20
    assert stats.adapter_wait_s > 0


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone() -> None:
    gone = {1}

    def load(ref: AdapterRef) -> Any:
        if int(ref.path) in gone:
            raise ModelError("cannot read 'adapter_model.safetensors': No such file or directory")
        return parts("llama_gqa", int(ref.path))

    core = engine(load=load)
    asked = {n: adapted(request(PROMPT, request_id=str(n), max_tokens=4), n) for n in (None, 0, 1)}
    found = run(core, list(asked.values()))
    assert "its adapter cannot be read: cannot read 'adapter_model" in str(found["1"].error)
    for n in (None, 0):
        assert found[str(n)].tokens[0] == generate(logits("llama_gqa", "ref", n), asked[n], 0)[0]
    gone.clear()
    again = run(core, [adapted(request(PROMPT, request_id="again", max_tokens=4), 1)])
    assert not again["again"].error, again["again"].error
    assert again["again"].tokens[0] == generate(logits("llama_gqa", "ref", 1), asked[1], 0)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_with_adapters_replays_to_the_identical_schedule(tmp_path: Path, depth: int) -> None:
    spec, weights = specs.make("llama_gqa")
    knobs = Knobs(num_blocks=48, budget=16, depth=depth, adapters=2, adapters_held=3)
    core = real_engine(spec, weights, knobs, load_adapter=lambda ref: parts("llama_gqa", int(ref.path)))
    core.recorder = Recorder()
    rng, emitted = random.Random(2), []
    todo = []
    for _ in range(14):
        ids = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 30))]
        todo.append(adapted(request(ids, max_tokens=6, n=rng.choice([1, 2])), rng.choice([None, *range(COUNT)])))
    while todo or core.has_work:
        if todo and rng.random() < 0.5:
            core.add(todo.pop())
        emitted += core.step()
    core.recorder.save(tmp_path / "run.log")
    again = replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, knobs, e, c), depth=depth)
    assert again == emitted
    assert core.stats.num_adapters_given_up > 0


def test_a_rank_in_a_process_of_its_own_reads_adapters_itself(tmp_path: Path) -> None:
    asked = LoRARequest("a", 1, str(nano_folder(tmp_path / "a", 1)))
    params, prompts = SamplingParams(temperature=0, max_tokens=6), ["Once upon a time", "One day"]
    found = []
    for executor in ("inproc", "multiproc"):
        llm = LLM(nano(), enable_lora=True, ops="ref", max_model_len=64, executor=executor)
        found.append([o.outputs[0].text for o in llm.generate(prompts, params, lora_request=[asked, None])])
    assert found[0] == found[1]


class _Kv:
    def __init__(self) -> None:
        self.ops: list[Any] = []
        self.outbox = self
        self.adapters = None

    def add(self, op: Any) -> None:
        self.ops.append(op)


def test_J26_who_lacks_a_place_waits_but_not_for_ever() -> None:
    policy, kv = WithAdapters(Fcfs(), 2), _Kv()
    policy.begin_step(0.0, kv)

    def seq(i: int, n: int | None) -> Sequence:
        return Sequence(i, adapted(request([1, 2], request_id=str(i), max_tokens=3), n), i)

    running = [seq(0, 0), seq(1, 1)]
    waiting = [seq(2, 2), seq(3, 0), seq(4, None), seq(5, 3)]
    found = policy.order(running, waiting)
    assert [s.seq_id for s in found] == [0, 1, 3, 4]
    assert policy.num_waiting == 2
    assert [op.adapter.path for op in kv.ops] == ["2", "0", "3"]
    for _ in range(PATIENCE):
        found = policy.order(running, waiting)
    assert [s.seq_id for s in found] == [0, 1], "nobody enters before who has waited so long"
    assert [s.seq_id for s in policy.order(running[:1], waiting)] == [0, 2, 3, 4]
    assert len(kv.ops) == 3, "each is named once"
    waiting[0].held = True  # it waits for a tool, and takes nobody's place
    assert [s.seq_id for s in policy.order(running[:1], waiting)] == [0, 2, 3, 4, 5]


@cache
def cut_alone(selector: str, kept: str, block_size: int) -> dict[str, Any]:
    """Tokens of each request by itself, with the adapter of its place."""
    spec, _ = specs.make("llama_gqa")
    found = {}
    for i, r in enumerate(kv_selection.workload(spec.vocab_size)):
        knobs = Knobs(block_size=block_size, num_blocks=512 // block_size, budget=512, prefix_cache="none")
        asked = adapted(r, (None, *range(COUNT))[i % (COUNT + 1)])
        found[r.request_id] = run(cut_engine(knobs, selector, kept), [asked])[r.request_id].tokens
    return found


def cut_engine(knobs: Knobs, selector: str, kept: str, **more: Any) -> Any:
    spec, weights = specs.make("llama_gqa")
    knobs.selector, knobs.kept, knobs.adapters, knobs.adapters_held = selector, kept, 4, 4
    knobs.selector_config = kv_selection.settings_of(selector)
    return real_engine(spec, weights, knobs, load_adapter=lambda ref: parts("llama_gqa", int(ref.path)), **more)


@pytest.mark.parametrize("selector", ["snapkv", "h2o"])
def test_what_is_forgotten_follows_the_request_and_its_adapter_alone(selector: str) -> None:
    """Selectors read keys that adapters made: preempted, forked, sharing prefixes or not, beside others or alone."""
    spec, _ = specs.make("llama_gqa")
    rng = random.Random(f"cut-{selector}")
    for _ in range(draws(1, 8)):
        knobs = kv_selection.draw_knobs(rng, selector, "40%", 0)
        core = cut_engine(knobs, selector, "40%")
        asked = [
            adapted(r, (None, *range(COUNT))[i % (COUNT + 1)])
            for i, r in enumerate(kv_selection.workload(spec.vocab_size))
        ]
        collector = disturbed(core, asked, rng, kv_selection.CONTROLS, note=knobs)
        assert core.kv.selections.num_cut > 0
        alone = cut_alone(selector, "40%", knobs.block_size)
        assert {i: collector.requests[i].tokens for i in alone} == alone, knobs
        assert_idle(core)
    assert cut_alone(selector, "40%", 4) != cut_alone(selector, "100%", 4), "a cut that changes nothing proves nothing"


@pytest.mark.parametrize("tells", [False, True])
def test_events_of_blocks_name_the_adapter_that_made_them(tells: bool) -> None:
    follower = Follower(include_token_ids=tells)
    spec, weights = specs.make("llama_gqa")
    knobs = Knobs(block_size=4, num_blocks=64, adapters=2, adapters_held=3, prefix_cache="radix", offload=True)
    knobs.host_blocks = 16
    load_adapter = lambda ref: parts("llama_gqa", int(ref.path))  # noqa: E731
    core = real_engine(spec, weights, knobs, load_adapter=load_adapter, events=follower)
    follower.follow(core)
    rng = random.Random(4)
    asked = {n: [request([rng.randrange(3, 60) for _ in range(20)], request_id=f"{n}-{i}", max_tokens=4)
                 for i in range(6)] for n in (None, 0, 1)}  # fmt: skip
    for n, each in asked.items():
        for r in each:
            run(core, [adapted(r, n)])
    core.publish()
    told: dict[int, set[Any]] = {}
    for event in follower.heard:
        if isinstance(event, BlockStored):
            for name in event.block_hashes:
                told.setdefault(name, set()).add((event.lora_id, event.lora_name))
    numbers = {None: (None, None)} | {n: (number_of(ref_of(n)), f"named {n}") for n in (0, 1)}
    assert all(len(each) == 1 for each in told.values()), "in every medium the same"
    assert Counter(next(iter(each)) for each in told.values()) == {numbers[n]: 6 * 5 for n in (None, 0, 1)}
    assert {event.medium for event in follower.heard if isinstance(event, BlockStored)} == {DEVICE, HOST}


def test_decisions_are_read_with_the_adapter(tmp_path: Path) -> None:
    asked = LoRARequest("a", 1, str(nano_folder(tmp_path / "a", 1)))
    llm = LLM(nano(), enable_lora=True, ops="ref", max_model_len=256)
    question = [DecisionQuestion("predicate", "Is the fox happy?")]
    found = [
        llm.decide("The fox saw a bird and was happy.", question, min_label_mass=0, lora_request=own)[0]
        for own in (None, asked, None)
    ]
    assert found[0].probabilities == found[2].probabilities != found[1].probabilities


def test_J27_an_adapter_is_merged_by_the_share_of_steps_that_have_it_alone() -> None:
    policy, kv = WithAdapters(Fcfs(), 4, 0.5), _Kv()
    policy.begin_step(0.0, kv)

    def steps(count: int, *numbers: int | None) -> list[Any]:
        seqs = [
            Sequence(i, adapted(request([1, 2], request_id=str(i), max_tokens=3), n), i) for i, n in enumerate(numbers)
        ]
        kv.ops.clear()
        for _ in range(count):
            policy.order(seqs, [])
        return [(op.adapter.path, op.merge) for op in kv.ops]

    assert steps(15, 1, 1) == []
    assert steps(1, 1, 1) == [("1", True)], "half of 32 steps"
    assert steps(24, 1, 2) == [], "a quarter of 32 is left: it stays"
    assert steps(1, 1, None) == [("1", False)], "seven are"
    assert steps(10, 1, 2) == []
    assert steps(16, None) == [], "nobody's adapter is nothing to be merged"
    assert steps(15, 3) == []
    assert steps(1, 3) == [("3", True)]
    assert steps(16, 2) == [("2", True)], "another one takes its place"


@pytest.mark.skipif(not ISAS, reason="no native library")
def test_J27_merging_follows_from_the_intake_and_a_log_replays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    spec, weights = specs.make("llama_gqa")
    knobs = Knobs(num_blocks=64, budget=16, adapters=2, adapters_held=3, ops="native", merge=0.25)
    core = real_engine(spec, weights, knobs, load_adapter=lambda ref: parts("llama_gqa", int(ref.path)))
    merged: list[int] = []
    inner = AdaptedNative.merge
    monkeypatch.setattr(AdaptedNative, "merge", lambda self, n, own: (merged.append(n), inner(self, n, own))[1])
    core.recorder = Recorder()
    rng, emitted = random.Random(2), []
    todo = [adapted(request([rng.randrange(3, 60) for _ in range(9)], max_tokens=20), n) for n in [1] * 3 + [0, None]]
    while todo or core.has_work:
        if todo and not core.has_work:
            core.add(todo.pop(0))
        emitted += core.step()
    assert len(merged) >= 2
    assert max(merged) >= 0, "somebody was"
    core.recorder.save(tmp_path / "run.log")
    assert replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, knobs, e, c), depth=1) == emitted


def test_J27_bases_that_would_round_the_sum_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights of float32 by native kernels"):
        LLM(nano(), enable_lora=True, ops="ref", max_model_len=64, lora_merge_threshold=0.5)
    if ISAS:
        with pytest.raises(ConfigError, match="weights of float32 by native kernels"):
            LLM(nano(), enable_lora=True, ops="native", max_model_len=64, lora_merge_threshold=0.5)
