"""Decode graphs, on the CPU by a mock of CUDA graphs (`backends.gpu.recorded`): the same tokens as without.

The mock fails as a graph would: what Python read at the capture stays as it was, and what is not copied is not there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.backends.gpu import graphs as graphs_of
from penstock.backends.gpu.backend import TorchBackend
from penstock.backends.gpu.graph_plan import graph_bytes, graph_decision, planned_bytes, problem_of, wanted_graphs
from penstock.backends.gpu.graphs import DecodeGraphs, why_not
from penstock.backends.gpu.recorded import MockGraphs
from penstock.backends.gpu.step import HostRead
from penstock.backends.gpu.tables import PLAIN
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.config.graphs import parse_sizes, sizes_up_to
from penstock.core.model_spec import cache_groups
from penstock.core.request import Control
from penstock.model.forward import StepLimits
from tests import specs
from tests.engine import test_laws_models as laws
from tests.engine.harness import Collector, Knobs, assert_idle, plan_for, real_engine, request, run, tiny
from tests.engine.naive import generate
from tests.paged import Paged
from tests.sampled import ALL, some

CPU = torch.device("cpu")
CAPTURED = [
    "llama_gqa", "llama_mha", "llama_mqa", "llama_rope3", "llama_biased", "layernorm", "latent", "scores", "parallel",
    "sandwich", "windowed", "all_windowed", "gated", "narrow_values", "experts", "shared_kv", "streams", "inner_norms",
    "key_bias", "fixed_experts", "yoco",
]  # fmt: skip
IDS = [3 + i * 7 % 50 for i in range(60)]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraphs]:
    """The graphs of every engine that the test makes; what is drawn at random names torch and graphs."""
    found: list[DecodeGraphs] = []
    capture = DecodeGraphs.capture

    def noted(self: DecodeGraphs) -> Iterator[int]:
        found.append(self)
        return capture(self)

    def drawn(draw: Any) -> Any:
        def torched(*args: Any) -> Knobs:
            knobs: Knobs = draw(*args)
            knobs.ops, knobs.graphs = "torch", "1,2,4,8"
            return knobs

        return torched

    monkeypatch.setattr(DecodeGraphs, "capture", noted)
    monkeypatch.setattr(laws, "draw_knobs", drawn(laws.draw_knobs))
    return found


def steps(found: list[DecodeGraphs]) -> Counter[Any]:
    """How often graphs of which size ran, and none."""
    return sum((one.counts for one in found), Counter())


# -- the same tokens ---------------------------------------------------------------------------------------------------


PLAINLY = ("llama_mha", "llama_mqa", "llama_rope3", "parallel", "sandwich", "all_windowed")
"""Of what others are captured with, too: these keep the laws without graphs (`test_torch_laws`)."""


FEW = some((name for name in CAPTURED if name not in PLAINLY), 10, shows=specs.kinds)


@pytest.mark.parametrize("name", CAPTURED if ALL else FEW)
def test_tokens_do_not_depend_on_graphs(name: str, made: list[DecodeGraphs]) -> None:
    laws.in_turmoil(name, 1)
    counts = steps(made)
    assert all(one.problem is None for one in made)
    assert sum(counts.values()) - counts["eager"] > 4, counts


@pytest.mark.parametrize(
    ("kv_dtype", "rotation"), [("int8", "none"), ("bfloat16", "none"), ("int4", "hadamard"), (laws.MIXED, "none")]
)
def test_codecs_do_not_depend_on_graphs(kv_dtype: str, rotation: str, made: list[DecodeGraphs]) -> None:
    laws.in_turmoil("llama_gqa", 1, kv_dtype, 0, rotation)
    assert sum(n for size, n in steps(made).items() if size != "eager") > 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_in_the_middle_nobody_s_tokens_change(mode: str, made: list[DecodeGraphs]) -> None:
    spec, weights = tiny("windowed")
    todo = [r for r in laws.workload(spec.vocab_size) if r.request_id in ("greedy", "n", "masked")]
    for k in (5, 9):
        knobs = Knobs(budget=12, host_blocks=64, preemption=mode, ops="torch", graphs="1,3,8", depth=2)
        core = real_engine(spec, weights, knobs)
        collector = Collector()
        for r in todo:
            core.add(r)
        step = 0
        while core.has_work:
            if step == k:
                for r in todo:
                    core.add(Control(kind="preempt", request_id=r.request_id))
            collector.take(core.step())
            step += 1
        assert_idle(core)
        assert core.stats.num_preemptions > 0
        for r in todo:
            got, samples = collector.requests[r.request_id], laws.expected("windowed")[r.request_id]
            assert [(got.tokens[i], got.reasons[i]) for i in range(len(samples))] == samples, (k, r.request_id)
    counts = steps(made)
    assert counts[1] > 0
    assert counts[3] > 0
    assert counts[8] > 0


def test_a_row_that_is_not_healthy_ends_by_itself(made: list[DecodeGraphs]) -> None:
    """Also where padding would read its token's embedding: token 0's."""
    spec, weights = tiny("llama_gqa")
    embed = weights["embed"].copy()
    embed[60] = embed[0] = float("nan")
    core = real_engine(spec, {**weights, "embed": embed}, Knobs(ops="torch", graphs="4"))
    good, bad = request([5, 6, 7, 8, 9], max_tokens=6), request([5, 6, 60, 8], max_tokens=6, temperature=0.5)
    got = run(core, [good, bad])
    assert "NaN" in (got[bad.request_id].error or "")
    assert got[good.request_id].tokens[0] == generate(laws.oracle("llama_gqa"), good)[0]
    assert steps(made)[4] > 0


# -- one step at a time ------------------------------------------------------------------------------------------------


def driver(name: str, sizes: tuple[int, ...] = (), **named: Any) -> Paged:
    """Hand-made plans on torch: with graphs of `sizes`."""
    spec, weights = specs.make(name)
    made = Paged(spec, weights, num_slabs=60, max_model_len=128, **named)
    made.on(TorchBackend(CPU, graphs=sizes, why="a test"))
    made.planes = tuple(made.planes)  # type: ignore[assignment]
    made.program.warm(made.planes, StepLimits(made.groups, made.block_size, 20, 16, False), lambda done, total: None)
    return made


def compare(plain: Paged, fast: Paged, *, rounds: int = 6) -> None:
    """Prompts, then decodes in batches that grow and shrink, of contexts of different lengths."""
    for prompts in ({"a": 21, "b": 3}, {"c": 9}):
        work = {seq: (IDS[:n], [n - 1]) for seq, n in prompts.items()}
        alike(plain.run(work), fast.run(work))
    for i in range(rounds):
        for seqs in ("abc", "c", "ba"):
            work = {seq: ([IDS[i + ord(seq) % 7]], [0]) for seq in seqs}
            alike(plain.run(work), fast.run(work))


def alike(want: dict[Any, Any], got: dict[Any, Any]) -> None:
    for seq in want:
        np.testing.assert_allclose(got[seq], want[seq], atol=5e-5, err_msg=seq)


@pytest.mark.parametrize("name", ["llama_gqa", "latent", "scores", "windowed"])
def test_logits_are_those_of_a_step_without_graphs(name: str) -> None:
    fast = driver(name, (1, 2, 4))
    compare(driver(name), fast)
    assert fast.program.graphs.counts == {4: 6, 2: 6, 1: 6, "eager": 2}


def test_padding_is_no_row_of_another_step() -> None:
    """Behind the rows of a step lies what another one left, also one of a graph whose buffers lie elsewhere."""
    fast = driver("llama_gqa", (4,))
    compare(driver("llama_gqa"), fast)
    assert fast.program.graphs.counts == {4: 18, "eager": 2}
    fast = driver("llama_gqa", (1, 20))
    compare(driver("llama_gqa"), fast)
    assert fast.program.graphs.counts == {1: 6, 20: 12, "eager": 2}


def test_rows_without_logits_and_other_steps() -> None:
    """A row that wants no logits; two tokens of a sequence, a table with a line per layer and too many rows run without
    a graph."""
    plain, fast = driver("llama_gqa"), driver("llama_gqa", (2,))
    for each in (plain, fast):
        each.make_ragged("r")
    work: list[dict[Any, Any]] = [
        {"a": (IDS[:5], [4]), "b": (IDS[:7], [6]), "r": (IDS[:6], [5])},
        {"b": ([6], []), "a": ([5], [0])},
        {"a": ([5, 6], [0, 1])},
        {"a": ([7], [0]), "r": ([8], [0])},
        {"a": ([9], [0]), "b": ([3], [0]), "c": ([4], [0])},
        {"b": ([9], [0]), "c": ([3], [0])},
    ]
    for step in work:
        alike(plain.run(step), fast.run(step))
    assert fast.program.graphs.counts == {2: 2, "eager": 4}


def test_a_context_has_the_graph_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.gpu.graph_plan.CONTEXTS", (16, 64))
    plain, fast = driver("windowed"), driver("windowed", (1,))
    assert fast.program.graphs.captured == ((1, 16), (1, 64), (1, 128))
    ran: list[tuple[int, int]] = []
    fill = graphs_of._DecodeGraph.fill
    monkeypatch.setattr(graphs_of._DecodeGraph, "fill", lambda one, plan: (ran.append(one.shape), fill(one, plan)))
    for at, ids in ((None, IDS[:14]), (14, [5]), (15, [6]), (16, [7]), (None, IDS[:46]), (63, [8]), (64, [9])):
        alike(*(each.run({"a": (ids, [0])}) for each in (plain, fast)))
        assert at is None or plain.lens["a"] == at + 1
    assert ran == [(1, 16), (1, 16), (1, 64), (1, 64), (1, 128)]


# -- planted faults ----------------------------------------------------------------------------------------------------


def baked_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = TorchBackend(CPU).compile

    def spoilt(self: Any, *args: Any, **named: Any) -> Any:
        program = compute.__func__(self, *args, **named)  # type: ignore[attr-defined]
        own = program.compute
        program.compute = lambda step, ids, positions, rows: own(
            step, ids, torch.full((len(ids),), int(step.plan.positions[0])), rows
        )
        return program

    monkeypatch.setattr(TorchBackend, "compile", spoilt)


def not_refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the step before."""
    fill = graphs_of._DecodeGraph.fill

    def spoilt(one: Any, plan: Any) -> None:
        kept = [[table.copy() for table in own[2:]] for own in one._arrays]
        fill(one, plan)
        for own, before in zip(one._arrays, kept, strict=False):
            for table, old in zip(own[2:], before, strict=True):
                table[:] = old
        if kept:
            one._inputs.copy(one._inputs._turn, one.size)

    monkeypatch.setattr(graphs_of._DecodeGraph, "fill", spoilt)


