"""J26, whole: adapters lie in blocks of the KV pool, and no token depends on it."""

from __future__ import annotations

import random
import threading
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock import LLM, LoRARequest, SamplingParams
from penstock.base.errors import InputError, ModelError
from penstock.config import from_kwargs
from penstock.core.adapter import AdapterRef
from penstock.core.request import Control, Request
from penstock.engine.record import Recorder, load, replay
from penstock.kv.adapter_pages import blocks_of
from penstock.launch.selection import keeping_of
from penstock.ops.adapter_units import shape_of
from penstock.ops.adapter_units import units_of as units_of_part
from penstock.plan.adapters import adapter_decision, adapter_units
from penstock.plan.keeping import groups_of
from penstock.runner import paged_adapters
from penstock.runner.paged_adapters import unit_pieces
from tests import specs
from tests.adapting import made, nano, nano_folder, nano_shapes
from tests.engine.fake_model import spec as fake_spec
from tests.engine.harness import Collector, Knobs, assert_idle, disturbed, drain, plain_core, real_engine, request
from tests.engine.naive import generate
from tests.engine.test_adapters import COUNT, OPS, PROMPT, adapted, check, logits, numbered, parts
from tests.engine.test_laws_models import CONTROLS, draw_knobs, workload
from tests.native.running import ISAS
from tests.native.test_adapters import paged
from tests.sampled import draws

NAME = "llama_gqa"


@cache
def ref_of(number: int) -> AdapterRef:
    return AdapterRef(b"adapter %d" % number, str(number), 1000, f"named {number}", units_of(parts(NAME, number)))


def units_of(own: Any) -> int:
    return sum(shape_of(part).num_units for part in own.values())


def sized(asked: Request, ref: AdapterRef | None = None) -> Request:
    """The request with an adapter that says how much it takes."""
    adapter = asked.rules.adapter
    if adapter is None:
        return asked
    rules = msgspec.structs.replace(asked.rules, adapter=ref or ref_of(int(adapter.path)))
    return msgspec.structs.replace(asked, rules=rules)


def knobs_of(ops: str = "ref", **more: Any) -> Knobs:
    own: dict[str, Any] = {
        "block_size": 16, "num_blocks": 64, "budget": 64, "wire": True, "adapters": 2, "adapters_held": 64
    }  # fmt: skip
    return Knobs(ops=ops, adapter_pool=True, **own | more)


def engine(knobs: Knobs, load: Any = None, **more: Any) -> Any:
    spec, weights = specs.make(NAME)
    return real_engine(spec, weights, knobs, load_adapter=load or (lambda ref: parts(NAME, int(ref.path))), **more)


def asking(number: int | None, ids: Any = PROMPT, **more: Any) -> Request:
    return sized(adapted(request(list(ids), **more), number))


def finish(core: Any, *asked: Request) -> Collector:
    collector = Collector()
    for r in asked:
        core.add(r)
    drain(core, collector)
    assert_idle(core)
    return collector


@pytest.mark.parametrize("ops", OPS)
def test_J26_with_one_pool_tokens_depend_on_the_request_and_its_adapter_alone(ops: str, tmp_path: Path) -> None:
    """Preempted, forked, swapped, made ragged, drafted for, with two steps in flight, found in caches and stores."""
    spec, _ = specs.make(NAME)
    given_up = 0
    for draw in range(draws(3, 12)):
        rng = random.Random(f"pool-{draw}")
        numbers, knobs = numbered(NAME, rng), draw_knobs(rng)
        knobs.ops, knobs.adapters, knobs.adapters_held, knobs.adapter_pool = ops, rng.choice([1, 2, 4]), 4, True
        knobs.block_size, knobs.num_blocks, knobs.prefix_cache = 16, 20, rng.choice(["radix", "radix", "hash"])
        if draw % 3 == 1:
            knobs.num_drafts, knobs.depth = 3, 1
        if draw % 3 == 2:
            knobs.kv_offload, knobs.prefix_cache, knobs.host_blocks = f"disk:{tmp_path},1GiB", "radix", 0
        drafting = {"speculation": {"method": "ngram", "num_speculative_tokens": 3}} if knobs.num_drafts else {}
        core = engine(knobs, **drafting)
        assert core.kv.adapters is not None
        asked = [sized(adapted(r, numbers[r.request_id])) for r in workload(spec.vocab_size)]
        collector = disturbed(core, asked, rng, CONTROLS, note=knobs)
        check(NAME, ops, numbers, collector, (numbers, knobs))
        given_up += core.stats.num_adapters_given_up
    assert given_up, "a pool that nobody fills proves nothing"


