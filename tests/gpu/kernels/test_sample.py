"""The sampler's kernels against the sampler: the same tokens, whatever the rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.sampling import TokenRules
from penstock.ops.draw_weights import scale_of, weigh
from penstock.runner.sampler import draw
from penstock.runner.truncate import truncate

torch = pytest.importorskip("torch")
from tests.gpu.kernels import naive  # noqa: E402

sample: Any = pytest.importorskip("penstock.backends.gpu.kernels.sample", reason=naive.ABSENT)


def run(logits: Any, rules: list[TokenRules], indices: list[int], positions: list[int]) -> list[int]:
    def of(kind: Any, values: Any) -> Any:
        return torch.tensor(list(values), dtype=kind)

    seeds = of(torch.int64, [(r.seed + 2**63) % 2**64 - 2**63 for r in rules])
    truncated = any(0 < r.top_k < logits.shape[1] or r.top_p < 1 for r in rules)
    out: list[int] = sample.draw(
        torch.from_numpy(logits), of(torch.float64, [scale_of(r.temperature) for r in rules]), seeds,
        of(torch.int32, indices), of(torch.int64, positions), min_p=of(torch.float64, [r.min_p for r in rules]),
        top_k=of(torch.int32, [max(r.top_k, 0) for r in rules]), top_p=of(torch.float64, [r.top_p for r in rules]),
        truncated=truncated,
    ).tolist()  # fmt: skip
    return out


def wanted(logits: Any, rules: list[TokenRules], indices: list[int], positions: list[int]) -> list[int]:
    return [draw(row, r, i, p, 1)[0] for row, r, i, p in zip(logits, rules, indices, positions, strict=True)]


@pytest.mark.parametrize("vocab", [1, 7, 4096, 4097])
def test_draws_are_the_sampler_s(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 6
    logits = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
    logits[1, rng.random(vocab) < 0.3] = -np.inf
    logits[1, 0] = 0
    rules = [TokenRules(temperature=t, seed=int(rng.integers(2**63)) * (1 - 2 * (i % 2))) for i, t in
             enumerate((1.0, 0.7, 0.05, 3.0, 100.0, 1.0))]  # fmt: skip
    indices, positions = [0, 1, 2, 0, 5, 2**31 - 1], [0, 3, 2**33 + 5, 9, 10, 2**31]
    assert run(logits, rules, indices, positions) == wanted(logits, rules, indices, positions)


@pytest.mark.parametrize("seed", range(2))
def test_truncation_keeps_what_the_sampler_s_keeps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal logits in plenty, so that ties stand on every boundary. Every token's units are compared, then draws."""
    kept: list[Any] = []
    draws = sample._draw
    monkeypatch.setattr(sample, "_draw", {(6,): lambda units, *rest, **named: [kept.append(units), draws[6,](
        units, *rest, **named)]})  # fmt: skip
    rng = np.random.default_rng(seed)
    rows, vocab = 6, 60
    logits = (rng.integers(-4, 5, (rows, vocab)) / rng.choice([1, 2])).astype(np.float32)
    logits[0] = 0.0
    logits[1, ::2] = -np.inf
    logits[2, :5] = -0.0
    rules = [
        TokenRules(temperature=float(rng.choice([0.3, 1.0, 2.0])), top_k=k, top_p=p, min_p=m, seed=i)
        for i, (k, p, m) in enumerate(CUTS[seed])
    ]  # fmt: skip
    where = [0] * rows, [seed] * rows
    assert run(logits, rules, *where) == wanted(logits, rules, *where)
    for row, own, found in zip(logits, rules, kept[0].numpy(), strict=True):
        ids, units = truncate(row, own)
        full = np.zeros(vocab, np.int64)
        full[slice(None) if ids is None else ids] = units
        assert found.tolist() == full.tolist()


CUTS = [
    [(7, 1.0, 0.0), (0, 0.5, 0.0), (20, 0.9, 0.0), (59, 1.0, 0.05), (0, 1e-9, 0.0), (1, 0.3, 0.0)],
    [(60, 0.8, 0.1), (1000, 1 - 1e-16, 0.0), (11, 0.95, 0.02), (0, 0.7, 1.0), (30, 0.1, 0.0), (0, 1.0, 0.3)],
]
"""top_k, top_p and min_p of each row."""


def test_a_share_between_two_whole_numbers_is_rounded_up() -> None:
    """Of three equal tokens a hair more than a third: two are kept."""
    logits = np.zeros((6, 3), np.float32)
    rules = [TokenRules(temperature=1.0, top_p=1 / 3 * (1 + 1e-13), seed=i) for i in range(6)]
    found = run(logits, rules, [0] * 6, [0] * 6)
    assert found == wanted(logits, rules, [0] * 6, [0] * 6)
    assert set(found) == {0, 1}