def not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first step's numbers reach the device."""
    copy, done = graphs_of._Inputs.copy, []

    def spoilt(inputs: Any, turn: int, size: int) -> None:
        if not done:
            copy(inputs, turn, size)
        done.append(turn)

    monkeypatch.setattr(graphs_of._Inputs, "copy", spoilt)


def padding_into_a_live_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first row, where its first token is."""
    slots = DecodeGraphs._slots

    def spoilt(self: Any, ids: Tensor, positions: Tensor, tables: Tensor, num_layers: int, planes: Any) -> Any:
        pages, *others = slots(self, ids, positions, tables, num_layers, planes)
        first = tables[0, 0].long() * num_layers + torch.arange(num_layers)[:, None]
        return torch.where(tables[:, 0] >= 0, pages, first), *others

    monkeypatch.setattr(DecodeGraphs, "_slots", spoilt)


def padding_is_the_row_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a larger step left stays behind a smaller one's rows, in tables and positions."""
    fill, last = graphs_of._DecodeGraph.fill, []

    def spoilt(one: Any, plan: Any) -> None:
        fill(one, plan)
        n, turn = len(plan.token_ids), one._inputs._turn
        parts = one._arrays[turn][1:]
        for part, old in zip(parts, last, strict=False):
            part[n:] = old[n:]
        last[:] = [part.copy() for part in parts]
        one._inputs.copy(turn, one.size)

    monkeypatch.setattr(graphs_of._DecodeGraph, "fill", spoilt)