def pieces_of(core: Any, number: int) -> list[Any]:
    """The units in which the adapter lies now: views of the rank's planes."""
    (held,) = (h for h in core.kv.adapters.held if h.ref == ref_of(number))
    return unit_pieces(core.executor._runner.storage.planes, core.kv.groups, held.blocks)


@pytest.mark.parametrize("ops", OPS)
def test_J26_the_numbers_lie_in_the_pages_and_are_read_from_there(ops: str) -> None:
    core = engine(knobs_of(ops))
    before = finish(core, asking(1, request_id="a", max_tokens=6)).requests["a"].tokens[0]
    assert before == generate(logits(NAME, ops, 1), request(PROMPT, max_tokens=6), 0)[0]
    pieces, own = pieces_of(core, 1), [units for part in parts(NAME, 1).values() for units in units_of_part(part)]
    assert sum(map(len, pieces)) >= len(own) > 8
    np.testing.assert_array_equal(np.concatenate(pieces)[: len(own)], np.stack(own))
    kept = [piece.copy() for piece in pieces]
    core.kv.reset_prefix_cache()
    for piece in pieces:
        piece.view(np.float32)[:] *= -3.0
    assert finish(core, asking(1, request_id="b", max_tokens=6)).requests["b"].tokens[0] != before
    core.kv.reset_prefix_cache()
    for piece, was in zip(pieces, kept, strict=True):
        piece[:] = was
    assert finish(core, asking(1, request_id="c", max_tokens=6)).requests["c"].tokens[0] == before
    assert core.stats.num_adapter_hits >= 2


def test_J26_two_hundred_adapters_in_a_pool_with_room_for_twenty() -> None:
    """All right, texts and adapters in one pool, and one makes room for the other."""
    spec, many, ops = specs.make(NAME)[0], 200, OPS[-1]
    made_of = cache(lambda n: made(spec, n, rank=1 + n % 8, share=0.3))

    def ref(n: int) -> AdapterRef:
        return AdapterRef(b"adapter %d" % n, str(n), 1000, f"named {n}", units_of(made_of(n)))

    refs = [ref(n) for n in range(many)]
    each = sum(blocks_of(r, 4) for r in refs) / many
    core = engine(
        knobs_of(ops, num_blocks=round(20 * each) + 4, adapters=8, adapters_held=many, prefix_cache="radix"),
        lambda ref: made_of(int(ref.path)),
    )
    rng = np.random.default_rng(5)
    order = [int(n) for n in rng.permutation(many)] + [int(n) for n in rng.integers(0, 12, 40)]
    asked = [
        sized(adapted(request(PROMPT[:5], request_id=str(i), max_tokens=2), n), refs[n]) for i, n in enumerate(order)
    ]
    collector, both, held = Collector(), 0, 0
    for r in asked:
        core.add(r)
    while core.has_work:
        collector.take(core.step())
        stats = core.kv.stats()
        (group,) = stats.groups
        held = max(held, stats.num_adapters_held)
        assert group.free + group.used + group.evictable + group.quarantined == group.total
        both = max(both, stats.num_adapter_blocks if core.scheduler.running else 0)
    assert_idle(core)
    backend = "ref" if ops == "ref" else f"native-{ISAS[-1]}-1"
    for i in [*range(0, many, 19), *range(many, len(order), 7)]:
        alone = paged(NAME, backend, adapters={0: made_of(order[i])})
        alone.adapters = {"a": 0}
        assert collector.requests[str(i)].tokens[0] == alone.greedy({"a": PROMPT[:5]}, 2)["a"], order[i]
    assert 8 < held < 30
    assert both > 8 * each
    stats = core.stats
    assert stats.num_adapters_wanted >= len(order)
    assert 0 < stats.num_adapter_hits < stats.num_adapters_wanted
    assert stats.num_adapters_given_up >= many - 30
    assert core.kv.stats().num_evicted_blocks + stats.num_adapters_given_up > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_J26_a_run_with_one_pool_replays_to_the_identical_schedule(tmp_path: Path, depth: int) -> None:
    spec, _ = specs.make(NAME)
    knobs = knobs_of(num_blocks=20, budget=16, depth=depth, adapters_held=4)
    core = engine(knobs)
    core.recorder = Recorder()
    rng, emitted = random.Random(2), []
    todo = []
    for _ in range(14):
        ids = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 30))]
        todo.append(asking(rng.choice([None, *range(COUNT)]), ids, max_tokens=6, n=rng.choice([1, 2])))
    while todo or core.has_work:
        if todo and rng.random() < 0.5:
            core.add(todo.pop())
        emitted += core.step()
    core.recorder.save(tmp_path / "run.log")
    again = replay(load(tmp_path / "run.log"), lambda e, c: plain_core(spec, knobs, e, c), depth=depth)
    assert again == emitted
    assert core.stats.num_adapters_given_up > 0


