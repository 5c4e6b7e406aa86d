"""Workloads: prompts that share what they should share, arrival processes with the moments they promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.base.errors import InputError
from penstock.sim.arrivals import ARRIVALS, make, parse, seeded
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import TimedRequest, from_list, prompt_ids


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("vocab", [2, 61, 128256, 2**32 - 1])
def test_equal_blocks_are_equal_tokens_and_others_differ_at_once(vocab: int) -> None:
    size = 64
    first = TimedRequest(0.0, 200, 1, blocks=(7, 8, 2**48 - 1))
    second = TimedRequest(0.0, 180, 1, blocks=(7, 8, 9))
    third = TimedRequest(0.0, 128, 1, blocks=(8, 7))
    a, b, c = (prompt_ids(r, n, vocab, size).tolist() for n, r in enumerate((first, second, third)))
    assert (len(a), len(b), len(c)) == (200, 180, 128)
    assert max(a + b + c) < vocab
    digits = -(-50 // max(1, (vocab - 1).bit_length() - 1))
    assert 128 <= common(a, b) < 128 + digits
    assert common(a, c) < digits
    assert a[:64] == c[64:128], "a block is the same wherever it stands"
    assert prompt_ids(first, 0, vocab, size).tolist() == a


def test_tails_are_of_one_request_only() -> None:
    plain = TimedRequest(0.0, 100, 1)
    prompts = [prompt_ids(plain, n, 61, 16).tolist() for n in range(50)]
    prompts.append(prompt_ids(TimedRequest(0.0, 100, 1, blocks=(0, 1)), 50, 61, 16).tolist())
    for a, b in itertools.combinations(prompts, 2):
        assert common(a, b) < 10
    assert (
        prompt_ids(TimedRequest(0.0, 5, 1, blocks=(1, 2)), 0, 61, 16).tolist()
        == prompt_ids(TimedRequest(0.0, 5, 1, blocks=(1,)), 3, 61, 16).tolist()
    ), "the prompt's end cuts a block"


@pytest.mark.parametrize(
    ("text", "cv"),
    [
        ("poisson:rate=4", 1.0),
        ("gamma:rate=4,cv=2.5", 2.5),
        ("gamma:rate=4,cv=0.5", 0.5),
        ("constant:rate=4", 0.0),
    ],
)
def test_arrival_processes_have_the_moments_they_promise(text: str, cv: float) -> None:
    times = np.array(list(itertools.islice(seeded(parse(text), 1)(), 40_000)))
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_days_have_a_peak_in_the_middle_and_keep_the_mean() -> None:
    times = np.array(list(itertools.islice(seeded(parse("daily:rate=5,peak=9,period=100"), 5)(), 30_000)))
    assert len(times) / times[-1] == pytest.approx(5, rel=0.05)
    at = times % 100
    for low, rate in ((45, 9), (95, 1), (20, 5)):  # over ten seconds, modulo the day
        count = np.sum((at - low) % 100 < 10) / (times[-1] / 100) / 10
        assert count == pytest.approx(rate, rel=0.12)
    with pytest.raises(InputError, match="once to twice"):
        parse("daily:rate=5,peak=11,period=100")


def test_bursts_are_silent_between_and_keep_the_mean() -> None:
    times = np.array(list(itertools.islice(seeded(parse("bursts:rate=3,on=2,off=6"), 5)(), 30_000)))
    assert np.all(np.diff(times) >= 0)
    assert np.all(times % 8.0 <= 2.0 + 1e-9)
    assert len(times) / times[-1] == pytest.approx(3.0, rel=0.05)


def test_seeds_decide() -> None:
    def first(seed: int) -> list[float]:
        return list(itertools.islice(seeded(parse("poisson:rate=1"), seed)(), 20))

    assert first(3) == first(3)
    assert first(3) != first(4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("poison:rate=2", "poisson"),
        ("poisson", "needs rate"),
        ("poisson:rate=0", "positive"),
        ("poisson:rate=-1", "positive"),
        ("poisson:rate=nan", "finite"),
        ("poisson:rate=1,rate=2", "once"),
        ("gamma:rate=1", "needs cv"),
        ("poisson:rate=1,cv=2", "knows no cv"),
        ("bursts:rate=1,on=x,off=1", "number"),
    ],
)
def test_what_is_no_arrival_process_is_named(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse(text)


def test_every_registered_process_can_be_made() -> None:
    for name in ARRIVALS:
        process = make(name, dict.fromkeys(ARRIVALS.get(name).fields, 2.0))
        assert next(process.times(np.random.default_rng(0))) >= 0


def test_synthetic_workloads() -> None:
    lengths = "prompt=100&output=40&prompt_cv=1&output_cv=0.5&shared=32"
    workload = synthetic(f"synthetic:poisson?rate=5&requests=4000&{lengths}&groups=3&tenants=4", seed=2)
    requests = list(workload)
    assert requests == list(workload), "every iteration is the same"
    assert len(requests) == workload.num_requests == 4000
    assert {r.tenant for r in requests} == {f"tenant-{k}" for k in range(4)}
    assert {r.blocks for r in requests} == {(0,), (1,), (2,)}
    assert workload.block_tokens == 32
    assert min(r.num_prompt for r in requests) > 32
    assert np.mean([r.num_output for r in requests]) == pytest.approx(40, rel=0.05)
    assert np.std([r.num_output for r in requests]) == pytest.approx(20, rel=0.1)
    assert {r.num_prompt for r in synthetic("synthetic:constant?rate=1&requests=5")} == {512}
    for wrong in ("poisson?rate=1&prompt=0", "poisson?rate=1&requests=1.5", "poisson?rate=1&promt=3", "poisson?rate=x"):
        with pytest.raises(InputError):
            synthetic("synthetic:" + wrong)


def test_views_of_a_workload() -> None:
    workload = from_list("w", [TimedRequest(float(t), 10 + t, 1) for t in range(10)])
    assert [r.num_prompt for r in workload.limited(3)] == [10, 11, 12]
    assert workload.limited(3).num_requests == 3
    assert [r.arrival_s for r in workload.scaled(2.0).limited(3)] == [0.0, 0.5, 1.0]
    assert [r.arrival_s for r in workload.until(2.5)] == [0.0, 1.0, 2.0]
    timed = workload.timed(seeded(parse("constant:rate=4"), 0), "constant")
    assert [r.arrival_s for r in timed.limited(2)] == [0.25, 0.5]
    assert [r.num_prompt for r in timed] == list(range(10, 20))