def first_buffer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy takes the other buffer than the one that was filled."""
    copy = graphs_of._Inputs.copy
    monkeypatch.setattr(graphs_of._Inputs, "copy", lambda inputs, turn, size: copy(inputs, 1 - turn, size))


@pytest.mark.parametrize(
    "fault",
    [
        baked_positions, not_refilled, not_copied, padding_into_a_live_page, padding_is_the_row_before,
        first_buffer_again,
    ],
)  # fmt: skip
def test_a_fault_is_seen(fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = driver("llama_gqa")
    fault(monkeypatch)
    fast = driver("llama_gqa", (4,))
    with pytest.raises(AssertionError, match="Not equal"):
        compare(plain, fast)


def test_what_waits_for_the_device_is_refused_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on without graphs, and its tokens are the same."""

    def spoilt(x: Tensor, y: Tensor) -> Tensor:
        return x + y * (1.0 if float(y.sum()) < 1e30 else 0.0)

    from penstock.backends.gpu import tables

    monkeypatch.setattr(tables, "EXACT", tables.EXACT.replaced("torch", {"add": spoilt}))
    with caplog.at_level(logging.INFO, "penstock"):
        fast = driver("llama_gqa", (1, 4))
    assert fast.program.graphs is None
    assert "decode graphs cannot be captured, so every step is started from the host: __float__ waits" in caplog.text
    compare(driver("llama_gqa"), fast)