def test_J26_what_is_read_ahead_never_writes_into_what_was_taken_from_it() -> None:
    """Texts take the blocks of an adapter while a thread reads it."""
    goes_on, began = threading.Event(), threading.Event()

    def slow(ref: AdapterRef) -> Any:
        if int(ref.path) == 1:
            began.set()
            assert goes_on.wait(20)
        return parts(NAME, int(ref.path))

    core = engine(knobs_of(num_blocks=24, adapters=1, prefix_cache="none"), slow)
    text = [5 + n % 50 for n in range(150)]
    collector = Collector()
    core.add(asking(0, [4, 5], request_id="first", max_tokens=12))
    core.add(asking(1, request_id="waits", max_tokens=4))
    core.add(asking(None, text, request_id="long", max_tokens=60))
    collector.take(core.step())
    assert began.wait(20), "it is read beside the steps"
    while not any(not h for h in [len(core.kv.adapters.held) > 1]):
        collector.take(core.step())
    goes_on.set()
    drain(core, collector)
    assert_idle(core)
    for name, number, ids, most in (("first", 0, [4, 5], 12), ("waits", 1, PROMPT, 4), ("long", None, text, 60)):
        wanted = generate(logits(NAME, "ref", number), request(ids, max_tokens=most), 0)[0]
        assert collector.requests[name].tokens[0] == wanted, name


def test_J26_an_adapter_that_cannot_be_read_fails_its_requests_alone_and_is_tried_again() -> None:
    gone = {1}

    def reading(ref: AdapterRef) -> Any:
        if int(ref.path) in gone:
            raise ModelError("cannot read 'adapter_model.safetensors': No such file or directory")
        return parts(NAME, int(ref.path))

    core = engine(knobs_of(), reading)
    found = finish(core, *(asking(n, request_id=str(n), max_tokens=4) for n in (None, 0, 1))).requests
    assert "its adapter cannot be read: cannot read 'adapter_model" in str(found["1"].error)
    assert found["0"].tokens[0] == generate(logits(NAME, "ref", 0), request(PROMPT, max_tokens=4), 0)[0]
    gone.clear()
    again = finish(core, asking(1, request_id="again", max_tokens=4)).requests["again"]
    assert not again.error, again.error
    assert again.tokens[0] == generate(logits(NAME, "ref", 1), request(PROMPT, max_tokens=4), 0)[0]


