"""The laws, with an adapter drawn for each request: tokens are those of the request alone with its adapter, whatever
its company, drafts, preemptions, forks, stores and what of the adapters is in memory."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import LLM, LoRARequest, SamplingParams
from penstock.base.errors import ModelError
from penstock.core.adapter import AdapterRef, namespace_of
from penstock.core.request import Request
from penstock.core.sequence import Sequence
from penstock.engine.record import Recorder, load, replay
from penstock.sched.adapters import PATIENCE, WithAdapters
from penstock.sched.policy.fcfs import Fcfs
from tests import specs
from tests.adapting import made, nano, nano_folder
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, plain_core, real_engine, request, run
from tests.engine.naive import beam_search, generate
from tests.engine.test_laws_models import CONTROLS, draw_knobs, workload
from tests.native.running import ISAS
from tests.native.test_adapters import paged
from tests.sampled import draws

COUNT = 4
OPS = ["ref", *(["native"] if ISAS else [])]


def ref_of(number: int) -> AdapterRef:
    return AdapterRef(b"adapter %d" % number, str(number), 1000)


@cache
def parts(name: str, number: int) -> Any:
    return made(specs.make(name)[0], number, rank=2 + number, share=0.8)


@cache
def logits(name: str, ops: str, number: int | None) -> Any:
    backend = "ref" if ops == "ref" else f"native-{ISAS[-1]}-1"

    @cache
    def of(tokens: tuple[int, ...]) -> Any:
        alone = paged(name, backend, adapters=None if number is None else {0: parts(name, number)})
        alone.adapters = {} if number is None else {"a": 0}
        return alone.run({"a": (tokens, [len(tokens) - 1])})["a"][0].copy()

    return of


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