# -- the mock ----------------------------------------------------------------------------------------------------------


def test_the_mock_runs_on_the_same_memory() -> None:
    x, weight = torch.ones(3), torch.arange(9.0).reshape(3, 3)
    kept = torch.zeros(3)
    factor = [2.0]

    def fn() -> Tensor:
        y = (weight @ x).reshape(3, 1)[:, 0]
        kept.add_(y)
        return y * factor[0]

    graphs = MockGraphs()
    graph, other = graphs.capture(fn), graphs.capture(lambda: x + 1)
    result, address = graph.result, graph.result.data_ptr()
    x.fill_(2.0)
    factor[0] = 100.0
    kept.zero_()
    graph.replay()
    assert result.tolist() == [12.0, 48.0, 84.0], "new inputs, and the number that was there at the capture"
    assert kept.tolist() == [6.0, 24.0, 42.0], "not what the capture left, either"
    assert result.data_ptr() == address
    assert torch.isnan(other.result).all(), "they share their memory"
    assert graph.num_ops == 3, "a product, a sum in place and a product; views are none"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.numpy(),
        lambda x: x.unique(), lambda x: bool(x.any()),
        lambda x: torch.tensor([1.0, 2.0, 3.0]) * x, lambda x: range(int(x[0])), lambda x: x.cpu(),
    ],
)  # fmt: skip
def test_the_mock_refuses_what_a_graph_cannot_hold(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(HostRead, match="waits for the device"):
        MockGraphs().capture(lambda: read(torch.ones(3)))


# -- warm before ready -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa", "windowed", "latent"])
def test_warming_touches_no_page_but_the_spare_ones(name: str, caplog: pytest.LogCaptureFixture) -> None:
    spec, weights = specs.make(name)
    driver = Paged(spec, weights, num_slabs=20, max_model_len=128)
    backend = TorchBackend(CPU, graphs=(1, 2))
    backend.warming.always = True
    driver.on(backend)
    before = [{n: np.asarray(plane).copy() for n, plane in own.items()} for own in driver.planes]
    heard: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO, "penstock"):
        driver.program.warm(
            driver.planes, StepLimits(driver.groups, 4, 6, 40, True), lambda done, total: heard.append((done, total))
        )
    # One and six single tokens; prompts of 2, 16, 32 and 40; a tree; a graph of one row and one of two.
    assert heard == [(i + 1, 9) for i in range(9)]
    assert "2 decode graphs for 1, 2 rows, 7 other steps" in caplog.text
    for own, old in zip(driver.planes, before, strict=True):
        for plane_name, plane in own.items():
            np.testing.assert_array_equal(np.asarray(plane), old[plane_name])
    assert backend.warming.watch.ready
    assert not driver.program.calls["embed"], "nobody's step"


