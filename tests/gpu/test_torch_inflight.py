"""Two steps in flight on a device: step n + 1 is started before the host has read step n, which it waits for once.

`Late` is a mock of a device whose results arrive late, over tensors of the CPU: nobody may look into one but by
`TorchDraws.read`, which stands for waiting.
"""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from penstock import LLM, SamplingParams
from penstock.backends.gpu.device_array import DeviceArray
from penstock.backends.gpu.forward import TorchForward
from penstock.backends.gpu.sample import TorchDraws, TorchKernel
from penstock.backends.gpu.sample import pick as choose
from penstock.core.batch import AddedRow, SchedulerOutput, StepOutput
from penstock.core.request import Abort, Request
from penstock.core.sampling import StructuredOutputs, TokenRules
from penstock.engine import wire
from penstock.executor.messages import FromRank, Result, RunStep
from penstock.executor.worker import run as serve_steps
from penstock.launch.bundled import bundled_model
from penstock.runner.ahead import AheadRunner
from penstock.runner.device_sampler import DeviceSampler
from penstock.runner.sampler import Sampler
from tests.engine import test_laws_models as laws
from tests.engine.harness import Collector, Knobs, assert_idle, drain, real_engine, request, run, tiny
from tests.engine.naive import generate
from tests.native.test_sample import pick, shapes
from tests.ranks import Recorder

CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 8, 9]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    "logprobs": {"num_logprobs": 2},
    "named": {"num_logprobs": 0, "logprob_ids": [5, 3]},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.2, "temperature": 0.7, "seed": 2},
}
_LOOKS = {"item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "cpu"}


class Late(TorchFunctionMode):
    """A mock: see above. `seen`: what happened, in order: ("run", n) and ("read", n) of the n-th step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self._waits, self._count = False, Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "numpy" and args[0].dtype == torch.uint8:  # the host's memory, from which `staging.bring` copies
            return func(*args)
        assert self._waits or name not in _LOOKS, f"{name}: the device is not ready"
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        self.seen.append((what, self._count[what]))
        self._count[what] += 1

    @contextmanager
    def on(self) -> Iterator[None]:
        read, resident = TorchDraws.read, TorchForward.run_resident

        def waiting(draws: TorchDraws) -> Any:
            self.note("read")
            self._waits = True
            try:
                return read(draws)
            finally:
                self._waits = False

        def running(forward: TorchForward, plan: Any, planes: Any) -> Any:
            self.note("run")
            return resident(forward, plan, planes)

        with patch.object(TorchDraws, "read", waiting), patch.object(TorchForward, "run_resident", running), self:
            yield


def engine(**knobs: Any) -> Any:
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs(**{"depth": 2, "ops": "torch", **knobs}))
    assert isinstance(core.executor.runner, AheadRunner)  # type: ignore[attr-defined]
    return core


def expected(r: Request) -> list[int]:
    return generate(laws.oracle("llama_gqa"), r)[0]


@pytest.mark.parametrize("kinds", [["greedy"], ["sampled"], ["logprobs"], ["penalised"], list(RULES)])
def test_a_step_is_started_before_the_one_before_is_read(kinds: list[str]) -> None:
    core, late, collector = engine(), Late(), Collector()
    asked = [request([*PROMPT, i], max_tokens=12 + i, **RULES[kind]) for i, kind in enumerate(kinds)]
    for r in asked:
        core.add(r)
    with late.on():
        drain(core, collector)
    assert_idle(core)
    for r in asked:
        assert collector.requests[r.request_id].tokens[0] == expected(r)
    steps = core.stats.num_steps
    assert Counter(what for what, _ in late.seen) == {"run": steps, "read": steps}, "one wait in each step"
    ahead = [n for n in range(1, steps) if late.seen.index(("run", n)) < late.seen.index(("read", n - 1))]
    assert len(ahead) >= 11, "all but the first steps of prompts"


def test_a_grammar_too() -> None:
    """Its tokens are told to it while the next step runs; the mock looks on."""
    path = bundled_model("nano")
    assert path is not None
    asked = StructuredOutputs(regex=r"(Mon|Tue|Wed), \d{2}:\d{2}")
    params = SamplingParams(seed=0, max_tokens=40, temperature=1.0, structured_outputs=asked)
    found = []
    for settings in ({"device": "cpu", "ops": "ref"}, {"device": "cpu-torch", "depth": 2}):
        llm = LLM(str(path), max_model_len=128, num_gpu_blocks_override=64, **settings)
        late = Late()
        with late.on() if "depth" in settings else patch.dict({}):
            found.append(llm.generate("When? ", params)[0].outputs[0])
    assert found[1].token_ids == found[0].token_ids
    assert re.fullmatch(asked.regex or "", found[1].text)
    counts = Counter(what for what, _ in late.seen)
    assert counts["run"] == counts["read"] > len("Mon, 10:00") // 3
    assert late.seen.index(("run", 2)) < late.seen.index(("read", 1))


@pytest.mark.parametrize("name", ["llama_gqa", "windowed", "slots", "latent", "mamba2_hybrid"])
def test_the_laws_with_two_in_flight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemption, aborts, forks, beams, prompts' logprobs: who cannot be started early waits."""
    draw = laws.draw_knobs

    def drawn(*args: Any) -> Knobs:
        knobs = draw(*args)
        knobs.ops, knobs.depth = "torch", 2
        return knobs

    monkeypatch.setattr(laws, "draw_knobs", drawn)
    laws.in_turmoil(name, 1)


@pytest.mark.parametrize("sizes", ["1,2,4,8", "8"])
def test_a_captured_step_takes_tokens_too(sizes: str) -> None:
    """Decode graphs, on their mock: rows come and go, so a token lies in another row than the one that takes it."""
    core = engine(graphs=sizes)
    asked = [request([*PROMPT, i], max_tokens=8 + 3 * i, **rules) for i, rules in enumerate(RULES.values())]
    got = run(core, asked)
    for r in asked:
        assert got[r.request_id].tokens[0] == expected(r)
    counts = core.executor.runner._forward.graphs.counts
    assert sum(counts.values()) - counts["eager"] >= 14


def test_who_cannot_be_started_early_waits_and_so_do_those_beside() -> None:
    """Beams, and logprobs of several samples: the step after theirs has promises of theirs."""
    stays = request(PROMPT, max_tokens=24)
    beam = request([9, 8, 7], beam_width=3, max_tokens=8)
    several = request([3, 4, 5], n=2, max_tokens=6, temperature=0.8, seed=3, num_logprobs=1)
    core, late, collector = engine(budget=64), Counter[bool](), Collector()
    starts = DeviceSampler.starts

    def counted(sampler: DeviceSampler, picks: Any) -> bool:
        found = starts(sampler, picks)
        late[found] += 1
        return found

    core.add(stays)
    for _ in range(3):
        collector.take(core.step())
    core.add(beam)
    core.add(several)
    with patch.object(DeviceSampler, "starts", counted):
        drain(core, collector, limit=100)
    assert_idle(core)
    assert late[False] >= 8
    assert late[True] >= 8
    assert collector.requests[stays.request_id].tokens[0] == expected(stays)
    for index in range(2):
        want = generate(laws.oracle("llama_gqa"), several, index)[0]
        assert collector.requests[several.request_id].tokens[index] == want


def test_three_in_flight_are_two_on_the_device() -> None:
    asked = [request([*PROMPT, i], max_tokens=10, **rules) for i, rules in enumerate(RULES.values())]
    got = run(engine(depth=3), asked)
    for r in asked:
        assert got[r.request_id].tokens[0] == expected(r)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_who_fails_leaves_a_row_that_yields_nothing(rules: dict[str, Any]) -> None:
    """Step n + 1 has run by then on a token that is none: no result of the row, none of its pages with others."""
    core, results = engine(), []
    collect = core.executor.collect

    def spy() -> StepOutput:
        results.append(collect())
        return results[-1]

    core.executor.collect = spy
    good, bad = request(PROMPT, max_tokens=12, **rules), request([9, 8, 7], max_tokens=12, **rules)
    collector = Collector()
    core.add(bad)
    core.add(good)
    for _ in range(4):
        collector.take(core.step())
    core.executor.spoil()
    drain(core, collector)
    assert_idle(core)
    at = next(n for n, result in enumerate(results) if result.errors)
    (failed,) = {error.seq_id for result in results for error in result.errors}
    assert sum(len(result.errors) for result in results) == 1
    assert failed not in [s.seq_id for result in results[at:] for s in result.sampled]
    assert collector.requests[good.request_id].tokens[0] == expected(good)
    again = request([9, 8, 7], max_tokens=12, **rules)
    core.add(again)
    drain(core, collector)
    assert collector.requests[again.request_id].tokens[0] == expected(again), "nothing is left of it"


def test_who_ends_or_is_aborted_disturbs_nobody() -> None:
    for eos in range(0, 90, 3):
        core, collector = engine(budget=64), Collector()
        ends, goes = request(PROMPT, max_tokens=14, eos=[eos]), request([5, 4], max_tokens=20)
        stays = request([3, 4, 5], max_tokens=16, temperature=0.9, seed=eos)
        for r in (ends, goes, stays):
            core.add(r)
        for _ in range(5):
            collector.take(core.step())
        core.add(Abort(request_id=goes.request_id))
        drain(core, collector)
        assert_idle(core)
        assert collector.requests[ends.request_id].tokens[0] == expected(ends)
        assert collector.requests[stays.request_id].tokens[0] == expected(stays)


# -- the sampler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["peaked", "flat", "equal", "ties", "zeros", "masked", "one", "tiny", "huge"])
def test_what_is_chosen_at_once_is_what_is_chosen_row_by_row(kind: str) -> None:
    """Random rules in one batch, sick rows among them, bit for bit, by one read."""
    rng = random.Random(kind)
    for vocab in (1, 2, 97, 4099):
        rules = [drawn_rules(rng, vocab) for _ in range(24)]
        rules[7] = TokenRules(num_logprobs=0, logprob_ids=[vocab - 1, 0, vocab // 2])
        rules[3] = TokenRules(allowed_ids=[0])  # it hides what makes its row sick
        logits = np.stack([shapes(kind, vocab, np.random.default_rng(i)) for i in range(len(rules))])
        logits[3, vocab // 2], logits[4, 0], logits[5] = np.nan, np.inf, -np.inf
        picks = [
            pick(i, r, i, position=rng.randrange(1 << 34), num_samples=1 if r.num_logprobs >= 0 else 1 + i % 3)
            for i, r in enumerate(rules)
        ]
        for i, first in ((10, 0), (12, 7), (14, 2), (16, 16)):  # of prompts; the third has a sick row
            ids = np.array([rng.randrange(vocab) for _ in range(3)], np.int32)
            rule = msgspec.structs.replace(rules[i], num_prompt_logprobs=i - 10)
            picks[i] = picks[i]._replace(prompt_row=first, prompt_start=5, prompt_ids=ids, rules=rule)
        picks[16] = picks[16]._replace(row=-1, num_samples=0)
        rng.shuffle(picks)
        found = []
        for sampler, given in (
            (Sampler(vocab), logits),
            (DeviceSampler(TorchKernel(CPU, vocab), vocab), DeviceArray(torch.from_numpy(logits.copy()))),
        ):
            added = [AddedRow(p.seq_id, 0, [vocab - 1, 0, 0], 2, p.rules) for p in picks]
            sampler.chain.track(SchedulerOutput(0, added=added))
            reads = 0
            if isinstance(sampler, DeviceSampler):
                assert sampler.starts(picks)
                with patch.object(TorchDraws, "read", autospec=True, side_effect=TorchDraws.read) as read:
                    found.append(sampler.sample(given, picks))  # type: ignore[arg-type]
                    reads = read.call_count
                assert reads == 1
                assert np.array_equal(np.asarray(given), logits, equal_nan=True), "they were written to"
            else:
                found.append(sampler.sample(logits, picks))
        assert found[1] == found[0]._replace(choices=())
        assert len(found[0].errors) >= 3
        assert found[0].prompt_logprobs or not len(found[0].sampled)


def test_a_draw_falls_where_whole_numbers_say() -> None:
    """A product of 116 bits, rounded down: one unit more or less before it is another token."""
    rng = random.Random(1)
    edges = [0, 1, (1 << 27) - 1, 1 << 27, (1 << 53) - 1]
    for bits in edges + [rng.randrange(1 << 53) for _ in range(20)]:
        for total in [1, 1 << 32, (1 << 32) - 1, (1 << 63) - 1, *(rng.randrange(1 << 63) for _ in range(5))]:
            target = bits * total >> 53
            low, high = (torch.tensor([[part]]) for part in (bits & ((1 << 27) - 1), bits >> 27))
            for first, token in ((target, 1), (target + 1, 0)):
                assert choose(torch.tensor([[first, total - first]]), low, high).tolist() == [[token]]


def drawn_rules(rng: random.Random, vocab: int) -> TokenRules:
    return TokenRules(
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 3.0, 40.0]), seed=rng.randrange(-(1 << 62), 1 << 63),
        top_k=rng.choice([0, 0, 1, 3, 50, vocab - 1, vocab, vocab + 3]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 1e-9, 1 / 3]), min_p=rng.choice([0.0, 0.0, 0.02, 0.4, 1.0]),
        num_logprobs=rng.choice([-1, -1, 0, 3, vocab + 1]), repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logit_bias=rng.choice([{}, {}, {0: 1.5}]),
    )  # fmt: skip


# -- the process of a rank ---------------------------------------------------------------------------------------------


class SlowDevice(Recorder):
    """A mock of a rank on a device that is ready when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, int]] = []
        self.done = threading.Event()

    def launch(self, output: SchedulerOutput) -> SchedulerOutput:
        self.noted.append(("launch", output.step))
        return output

    def ready(self, launched: SchedulerOutput) -> bool:
        return self.done.is_set()

    def finish(self, launched: SchedulerOutput) -> StepOutput:
        assert self.done.wait(10)
        self.noted.append(("finish", launched.step))
        return self.execute(launched)


def test_a_rank_s_process_takes_the_next_step_while_the_device_works() -> None:
    ours, theirs = socket.socketpair()
    rank = SlowDevice()
    thread = threading.Thread(target=serve_steps, args=(theirs, rank, lambda _: None, None))
    thread.start()
    try:
        for step in range(2):
            ours.sendall(wire.frame(RunStep(SchedulerOutput(step))))
        deadline = time.monotonic() + 10
        while len(rank.noted) < 2:
            assert thread.is_alive()
            assert time.monotonic() < deadline, rank.noted
            time.sleep(0.001)
        assert rank.noted == [("launch", 0), ("launch", 1)]
        rank.done.set()
        decode = msgspec.msgpack.Decoder(FromRank).decode
        for step in range(2):
            frame = wire.read_frame(ours)
            assert frame is not None
            message = decode(frame)
            assert isinstance(message, Result)
            assert message.output.step == step
    finally:
        rank.done.set()
        ours.close()
        thread.join(10)
        theirs.close()
    assert not thread.is_alive()
