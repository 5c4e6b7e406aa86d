"""The laws as a state machine: whatever happens in whatever order, nobody's tokens change and nothing leaks.

The model is the suspicious mock of `fake_model` (it checks every page it touches), so one example covers hundreds of
steps. `test_laws_models.py` holds the same laws on real tiny models.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.core.adapter import AdapterRef, namespace_of
from penstock.core.events import Move
from penstock.core.request import Abort, Control, Request
from penstock.core.sampling import RepetitionDetectionParams
from tests.engine.fake_model import VOCAB
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, request
from tests.engine.naive import Logits, beam_search, fake_logits, generate

EXAMPLES = int(os.environ.get("PENSTOCK_LAW_EXAMPLES", "4"))
STEPS = 40

knobs = st.builds(
    Knobs,
    block_size=st.sampled_from([1, 2, 4, 8]),
    num_blocks=st.sampled_from([24, 32, 64]),
    num_slots=st.sampled_from([3, 8, 24]),
    budget=st.sampled_from([1, 3, 8, 16, 64]),
    max_num_seqs=st.sampled_from([1, 2, 4, 8]),
    policy=st.sampled_from(
        [
            "fcfs",
            "fcfs",
            "prefill-first",
            "static",
            "priority",
            "cache-aware",
            "splitfuse",
            "dynamic",
            "andes",
            "fastserve",
            "fastserve:batch=2,spare=0.3,quantum_s=0.04,starvation_s=0.01",
        ]
    ),
    prefix_cache=st.sampled_from(["radix", "hash", "none"]),
    eviction=st.sampled_from(["lru", "fifo", "lfu", "flops", "priority"]),
    depth=st.sampled_from([1, 1, 2]),
    wire=st.booleans(),
    threshold=st.sampled_from([0, 0, 3]),
    checkpoint_tokens=st.sampled_from([4, 8, 64]),
    checkpoint_rule=st.sampled_from(["distance", "branch"]),
    host_blocks=st.sampled_from([0, 6, 40]),
    preemption=st.sampled_from(["swap", "swap", "recompute"]),
    offload=st.booleans(),
    num_drafts=st.sampled_from([0, 1, 3, 8]),
    draft_depth=st.sampled_from([1, 3, 63]),
    draft_share=st.sampled_from([0.3, 0.9]),
    adapters=st.sampled_from([0, 1, 2]),
    adapters_held=st.sampled_from([2, 3]),
    adapter_pool=st.sampled_from([True, True, False]),
)
REFS = [AdapterRef(b"%d" % mark, str(mark), 1, num_units=units) for mark, units in ((1, 1), (2, 5), (3, 9))]

CIRCLES = RepetitionDetectionParams(max_pattern_size=3, min_count=2)
rules_of_chance = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([0, 3, 10]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "seed": st.integers(0, 2**64 - 1),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "min_tokens": st.sampled_from([0, 3]),
        "logit_bias": st.just({5: 2.0}),
        "bad_sequences": st.just([[3], [4, 6]]),
    },
)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, are preempted, made ragged, tainted, forked and aborted at any moment."""

    slots = False
    windows: tuple[int | None, ...] = ()

    @initialize(knobs=knobs, seed=st.integers(0, 2**32))
    def start(self, knobs: Knobs, seed: int) -> None:
        if knobs.num_blocks * knobs.block_size < 64:
            knobs.num_blocks = 64 // knobs.block_size
        if self.windows:
            # What one sequence may hold at a time, however long it gets, and now and then some more.
            step = knobs.budget if knobs.threshold == 0 else min(knobs.budget, knobs.threshold)
            least = -(-(max(w or 0 for w in self.windows) - 1 + step * knobs.depth) // knobs.block_size) + 1
            knobs.window_blocks = min(knobs.num_blocks, least + seed % 3 * 4)
        if knobs.adapter_pool:
            knobs.num_blocks += 5  # an adapter takes no more
        only_full = not (self.slots or self.windows)
        knobs.offload = knobs.offload and only_full and knobs.host_blocks > 0 and knobs.prefix_cache != "none"
        self.core, _ = fake_engine(knobs, slots=self.slots, windows=self.windows)
        self.core.knobs.limit_drafts(8)
        self.knobs = knobs
        self.collector = Collector()
        self.requests: dict[str, Request] = {}
        self.aborted: set[tuple[str, int]] = set()
        # Few distinct prefixes, so that sharing happens all the time.
        rng = random.Random(seed)
        self.stems = [[rng.randrange(3, VOCAB) for _ in range(24)] for _ in range(3)]

    @rule(
        stem=st.integers(0, 2),
        shared=st.integers(0, 24),
        own=st.lists(st.integers(3, VOCAB - 1), max_size=10),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        beam=st.sampled_from([None, None, None, None, 2, 3]),
        eos=st.booleans(),
        taint=st.sampled_from(["", "", "", "lossy"]),
        adapter=st.sampled_from([None, None, *REFS]),
        circles=st.sampled_from([None, None, CIRCLES]),
        chance=rules_of_chance,
    )
    def submit(
        self,
        stem: int,
        shared: int,
        own: list[int],
        max_tokens: int,
        n: int,
        beam: int | None,
        eos: bool,
        taint: str,
        adapter: AdapterRef | None,
        circles: RepetitionDetectionParams | None,
        chance: dict[str, Any],
    ) -> None:
        prompt = (self.stems[stem][:shared] + own) or [3]
        if beam is not None:
            n, chance = 1, {}
        elif eos:
            chance = {**chance, "stop_ids": [2]}
        r = request(
            prompt,
            request_id=f"q{len(self.requests):03d}",
            eos=[2] if eos else [],
            n=n,
            max_tokens=max_tokens,
            beam_width=beam,
            taint=taint,
            adapter=adapter if self.knobs.adapters else None,
            namespace=namespace_of(b"", adapter if self.knobs.adapters else None),
            repetition=None if beam is not None else circles,
            **chance,
        )
        self.requests[r.request_id] = r
        self.core.add(r)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.core.has_work:
                self.collector.take(self.core.step())

    def _pick(self, data: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(self.core.groups))))

    @precondition(lambda self: self.core.groups)
    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: Any, whole: bool) -> None:
        request_id = self._pick(data)
        index = None if whole else data.draw(st.integers(0, self.requests[request_id].n - 1))
        self.core.add(Abort(request_id=request_id, index=index))
        if whole or self.requests[request_id].beam is not None:
            self.aborted |= {(request_id, i) for i in range(self.requests[request_id].n)}
        else:
            self.aborted.add((request_id, index))

    @precondition(lambda self: self.core.groups)
    @rule(data=st.data(), kind=st.sampled_from(["preempt", "preempt", "ragged", "taint"]))
    def disturb(self, data: Any, kind: str) -> None:
        self.core.add(Control(kind=kind, request_id=self._pick(data)))

    @rule(data=st.data(), share=st.floats(0, 1))
    def turn(self, data: Any, share: float) -> None:
        """A knob gets another value, as adaptive mode does it."""
        name = data.draw(st.sampled_from(self.core.knobs.names))
        if name == "scheduling_policy":
            orders = ["fcfs", "slo:ttft_s=0.01,tpot_s=0.01,whole=1", "prefill-first", "fastserve"]
            value: Any = data.draw(st.sampled_from(orders))
        else:
            least, most = self.core.knobs.bounds[name]
            value = least + share * (most - least)
            value = value if name == "schedule_conservativeness" else round(value)
        self.core.add(Move(name=name, value=value, why="drawn"))

    @rule()
    def forget_prefixes(self) -> None:
        self.core.add(Control(kind="reset_prefix_cache"))

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        drain(self.core, self.collector)
        assert_idle(self.core)
        for request_id, r in self.requests.items():
            got = self.collector.requests[request_id]
            logits = partial(fake_logits, mark=0 if r.rules.adapter is None else int(r.rules.adapter.path))
            if r.beam is not None:
                if (request_id, 0) not in self.aborted:
                    check_beams(r, got.beams, logits)
                continue
            for index in range(r.n):
                aborted = (request_id, index) in self.aborted
                tokens, reason = generate(logits, r, index)
                seen = got.tokens.get(index, [])
                assert index in got.reasons, "a request was lost"
                if aborted and got.reasons[index] == "abort":
                    assert seen == tokens[: len(seen)]
                else:
                    assert (seen, got.reasons[index]) == (tokens, reason)