def test_a_late_compilation_is_an_error_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs(ops="torch", graphs="1"))
    forward: Any = core.executor._runner._forward  # type: ignore[attr-defined]
    watch, compute = forward.warming.watch, forward._execute
    core.add(request([5, 6, 7, 8, 9], max_tokens=6))

    def compiling(*args: Any) -> None:
        watch.heard("_split[num_warps=4](q: *fp32)", None, {"constants": {(35,): 128}})
        compute(*args)

    with caplog.at_level(logging.INFO, "penstock"):
        forward._execute = compiling
        while core.has_work:
            core.step()
    assert core.stats.num_late_compilations == 2, "body and head of the prompt"
    errors = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert len(errors) == 2
    assert "_split[num_warps=4](q: *fp32) with 35=128, in a step of 1 rows and 5 tokens" in errors[0]


# -- what is decided before -------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert parse_sizes("auto") is None
    assert parse_sizes("8,1, 2,2") == (1, 2, 8)
    assert sizes_up_to(64, None) == (1, 2, 4, 8, 16, 32, 64)
    assert sizes_up_to(6, None) == (1, 2, 4, 6)
    assert sizes_up_to(1, None) == (1,)
    assert sizes_up_to(6, (2, 8, 16)) == (2, 8)
    for text in ("0", "1,x", "-1", "4096", ""):
        with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
            config(cudagraph_capture_sizes=text)


def test_other_engines_names() -> None:
    assert config(disable_cuda_graph=True).execution.enforce_eager
    assert config(cuda_graph_sizes="1,2").execution.cudagraph_capture_sizes == "1,2"
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
        config(cuda_graph_max_bs=8)


def config(**settings: Any) -> Any:
    return from_kwargs(model="m", **settings)


@pytest.mark.parametrize("name", specs.ALL)
def test_the_spec_tells_what_the_program_would(name: str) -> None:
    spec, weights = specs.make(name)
    made = Paged(spec, weights)
    made.on(TorchBackend(CPU))
    told = problem_of(spec, cache_groups(spec, "float32"), "float32")
    assert told == why_not(made.program.code, made.groups)
    assert (told is None) == (name in CAPTURED)


def test_an_operation_may_say_that_it_is_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = specs.make("experts")
    monkeypatch.setattr(PLAIN["experts"], "capture_safe", False, raising=False)
    assert problem_of(spec, (), "float32") == "experts are chosen on the host"
    monkeypatch.setattr(PLAIN["experts"], "capture_safe", True, raising=False)
    assert problem_of(spec, (), "float32") is None


def test_the_decision_says_sizes_memory_or_why_not() -> None:
    spec, _ = specs.make("llama_gqa")
    plan = plan_for(spec, Knobs(max_num_seqs=6))
    on = graph_decision(config(device="cuda"), spec, plan)
    assert on.value == "1,2,4,6"
    assert "are set aside, a prediction" in on.why
    for settings, why in (
        ({"device": "cpu-torch"}, "called, not launched"),
        ({"device": "cuda", "enforce_eager": True}, "enforce_eager is set"),
    ):
        off = graph_decision(config(**settings), spec, plan)
        assert off.value == "none"
        assert why in off.why
    assert wanted_graphs(config(device="cpu-torch", cudagraph_capture_sizes="1,2"))[0] == (1, 2)
    slots, _ = specs.make("mamba2_hybrid")
    assert "recurrent states" in graph_decision(config(device="cuda"), slots, plan_for(slots, Knobs())).why


def test_memory_of_graphs_is_planned() -> None:
    spec, _ = specs.make("llama_gqa")
    assert planned_bytes(config(device="cpu-torch", cudagraph_capture_sizes="1"), spec) == 0
    assert planned_bytes(config(device="cuda", enforce_eager=True), spec) == 0
    one, two = (planned_bytes(config(device="cuda", max_num_seqs=n), spec) for n in (8, 64))
    assert 0 < one < two < planned_bytes(config(device="cuda", max_num_seqs=64, enable_lora=True), spec)
    assert graph_bytes(spec, (64,), 131072) > graph_bytes(spec, (64,), 8192)