@pytest.mark.parametrize("ops", OPS)
def test_J26_codes_lie_beside_the_blocks_that_stand_for_them(ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has less by their bytes, and the system has the memory of those blocks."""
    given: list[Any] = []
    monkeypatch.setattr(paged_adapters, "give_back", given.extend)
    own = parts(NAME, COUNT - 1)
    ref = AdapterRef(b"codes", str(COUNT - 1), 10_000, "codes", 10)
    core = engine(knobs_of(ops))
    finish(core, sized(adapted(request(PROMPT, max_tokens=2), COUNT - 1), ref))
    assert units_of(own) == 0
    (held,) = core.kv.adapters.held
    assert len(held.blocks) == 3, "of four units each"
    width = core.kv.groups[0].pages_per_slab
    pages = {(first // array.strides[0], end // array.strides[0]) for array, first, end in given}
    assert pages == {(slab * width, slab * width + width) for (slab,) in held.blocks}


def test_J26_a_sleeping_engine_gives_up_adapters_too() -> None:
    core = engine(knobs_of())
    finish(core, asking(0, max_tokens=2))
    assert core.kv.stats().num_adapter_blocks > 0
    core.add(Control(kind="sleep"))
    core.step()
    assert core.kv.stats().num_adapter_blocks == 0
    finish(core, asking(0, max_tokens=2))


@pytest.mark.parametrize(
    ("model", "more", "why"),
    [
        ("slots", {}, ""), ("latent", {}, ""), (NAME, {"lora_memory": 0.5}, "it was given"),
        (NAME, {"kv_allocator": "contiguous"}, "has no blocks that belong to nobody"),
        (NAME, {"kv_selector": "streaming", "kv_budget": "32"}, "leave no bound"),
        (NAME, {"block_size": 1}, "too small to hold any; raise block_size"),
        (NAME, {"ops": "torch"}, "on the CPU's own kernels alone"),
        ("windows", {}, "no tokens in blocks that stay"),
    ],
)  # fmt: skip
def test_J26_where_adapters_have_memory_of_their_own_it_is_said_why(model: str, more: Any, why: str) -> None:
    spec = fake_spec(slots=False, windows=(5, 8)) if model == "windows" else specs.make(model)[0]
    config = from_kwargs(**{"model": "(test)", "ops": "ref", "enable_lora": True, "block_size": 16} | more)
    groups = groups_of(spec, "float32", keeping_of(config))
    decision = adapter_decision(config, groups, config.cache.block_size)
    assert (adapter_units(config, groups, config.cache.block_size) > 0) == (not why)
    assert why in decision.why
    assert (decision.value == "blocks of KV") == (not why)


def test_J26_an_adapter_that_leaves_no_room_is_refused_at_the_door(tmp_path: Path) -> None:
    asked = LoRARequest("a", 1, str(nano_folder(tmp_path / "a", 1, rank=16)))
    small: dict[str, Any] = {"enable_lora": True, "ops": "ref", "max_model_len": 64, "block_size": 16}
    llm = LLM(nano(), num_gpu_blocks_override=4, **small)
    params = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(
        InputError, match=r"model: the adapter a takes \d+ blocks of KV memory, and of the 4 that there are none"
    ):
        llm.generate("Once", params, lora_request=asked)
    assert llm.generate("Once", params)[0].outputs[0].token_ids
    own = LLM(nano(), num_gpu_blocks_override=4, lora_memory=0.5, **small)
    wanted = own.generate("Once", params, lora_request=asked)[0].outputs[0].token_ids
    units = own._engine.adapters.read(asked.lora_path).num_units  # type: ignore[union-attr]
    per_block = llm._engine.limits.adapter_units
    fitting = LLM(nano(), num_gpu_blocks_override=-(-units // per_block) + 2, **small)
    assert fitting._engine.limits.beside(AdapterRef(b"", "", num_units=units)).context[0] == 32
    assert fitting.generate("Once", params, lora_request=asked)[0].outputs[0].token_ids == wanted
    long = {"prompt_token_ids": [5] * 40}
    with pytest.raises(InputError, match=r"by the size of the KV cache this model's maximum context length is 32"):
        fitting.generate(long, params, lora_request=asked)  # type: ignore[arg-type]
    assert fitting.generate(long, params)[0].outputs[0].token_ids  # type: ignore[arg-type]


def test_J26_by_default_there_is_room_for_as_many_adapters_as_may_run_at_once(tmp_path: Path) -> None:
    """Of the largest rank, on every product: beside what the sequences need."""
    targets = tuple({module.rpartition(".")[2] for module in nano_shapes()})
    asked = [
        LoRARequest(f"a{i}", 1 + i, str(nano_folder(tmp_path / f"a{i}", i, rank=16, targets=targets))) for i in range(3)
    ]
    how: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16, "max_num_seqs": 3}
    llm = LLM(nano(), ops="ref", max_model_len=64, block_size=16, **how)
    running: list[int] = []
    core, inner = llm._engine.core, llm._engine.core.step

    def step() -> Any:
        out = inner()
        running.append(len(core.scheduler.running))
        return out

    core.step = step  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for _ in range(2):
        llm.generate(["Once", "There", "Then"], params, lora_request=asked)
    assert core.stats.counters()["num_adapters_given_up"] == 0
    assert running.count(3) >= 8
