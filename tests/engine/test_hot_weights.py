"""Weights swapped in a running engine: every token is that of the naive loop over the weights that were in force."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.hashing import digest
from penstock.core.output import EngineOutput
from penstock.core.request import Abort, Control, Request
from penstock.core.weight_swap import BUSY, SWAPPED, WeightFacts, WeightsOrder
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.launch.assemble import model_parts
from penstock.launch.parts import make_rank
from tests.engine.harness import (
    Collector,
    Knobs,
    assert_idle,
    config_for,
    plain_core,
    plan_for,
    real_engine,
    request,
    run,
    tiny,
)
from tests.engine.naive import Logits, beam_search, choose, generate, model_logits
from tests.engine.test_adapter_pages import sized
from tests.engine.test_adapters import adapted, parts
from tests.engine.test_laws_models import CONTROLS, draw_knobs, workload
from tests.native.running import ISAS
from tests.native.test_adapters import paged
from tests.oracle import NaiveModel
from tests.paged import Paged
from tests.sampled import draws

VERSIONS = 3


@cache
def versions(name: str) -> list[tuple[Any, dict[str, Any]]]:
    """A model, and others of its shapes."""
    spec, weights = tiny(name)
    found = [(spec, weights)]
    for n in range(1, VERSIONS):
        rng = np.random.default_rng(n)
        other = {k: (w * rng.uniform(0.7, 1.3, w.shape)).astype(w.dtype) for k, w in weights.items()}
        found.append((spec, other))
    return found


@cache
def oracle(name: str, version: int) -> Logits:
    return model_logits(NaiveModel(*versions(name)[version]))


class Others:
    """What reads the weights of `versions`, by their number. `broken`: they cannot be read."""

    def __init__(self, name: str, knobs: Knobs, core: EngineCore, speculation: Any = None, adapter: Any = None) -> None:
        self.name, self.knobs, self.speculation, self.adapter = name, knobs, speculation, adapter
        self.next = 0
        core.executor._runner.reload = self  # type: ignore[attr-defined]

    def read(self, path: str) -> WeightFacts:
        self.next = int(path)
        return WeightFacts(path, digest(b"version", path.encode(), repr(self.knobs.block_size).encode()).hex()[:16])

    def switch(self, rank: Any) -> Any:
        spec, weights = versions(self.name)[self.next]
        config, plan = config_for(self.knobs, self.speculation), plan_for(spec, self.knobs)
        parts = model_parts(config, spec, weights, plan, load_adapter=self.adapter)
        new = make_rank(config, plan, parts, rank._clock, poison=True, like=rank)
        new.reload = self
        return new


def engine(name: str, knobs: Knobs, **more: Any) -> EngineCore:
    core = real_engine(*versions(name)[0], knobs, **more)
    Others(name, knobs, core, more.get("speculation"), more.get("load_adapter"))
    return core


def order(core: EngineCore, version: int, mode: str = "wait", name: str = "") -> Control:
    facts = core.executor.ready_weights(str(version))
    asked = WeightsOrder(str(version), f"v{version}", mode, facts)
    return Control(kind="weights", request_id=name or f"swap to {version}", weights=asked)


class Spans:
    """Which version was in force at which token of each sample. `take` for what a step yields, `asked` for orders."""

    def __init__(self) -> None:
        self.collector = Collector()
        self.version = 0
        self.asked: list[int] = []
        self.of: dict[tuple[str, int], list[int]] = {}
        self.held: dict[str, set[int]] = {}

    def take(self, outputs: list[EngineOutput]) -> None:
        for out in outputs:
            if out.finish_reason == SWAPPED:
                assert out.error is None, out
                self.version = self.asked.pop(0)
                continue
            self.of.setdefault((out.request_id, out.index), []).extend([self.version] * len(out.token_ids))
            self.collector.take([out])

    def logits(self, name: str, r: Request, index: int) -> Logits:
        versions = self.of[r.request_id, index]
        start = len(r.prompt_token_ids)
        return lambda tokens: oracle(name, versions[len(tokens) - start])(tokens)


def in_turmoil(
    core: EngineCore, asked: list[Request], rng: random.Random, modes: list[str], note: Any, *, holds: bool
) -> Spans:
    """Requests, controls, swaps and, with `holds`, holds, at moments that `rng` draws."""
    spans, todo, steps, times, last = Spans(), list(asked), 0, 25, 0
    rng.shuffle(todo)
    while todo or core.has_work:
        while todo and rng.random() < 0.4:
            core.add(todo.pop())
        if core.groups and times and rng.random() < 0.2:
            times -= 1
            core.add(Control(kind=rng.choice(CONTROLS), request_id=rng.choice(sorted(core.groups))))
        if not spans.asked and rng.random() < 0.1:
            last = rng.choice([n for n in range(VERSIONS) if n != last])
            spans.asked.append(last)
            core.add(order(core, last, rng.choice(modes), f"swap {steps}"))
        if holds and rng.random() < 0.05:
            core.add(Control(kind="hold", label=rng.choice([None, "retract"])))
        if rng.random() < 0.3:
            core.add(Control(kind="go_on"))
        spans.take(core.step())
        steps += 1
        assert steps < 5000, f"somebody starves {note}"
    assert_idle(core)
    return spans


def check(name: str, spans: Spans, asked: list[Request], *, whole: bool, note: Any) -> None:
    """`whole`: each request has one version."""
    for r in asked:
        got = spans.collector.requests[r.request_id]
        if r.beam is not None:
            if whole:
                found = [[b[0] for b in beam_search(oracle(name, n), r)] for n in range(VERSIONS)]
                assert [b[0] for b in got.beams] in found, (r.request_id, note)
            continue
        for i in range(r.n):
            if whole:
                assert len(set(spans.of[r.request_id, i])) == 1, (r.request_id, note)
            expected = generate(spans.logits(name, r, i), r, i)
            assert (got.tokens[i], got.reasons[i]) == expected, (r.request_id, i, spans.of[r.request_id, i], note)


FEW = {"llama_gqa": (0, 1, 2), "slots": (1, 2), "windowed": (1,)}
"""Even draws wait; 1 has drafts, 2 a store."""


@pytest.mark.parametrize("name", FEW)
def test_I15_tokens_are_those_of_the_weights_in_force(name: str, tmp_path: Path) -> None:
    """Whoever waits for a swap is whole; whoever goes over is computed again. With drafts, a store, tiers, two steps
    in flight."""
    total = 0
    for draw in range(16) if draws(0, 1) else FEW[name]:
        rng = random.Random(f"swaps-{name}-{draw}")
        knobs = draw_knobs(rng)
        knobs.num_blocks = max(knobs.num_blocks, 64 // knobs.block_size + 1)
        whole = draw % 2 == 0
        more: dict[str, Any] = {}
        if name == "llama_gqa" and draw % 4 == 1:
            knobs.depth, knobs.num_drafts = 1, 3
            more["speculation"] = {"method": "ngram", "num_speculative_tokens": 3}
        if name != "windowed" and draw % 4 == 2:
            knobs.kv_offload, knobs.prefix_cache, knobs.host_blocks = f"disk:{tmp_path}/{draw},1GiB", "radix", 0
        core = engine(name, knobs, **more)
        asked = workload(versions(name)[0][0].vocab_size)
        spans = in_turmoil(core, asked, rng, ["wait"] if whole else ["recompute", "wait"], knobs, holds=not whole)
        check(name, spans, asked, whole=whole, note=knobs)
        total += core.stats.num_weight_swaps
    assert total >= 4, "hardly anything was swapped"


def to_engine(name: str = "llama_gqa", **knobs: Any) -> EngineCore:
    return engine(name, Knobs(**({"block_size": 4, "num_blocks": 128, "budget": 64} | knobs)))


PROMPT = [5, 9, 3, 17, 21, 8, 30, 2, 11, 6, 40, 12]


def step_until(core: EngineCore, spans: Spans, request_id: str, num_tokens: int) -> None:
    while len(spans.of.get((request_id, 0), [])) < num_tokens:
        spans.take(core.step())


def tokens_of(spans: Spans, r: Request) -> list[int]:
    return spans.collector.requests[r.request_id].tokens[0]


def test_whoever_has_not_begun_waits_for_the_swap() -> None:
    core, spans = to_engine(max_num_seqs=1), Spans()
    first, queued, later, gone = (request(PROMPT, request_id=n, max_tokens=9) for n in ("a", "b", "c", "d"))
    core.add(first)
    core.add(queued)
    step_until(core, spans, "a", 3)
    spans.asked.append(1)
    core.add(order(core, 1))
    core.add(later)
    core.add(gone)
    spans.take(core.step())
    core.add(order(core, 1, name="too soon"))
    core.add(Abort(request_id="d"))
    news = core.step()
    assert [(out.request_id, out.error) for out in news if out.finish_reason == SWAPPED] == [("too soon", BUSY)]
    spans.take([out for out in news if out.finish_reason != SWAPPED])
    while core.has_work:
        spans.take(core.step())
    assert [set(spans.of[n, 0]) for n in ("a", "b", "c")] == [{0}, {1}, {1}]
    for r in (first, queued, later):
        assert tokens_of(spans, r) == generate(spans.logits("llama_gqa", r, 0), r)[0]
    assert_idle(core)


def test_copies_of_the_old_weights_are_given_up_everywhere() -> None:
    core, spans = to_engine(host_blocks=64, preemption="swap"), Spans()
    r = request(PROMPT * 2, request_id="a", max_tokens=9)
    core.add(r)
    step_until(core, spans, "a", 3)
    core.add(Control(kind="preempt", request_id="a"))
    spans.asked.append(1)
    core.add(order(core, 1, "recompute"))
    while core.has_work:
        spans.take(core.step())
    assert core.stats.num_swaps == 1, "it had a copy on the host"
    assert spans.of["a", 0] == [0] * 3 + [1] * 6
    assert tokens_of(spans, r) == generate(spans.logits("llama_gqa", r, 0), r)[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_kept_keys_and_values_are_those_of_the_old_weights(depth: int) -> None:
    """As one program after the other over the same pages, also where a row has tokens that nobody has told of yet."""
    name = "llama_gqa"
    core, spans = to_engine(depth=depth), Spans()
    r = request(PROMPT, request_id="a", max_tokens=9, repetition_penalty=1.5, frequency_penalty=0.4)
    core.add(r)
    step_until(core, spans, "a", 4)
    spans.asked.append(1)
    core.add(order(core, 1, "keep"))
    while core.has_work:
        spans.take(core.step())
    old, new = (Paged(spec, weights) for spec, weights in versions(name)[:2])
    expected: list[int] = []
    logits = old.run({"a": (PROMPT, [len(PROMPT) - 1])})["a"][0]
    new.planes, new._tables, new.lens, new._free = old.planes, old._tables, old.lens, old._free
    while True:
        expected.append(choose(logits, r.rules, PROMPT, expected, 0))
        if len(expected) == 9:
            break
        logits = (old if spans.of["a", 0][len(expected)] == 0 else new).run({"a": ([expected[-1]], [0])})["a"][0]
    assert tokens_of(spans, r) == expected
    again = request([*PROMPT, *expected], request_id="b", max_tokens=4)
    assert run(core, [again])["b"].tokens[0] == generate(oracle(name, 1), again)[0], "nobody else meets them"
    assert core.stats.num_prefix_hit_tokens == 0


def test_a_recorded_run_with_swaps_replays(tmp_path: Path) -> None:
    name, knobs = "llama_gqa", Knobs(depth=2, num_blocks=48, host_blocks=16)
    core = engine(name, knobs)
    core.recorder = Recorder()
    asked = workload(versions(name)[0][0].vocab_size)
    spans = in_turmoil(core, asked, random.Random(3), ["wait", "recompute", "abort"], knobs, holds=True)
    assert core.stats.num_weight_swaps >= 2
    core.recorder.save(tmp_path / "run")
    spec = versions(name)[0][0]
    emitted = replay(load(tmp_path / "run"), lambda ex, clock: plain_core(spec, knobs, ex, clock), depth=2)
    again = Spans()
    again.asked = [0] * 100
    again.take(emitted)
    assert {i: c.tokens for i, c in again.collector.requests.items()} == {
        i: c.tokens for i, c in spans.collector.requests.items()
    }


@pytest.mark.parametrize("pool", [False, True])
def test_adapters_go_over_with_their_rows(pool: bool) -> None:
    """Each token is that of the adapter over the weights in force, wherever its numbers are."""
    name, rng = "llama_gqa", random.Random("adapters and swaps")

    @cache
    def alone(version: int, number: int | None) -> Logits:
        held = None if number is None else {0: parts(name, number)}
        one = paged(name, "ref", versions(name)[version][1], adapters=held)
        one.adapters = {} if number is None else {"a": 0}
        return cache(one.alone)

    knobs = draw_knobs(rng)
    knobs.adapters, knobs.adapters_held, knobs.num_blocks, knobs.block_size = 2, 2, 96, 4
    if pool:
        knobs.adapter_pool, knobs.num_blocks, knobs.block_size = True, 40, 16
    core = engine(name, knobs, load_adapter=lambda ref: parts(name, int(ref.path)))
    numbers: list[int | None] = [None, 0, 1, 2, 0, 1]
    asked = [
        sized(adapted(request(PROMPT[: 4 + i], request_id=str(i), max_tokens=10), number))
        for i, number in enumerate(numbers)
    ]
    spans = in_turmoil(core, asked, rng, ["wait", "recompute"], knobs, holds=True)
    assert core.stats.num_weight_swaps >= 2
    assert (core.kv.adapters is not None) == pool
    for r, number in zip(asked, numbers, strict=True):
        runs, start = spans.of[r.request_id, 0], len(r.prompt_token_ids)

        def logits(tokens: tuple[int, ...], number: Any = number, runs: Any = runs, start: int = start) -> Any:
            return alone(runs[len(tokens) - start], number)(tokens)

        assert tokens_of(spans, r) == generate(logits, r)[0], (number, runs)


@pytest.mark.skipif(not ISAS, reason="no native kernels here")
def test_I15_native_programs_are_swapped_with_their_drafts(tmp_path: Path) -> None:
    name = "llama_gqa"

    @cache
    def native(version: int) -> Logits:
        return cache(paged(name, f"native-{ISAS[-1]}-1", versions(name)[version][1]).alone)

    rng = random.Random("native swaps")
    knobs = draw_knobs(rng)
    knobs.ops, knobs.depth, knobs.num_blocks, knobs.block_size, knobs.num_drafts = "native", 1, 64, 4, 3
    core = engine(name, knobs, speculation={"method": "ngram", "num_speculative_tokens": 3})
    asked = [r for r in workload(versions(name)[0][0].vocab_size) if r.beam is None]
    spans = in_turmoil(core, asked, rng, ["wait", "recompute"], knobs, holds=True)
    assert core.stats.num_weight_swaps >= 2
    for r in asked:
        for i in range(r.n):
            runs, start = spans.of[r.request_id, i], len(r.prompt_token_ids)
            expected = generate(lambda tokens, runs=runs, start=start: native(runs[len(tokens) - start])(tokens), r, i)
            assert spans.collector.requests[r.request_id].tokens[i] == expected[0], (r.request_id, i)


def test_steps_in_flight_come_home_before_a_swap() -> None:
    core, spans = to_engine(depth=2), Spans()
    r = request(PROMPT, request_id="a", max_tokens=30)
    core.add(r)
    step_until(core, spans, "a", 3)
    spans.asked.append(1)
    core.add(order(core, 1, "recompute"))
    while core.has_work:
        spans.take(core.step())
    assert spans.of["a", 0].count(0) <= 5, "it goes over at once, not when it ends"
    assert tokens_of(spans, r) == generate(spans.logits("llama_gqa", r, 0), r)[0]