def test_cuts_without_units_are_passed_over() -> None:
    """A target of 0, before the only unit of a row."""
    units, sums = torch.zeros((1, 8192), dtype=torch.int64), torch.tensor([[0, 1]])
    units[0, 5000] = 1
    zero, token = torch.zeros(1, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    sample._draw[1,](units, sums, torch.zeros(1, 2), zero, zero, zero, token, V=8192, CUT=4096, BLOCK=1024, CUTS=2,
                     CUTS_BLOCK=16)  # fmt: skip
    assert token.tolist() == [5000]


def test_units_are_the_sampler_s() -> None:
    """Every weight of a row, over the whole range of exponents, not only the one that is drawn."""
    rng = np.random.default_rng(0)
    row = np.concatenate([rng.uniform(-70, 0, 3000), -rng.uniform(0, 1e-3, 500), [0.0, -np.inf]]).astype(np.float32)
    logits = torch.from_numpy(row)[None]
    scale = 1.2345678901234567
    peaks, _, cuts, block = sample._row_peaks(logits)
    units, sums = torch.empty((1, len(row)), dtype=torch.int64), torch.empty((1, cuts), dtype=torch.int64)
    numbers = torch.tensor([scale], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    sample._weigh[1, cuts](logits, len(row), peaks, *numbers, units, sums, V=len(row), CUT=4096, BLOCK=1024, CUTS=cuts,
                           CUTS_BLOCK=block)  # fmt: skip
    assert units[0].tolist() == weigh(row, scale).tolist()


def test_the_largest_logit() -> None:
    rng = np.random.default_rng(3)
    logits = rng.integers(-5, 5, (9, 5000)).astype(np.float32)
    logits[1] = -1.0
    logits[2, 4999] = 7.0
    logits[3, :-1] = -np.inf
    healthy = logits[:4].argmax(1).tolist()
    logits[4, 4500] = np.nan
    logits[5, 17] = np.inf
    logits[6] = -np.inf
    logits[7, 0] = np.nan
    logits[7, 1] = np.inf
    logits[8] = np.nan
    ids, bits = sample.argmax(torch.from_numpy(logits))
    assert ids.tolist() == [*healthy, *[0] * 5]
    peaks = bits.view(torch.float64)
    assert peaks[:4].tolist() == logits[:4].max(1).tolist()
    assert peaks[4:].isnan().all()
    rules = [TokenRules(temperature=1.0, top_k=3, top_p=0.9, seed=1)] * 5
    assert run(logits[4:], rules, [0] * 5, [0] * 5) == [sample.SICK] * 5


def test_nothing_to_do() -> None:
    assert sample.argmax(torch.empty(0, 8)).shape == (2, 0)
    assert run(np.empty((0, 8), np.float32), [], [], []) == []


def test_the_device_s_sampler_uses_them() -> None:
    """A batch of all kinds, sick rows among it: tokens, errors and logprobs of the numpy sampler."""
    from penstock.backends.gpu.device_array import DeviceArray
    from penstock.backends.gpu.sample import TorchKernel
    from penstock.core.batch import AddedRow, SchedulerOutput
    from penstock.runner.device_sampler import DeviceSampler
    from penstock.runner.sampler import Sampler
    from tests.native.test_sample import pick

    rng = np.random.default_rng(1)
    vocab = 70
    rules = [
        TokenRules(), TokenRules(temperature=0.8, seed=3), TokenRules(temperature=1.2, seed=-4, top_k=5),
        TokenRules(temperature=1.0, seed=2**63 + 5, top_p=0.8), TokenRules(temperature=2.0, seed=6, min_p=0.05),
        TokenRules(temperature=0.9, seed=7, top_k=vocab + 9, top_p=0.5, num_logprobs=2), TokenRules(num_logprobs=1),
        TokenRules(temperature=1.0, seed=8), TokenRules(), TokenRules(repetition_penalty=1.4, temperature=0.5, seed=1),
        TokenRules(allowed_ids=[4, 5]),
    ]  # fmt: skip
    logits = (rng.standard_normal((len(rules), vocab)) * 3).astype(np.float32)
    logits[7, 3], logits[8] = np.nan, -np.inf
    for rows in (range(len(rules)), (1, 7), (2, 3, 5), (0, 6, 8), (9, 10)):
        picks = [pick(i, rules[i], r, position=2**33 + i) for r, i in enumerate(rows)]
        found = []
        for sampler in (Sampler(vocab), DeviceSampler(TorchKernel(torch.device("cpu"), vocab, kernels=True), vocab)):
            added = [AddedRow(p.seq_id, 0, [1, 2, 3], 2, p.rules) for p in picks]
            sampler.chain.track(SchedulerOutput(0, added=added))
            own: Any = logits[list(rows)]
            given = DeviceArray(torch.from_numpy(own)) if isinstance(sampler, DeviceSampler) else own
            found.append(sampler.sample(given, picks))
        assert found[1] == found[0]._replace(choices=())