def check_beams(r: Request, beams: list[tuple[list[int], float, str]], logits: Logits = fake_logits) -> None:
    expected = beam_search(logits, r)
    assert [(b[0], b[2]) for b in beams] == [(e[0], e[2]) for e in expected]
    for b, e in zip(beams, expected, strict=True):
        assert b[1] == pytest.approx(e[1], abs=1e-4)


class SlotEngineMachine(EngineMachine):
    """The same laws with recurrent layers between the attention layers."""

    slots = True


class WindowEngineMachine(EngineMachine):
    """G26: the same laws where some layers, or all, see a few tokens only, and less memory is there for those."""

    windows = (5, None)


class WindowsOnlyEngineMachine(EngineMachine):
    """C84: the same laws where every layer slides, between recurrent layers: nobody keeps the whole history."""

    slots = True
    windows = (5, 8, 5)


def _case(machine: type[EngineMachine], examples: int = EXAMPLES) -> Callable[[], None]:
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        # A long hunt must name its find at once; shrinking hundreds of engine steps takes many minutes.
        phases=[Phase.explicit, Phase.generate] if EXAMPLES > 100 else list(Phase),
    )
    return case


TestEngineLaws = _case(EngineMachine)
TestSlotEngineLaws = _case(SlotEngineMachine)
TestWindowEngineLaws = _case(WindowEngineMachine)
TestWindowsOnlyEngineLaws = _case(WindowsOnlyEngineMachine)
