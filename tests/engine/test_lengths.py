"""Rows A14, A15, A16 and C63: what a predicted length is good for, in virtual time and in counts; and never in tokens.

Virtual time: the real scheduler and KV manager on a simulated device. Outputs end by a token, as those of a model do:
max_tokens is what everybody allows, not what comes of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec
import pytest

from penstock.base.clock import VirtualClock
from penstock.core.batch import SchedulerOutput
from penstock.core.cache_spec import group_layers
from penstock.core.lengths import bucket_end, bucket_of, room_for
from penstock.core.model_spec import cache_spec
from penstock.core.protocols import LengthPredictor
from penstock.core.request import Request
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, replay
from penstock.executor.sim import SimExecutor
from penstock.kv import KV_MANAGERS
from penstock.lengths.history import HistoryPredictor
from penstock.lengths.learned import LearnedPredictor
from penstock.lengths.oracle import noisy
from penstock.lengths.score import Accuracy
from penstock.sched.policy import make_policy
from penstock.sched.policy.padding import Padding
from penstock.sched.policy.slot_use import SlotUse
from penstock.sched.scheduler import Scheduler
from tests.engine.fake_model import VOCAB, spec
from tests.engine.harness import Collector, Knobs, assert_idle, drain, fake_engine, plain_core, request
from tests.engine.naive import fake_logits, generate
from tests.engine.policy_sim import LinearTimer

STOP = 1
MOST = 256
"""max_tokens of everybody."""


class Ending(SimExecutor):
    """Sequence number n ends with its `lengths[n]`-th token: STOP."""

    lengths: Sequence[tuple[int, int]]
    """Of each in order of arrival: (prompt, output)."""

    def _token(self, seq_id: int, position: int) -> int:
        num_prompt, num_output = self.lengths[seq_id]
        return STOP if position == num_prompt + num_output - 1 else 2 + super()._token(seq_id, position) % 1000


@dataclass
class Served:
    """What a load came to. `slots`: of batches; `running`: sequences in each step; seconds, tokens."""

    slots: SlotUse = field(default_factory=SlotUse)
    padding: Padding = field(default_factory=Padding)
    running: list[int] = field(default_factory=list)
    accuracy: Accuracy = field(default_factory=Accuracy)
    end_s: float = 0.0
    num_preemptions: int = 0
    num_recomputed: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    """Numbers of those that had to leave, in the order in which they ended."""

    @property
    def wait_share(self) -> float:
        """Of all places in batches: those whose member has ended, wanted or not."""
        empty = self.slots.wasted + self.slots.idle
        return empty / (empty + self.slots.used)


@dataclass(frozen=True)
class Asked:
    """A request to come: its arrival in seconds, its tokens, and what its prompt is about."""

    arrival_s: float
    num_prompt: int
    num_output: int
    topic: int = 0


def serve(
    policy: str,
    load: Sequence[Asked],
    expect: Callable[[Asked, int], int] | LengthPredictor | None = None,
    *,
    allocator: str = "paged",
    num_blocks: int = 4000,
    max_num_seqs: int = 64,
    budget: int = 4096,
    threshold: int = 0,
    max_model_len: int = 1024,
    conservativeness: float = 1.0,
    timer: LinearTimer | None = None,
) -> Served:
    """The load to its end. `expect`: tokens of (request, its number), or a predictor that learns as requests end."""
    clock = VirtualClock()
    groups = group_layers([cache_spec(layer, "float32") for layer in spec(slots=False).layers])
    kv = KV_MANAGERS.get(allocator)(
        groups, [num_blocks], 16, max_model_len=max_model_len, max_num_seqs=max_num_seqs, prefix_cache="none"
    )
    scheduler = Scheduler(
        kv, make_policy(policy), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, block_size=16,
        long_prefill_token_threshold=threshold, conservativeness=conservativeness,
    )  # fmt: skip
    executor = Ending(timer or LinearTimer(token_s=0.0), clock, vocab_size=30_000)
    executor.lengths = [(r.num_prompt, r.num_output) for r in load]
    core = EngineCore(scheduler, kv, executor, clock)
    served, submit = Served(), executor.submit

    def watch(output: SchedulerOutput) -> None:
        first = 0 < len(output.added) == len(scheduler.running)
        served.slots.step(len(scheduler.running), len(scheduler.waiting), new_batch=first)
        served.padding.step(output, new_batch=first)
        served.running.append(len(scheduler.running))
        submit(output)

    executor.submit = watch  # type: ignore[method-assign]
    live: dict[str, Request] = {}
    todo = 0
    while todo < len(load) or core.has_work:
        while todo < len(load) and load[todo].arrival_s <= clock.now():
            one = request(_prompt(load[todo]), max_tokens=MOST, arrival_s=load[todo].arrival_s, request_id=str(todo))
            one = msgspec.structs.replace(one, stop_token_ids=[STOP])
            if expect is not None:
                told = expect(load[todo], todo) if callable(expect) else expect.predict(one, ())
                one = msgspec.structs.replace(one, expected_tokens=told)
            live[one.request_id] = one
            core.add(one)
            todo += 1
        before = (clock.now(), core.stats.num_steps)
        for out in core.step() if core.has_work else []:
            n = served.lengths[out.request_id] = served.lengths.get(out.request_id, 0) + len(out.token_ids)
            if out.finish_reason is not None:
                served.end_s = clock.now()
                served.preempted += [int(out.request_id)] * out.num_preemptions
                one = live.pop(out.request_id)
                if expect is not None:
                    served.accuracy.add(one.expected_tokens, n)
                if expect is not None and not callable(expect):
                    expect.learn(one, n)
        if (clock.now(), core.stats.num_steps) == before:
            wake = [load[todo].arrival_s] if todo < len(load) else []
            wake += [scheduler.wake_s] if core.has_work and scheduler.wake_s is not None else []
            clock.advance_to(max(clock.now(), min(wake)))
    served.padding.end()
    kv.check_invariants([])
    assert [served.lengths[str(i)] for i in range(len(load))] == [r.num_output for r in load], "an output was cut"
    served.num_preemptions = core.stats.num_preemptions
    served.num_recomputed = core.stats.num_recomputed_tokens
    return served


def _prompt(asked: Asked) -> list[int]:
    """Tokens of which the topic decides a part."""
    rng = random.Random(asked.topic)
    words = [rng.randrange(1000) for _ in range(12)]
    own = random.Random(repr(asked))
    return [own.choice(words) if own.random() < 0.4 else own.randrange(30_000) for _ in range(asked.num_prompt)]


def trace(seed: int, n: int, gap_s: float = 0.0) -> list[Asked]:
    """Chats as they come: short prompts and some long ones, outputs with a heavy tail; six topics, each with answers
    of about one length."""
    rng = random.Random(seed)
    load, now = [], 0.0
    for _ in range(n):
        topic = rng.randrange(6)
        median = (6, 12, 25, 50, 100, 190)[topic]
        num_output = min(MOST, max(2, round(median * math.exp(rng.gauss(0, 0.25)))))
        load.append(Asked(now, min(600, max(8, round(rng.lognormvariate(4.2, 0.8)))), num_output, topic))
        now += rng.expovariate(1 / gap_s) if gap_s else 0.0
    return load


def warm() -> LearnedPredictor:
    """A predictor that has seen 600 of such requests end."""
    learned = LearnedPredictor()
    learned.train((_prompt(one), MOST, one.num_output) for one in trace(77, 600))
    return learned


def exactly(asked: Asked, number: int) -> int:
    return asked.num_output


def roughly(asked: Asked, number: int) -> int:
    """Off by a factor whose logarithm has a sigma of 0.4: right by a fifth in one of three."""
    return noisy(asked.num_output, 0.4, 7, str(number))


# -- buckets ---------------------------------------------------------------------------------------------------------


def test_a_bucket_holds_what_is_longer_than_the_one_before() -> None:
    ends = [bucket_end(b) for b in range(12)]
    assert ends == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768]
    for n in range(1, 769):
        b = bucket_of(n)
        assert n <= ends[b], n
        assert b == 0 or n > ends[b - 1], n


def test_who_outgrows_a_bucket_is_expected_to_come_to_twice_as_many_tokens() -> None:
    one = request([3], max_tokens=200, expected_tokens=20)
    assert [room_for(one, n) for n in (0, 23, 24, 47, 48, 95, 96, 199)] == [24, 24, 48, 48, 96, 96, 192, 200]
    assert room_for(request([3], max_tokens=200), 5) == 200, "nobody has predicted it"
    assert room_for(request([3], max_tokens=22, expected_tokens=20), 0) == 22
    assert room_for(request([3], max_tokens=10, expected_tokens=20), 0) == 20, "a simulated prediction may be wrong"


# -- A14: S3 ---------------------------------------------------------------------------------------------------------


def packed(policy: str, allocator: str, expect: Any, seed: int = 1) -> tuple[float, Served]:
    """(sequences that run at once, while enough wait)."""
    load = trace(seed, 160)
    served = serve(policy, load, expect, allocator=allocator, num_blocks=512, timer=LinearTimer())
    busy = served.running[: len(served.running) * 2 // 3]
    return fmean(busy), served


@pytest.mark.parametrize("seed", [1, 2])
def test_A14_the_packed_batch_is_half_as_large_again_as_with_reservations_of_the_longest(seed: int) -> None:
    """Than with room for max_model_len, and than with room for prompt + max_tokens; with exact, wrong and learned
    predictions; in runs and in blocks."""
    size = {
        "max_model_len": packed("fcfs", "contiguous", None, seed),
        "max_tokens": packed("fcfs", "contiguous-oracle", None, seed),
        "S3": packed("s3", "contiguous-predicted", exactly, seed),
        "S3, wrong": packed("s3", "contiguous-predicted", roughly, seed),
        "S3, learned": packed("s3", "contiguous-predicted", warm(), seed),
        "S3, blocks": packed("s3", "paged", roughly, seed),
    }
    print({name: (round(mean, 1), round(s.end_s, 2), s.num_preemptions) for name, (mean, s) in size.items()})
    for name in size:
        if name.startswith("S3"):
            assert size[name][0] >= 1.5 * size["max_model_len"][0], name
            assert size[name][1].end_s < size["max_model_len"][1].end_s, name
    for name in ("S3", "S3, wrong", "S3, blocks"):  # of a max_tokens that is 4 times the mean output
        assert size[name][0] >= 1.35 * size["max_tokens"][0], name
    assert size["S3, wrong"][1].num_preemptions > 0, "nobody had to leave: the test shows nothing"


def mispredicted(seed: int) -> list[Request]:
    """Requests whose predictions are anything."""
    rng = random.Random(seed)
    return [
        request(
            [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))], max_tokens=rng.choice([6, 20, 40, 60]),
            expected_tokens=rng.choice([0, 1, 1, 5, 20, 60]),
        )
        for _ in range(40)
    ]  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("allocator", ["paged", "contiguous-predicted"])
def test_A14_every_misprediction_is_recovered_with_the_same_tokens(allocator: str, depth: int) -> None:
    """[EX]: who outgrows its room moves or leaves, comes back and goes on; swapped or computed again."""
    load = mispredicted(depth)
    core, _ = fake_engine(
        Knobs(
            policy="s3", kv_allocator=allocator, num_blocks=44, block_size=4, budget=16, max_num_seqs=6, depth=depth,
            conservativeness=1.0, max_model_len=128, host_blocks=30,
        )
    )  # fmt: skip
    collector = Collector()
    for one in load:
        core.add(one)
    drain(core, collector, limit=5000)
    assert_idle(core)
    wrong = sum(
        r.expected_tokens > 0 and room_for(r, 0) < len(collector.requests[r.request_id].tokens[0]) for r in load
    )
    print(allocator, depth, wrong, "outgrew their rooms;", core.stats.num_preemptions, "preemptions")
    assert wrong >= 5
    assert core.stats.num_preemptions > 0
    for r in load:
        got = collector.requests[r.request_id]
        assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, r)


def test_A14_who_outgrows_its_prediction_yields_and_is_let_in_with_twice_the_room() -> None:
    """Three runs fill memory but for one block. The second outgrows its run, finds no longer one and gives its own up,
    although the third is younger, which has done nothing wrong; by order of arrival the third would have to leave."""
    load = [Asked(0.0, 8, 40), Asked(0.0, 8, 60), Asked(0.0, 8, 40)]
    told = [48, 24, 48]  # runs of 4, 2 and 4 blocks of 16
    left = {}
    for policy in ("s3:window=1", "fcfs"):
        served = serve(policy, load, lambda one, number: told[number], allocator="contiguous-predicted", num_blocks=11)
        left[policy] = (served.preempted, served.num_recomputed)
    assert left == {"s3:window=1": ([1], 8 + 24), "fcfs": ([2], 8 + 24)}


def test_A14_who_does_not_fit_lets_others_pass_but_not_for_ever() -> None:
    big, small = Asked(0.0, 500, 100), [Asked(0.01 * i, 30, 30) for i in range(1, 200)]
    load = [Asked(0.0, 30, 60), *[Asked(0.0, 30, 30)] * 5, big, *small]
    place = load.index(big)

    def ends(policy: str) -> int:
        """How many have ended before the big one."""
        order: list[str] = []
        clock_load = [Asked(max(0.001, r.arrival_s) if i >= 6 else 0.0, r.num_prompt, r.num_output)
                      for i, r in enumerate(load)]  # fmt: skip
        served = serve(policy, clock_load, exactly, allocator="contiguous-predicted", num_blocks=40)
        order = list(served.lengths)
        return order.index(str(place))

    passed = {policy: ends(policy) for policy in ("fcfs", "s3", "s3:max_wait_s=0.1")}
    print(passed)
    assert passed["fcfs"] == place
    assert passed["s3"] > place + 20, "nobody passed: gaps stay empty"
    assert place < passed["s3:max_wait_s=0.1"] < passed["s3"], "it starves behind small ones"


@pytest.mark.parametrize("predictor", [HistoryPredictor(), LearnedPredictor()])
def test_A14_the_predictor_learns_from_what_ends_and_says_how_good_it_is(predictor: LengthPredictor) -> None:
    load = trace(3, 600, gap_s=0.01)
    served = serve("s3", load, predictor)
    score = served.accuracy
    print(predictor.name, score.num, score.num_unknown, score.num_hits / score.num, score.correlation)
    assert score.num + score.num_unknown == 600
    assert score.num_unknown < 100
    assert score.correlation is not None
    if predictor.name == "learned":
        assert score.correlation > 0.6, "topics say most of an output's length"
        assert score.num_hits > 0.3 * score.num


# -- A15: response length perception ---------------------------------------------------------------------------------


def test_A15_batches_of_similar_lengths_wait_less_for_their_longest_member() -> None:
    """Places that stand empty until a batch ends, against batches in order of arrival (lengths are independent of it):
    with exact, wrong and learned lengths, and with failures collected or not."""
    load = trace(5, 256)
    arms: dict[str, tuple[str, Any]] = {
        "random": ("static:size=8", None),
        "exact": ("length-aware:size=8", exactly),
        "wrong": ("length-aware:size=8", roughly),
        "wrong, not collected": ("length-aware:size=8,collect=0", roughly),
        "variable": ("length-aware:size=32,tokens=2048", roughly),
        "learned": ("length-aware:size=8", warm()),
    }
    found = {name: serve(policy, load, expect) for name, (policy, expect) in arms.items()}
    waste = {name: round(served.wait_share, 3) for name, served in found.items()}
    print(waste, {name: round(served.end_s, 1) for name, served in found.items()})
    print("rank correlation, learned:", found["learned"].accuracy.correlation)
    assert waste["exact"] < 0.3 * waste["random"]
    assert waste["wrong"] < 0.75 * waste["random"]
    assert waste["wrong"] < waste["wrong, not collected"], "collecting failures gains nothing"
    assert waste["learned"] < 0.75 * waste["random"]
    assert found["exact"].end_s < found["wrong"].end_s < found["random"].end_s
    assert found["variable"].end_s < 0.85 * found["wrong"].end_s, "short answers do not go together in large batches"


def test_A15_failures_are_collected_and_nobody_starves() -> None:
    """One of four is twice and more as long as predicted: it is sent back when its batch should have ended, goes on in
    a later batch of its group, and all of a group end before the next one begins."""
    load = [Asked(0.0, 10, 100 if i % 4 == 0 else 14) for i in range(16)]
    served = serve("length-aware:size=4,group=8", load, lambda one, number: 14)
    ends = list(served.lengths)
    assert served.num_preemptions >= 4
    assert sorted(map(int, ends)) == list(range(16))
    alone = serve("length-aware:size=4,group=8,collect=0", load, lambda one, number: 14)
    assert alone.num_preemptions == 0
    assert served.end_s < alone.end_s


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["length-aware:size=3,group=6", "multi-bin:bins=3,size=3,timeout_s=0", "s3"])
def test_A15_predictions_change_no_token_and_replay_to_the_same_schedule(policy: str, depth: int) -> None:
    knobs = Knobs(policy=policy, num_blocks=30, block_size=4, budget=12, max_num_seqs=4, depth=depth,
                  conservativeness=1.0)  # fmt: skip
    core, _ = fake_engine(knobs)
    core.recorder = Recorder()
    load, rng, collector, emitted = mispredicted(11), random.Random(depth), Collector(), []
    todo = list(load)
    while todo or core.has_work:
        if todo and rng.random() < 0.6:
            core.add(todo.pop(0))
        outputs = core.step()
        emitted += outputs
        collector.take(outputs)
    for r in load:
        got = collector.requests[r.request_id]
        assert (got.tokens[0], got.reasons[0]) == generate(fake_logits, r)
    again = replay(core.recorder.iterations, lambda e, c: plain_core(spec(slots=False), knobs, e, c), depth=depth)
    assert again == emitted


# -- A16: multi-bin batching -----------------------------------------------------------------------------------------

LOW, HIGH, SIZE = 6, 54, 8


def uniform(seed: int, n: int = 640) -> list[Asked]:
    """A backlog whose service times are uniform from LOW to HIGH steps."""
    rng = random.Random(seed)
    return [Asked(0.0, 4, rng.randint(LOW, HIGH)) for _ in range(n)]


def bound(bins: int) -> float:
    """Requests per second: size / expected time of the longest of `size` in a bin, over bins of equal share.

    Source: arXiv 2412.04504, section 4, for times uniform in [LOW, HIGH]; steps take 10 ms.
    """
    mean, spread = (LOW + HIGH) / 2, HIGH - LOW
    return SIZE / (0.01 * (mean + spread / (2 * bins) * (SIZE - 1) / (SIZE + 1)))


@pytest.mark.parametrize("wrong", [False, True])
def test_A16_throughput_rises_with_the_bins_and_is_what_the_formula_says(wrong: bool) -> None:
    """k = 1, 2, 4, 8: within 10 % of the formula with exact service times; with wrong ones it rises less, and not
    beyond it."""
    load = uniform(2)
    rates = []
    for bins in (1, 2, 4, 8):
        served = serve(
            f"multi-bin:bins={bins},size={SIZE},timeout_s=0", load,
            (lambda one, number: noisy(one.num_output, 0.15, 3, str(number))) if wrong else exactly,
            max_num_seqs=SIZE,
        )  # fmt: skip
        rates.append(len(load) / served.end_s)
    print("wrong" if wrong else "exact", [round(r, 2) for r in rates], [round(bound(k), 2) for k in (1, 2, 4, 8)])
    assert all(b > 0.99 * a for a, b in pairwise(rates)), "not monotonic within noise"
    assert rates[3] > 1.1 * rates[0]
    if not wrong:
        assert rates == [pytest.approx(bound(k), rel=0.1) for k in (1, 2, 4, 8)]
    else:
        assert all(r < 1.1 * bound(k) for r, k in zip(rates, (1, 2, 4, 8), strict=True))


def test_A16_a_bin_that_does_not_fill_runs_when_its_oldest_has_waited_long_enough() -> None:
    before = [Asked(0.0, 4, n) for n in (10, 200) * 4]  # by these it knows where the bins' bound is
    load = [*before, Asked(9.0, 4, 10), Asked(9.01, 4, 200), Asked(9.02, 4, 9)]
    served = serve("multi-bin:bins=2,size=2,timeout_s=0.5", load, exactly)
    assert served.end_s == pytest.approx(9.01 + 0.5 + 2.0, abs=0.03), "the short ones fill a batch, the long one waits"
    alone = serve("multi-bin:bins=2,size=2,timeout_s=0.5", load[:9], exactly)
    assert alone.end_s == pytest.approx(9.5 + 0.1, abs=0.02)


# -- C63: buckets against padding ------------------------------------------------------------------------------------


def test_C63_padding_falls_with_the_buckets_and_chunks_bound_it_too() -> None:
    """The share of padding over the number of buckets, for whole prompts and for chunks; the work stays the same."""
    rng = random.Random(9)
    load = [Asked(0.0, min(600, max(8, round(rng.lognormvariate(4.8, 0.9)))), 4) for _ in range(512)]
    curve = {}
    for chunk in (0, 64):
        for bins in (1, 2, 4, 8):
            served = serve(
                f"multi-bin:bins={bins},size=8,by=prompt,timeout_s=0", load, max_num_seqs=8, threshold=chunk,
                conservativeness=0.0,
            )  # fmt: skip
            curve[bins, chunk] = (served.padding.share, served.padding.step_share)
            assert served.padding.prompt == sum(r.num_prompt for r in load)
            assert served.padding.step_prompt == served.padding.prompt
    print({at: [round(x, 3) for x in shares] for at, shares in curve.items()})
    for chunk in (0, 64):
        shares = [curve[bins, chunk][0] for bins in (1, 2, 4, 8)]
        assert shares == sorted(shares, reverse=True)
        assert shares[3] < 0.5 * shares[0]
    assert all(curve[bins, 64][1] < curve[bins, 0][1] for bins in (1, 2, 4, 8)), "chunks do not bound a step's padding"
    assert curve[8, 64][1] < curve[1, 64][1], "buckets and chunks do not go together"
