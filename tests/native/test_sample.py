"""Native sampling against the numpy sampler: equal in every token, rank and bit, on every instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from penstock.base.bf16 import F32
from penstock.base.errors import EngineError
from penstock.base.rng import uniform
from penstock.core.batch import AddedRow, SchedulerOutput
from penstock.core.sampling import TokenRules
from penstock.ops.draw_weights import LOG2_E, UNIT, scale_of, weigh
from penstock.ops.native.sample import Kernel, SampleRows
from penstock.runner.input_batch import Pick
from penstock.runner.kernel_sampler import KernelSampler
from penstock.runner.logprobs import RowLogprobs
from penstock.runner.sampler import Sampler, SamplerOutput
from penstock.runner.truncate import truncate
from tests.native.running import each_isa, each_threads, pool

NO_IDS = np.zeros(0, np.int32)
INF = float("inf")


@cache
def kernel(isa: str, threads: int, vocab: int) -> Kernel:
    return Kernel(pool(isa, threads), vocab)


def pick(seq_id: int, rules: TokenRules, row: int, **more: Any) -> Pick:
    values: dict[str, Any] = {
        "sample_index": 0, "position": 7, "num_samples": 1, "num_candidates": 0, "prompt_row": 0, "prompt_start": 0,
        "prompt_ids": NO_IDS,
    }  # fmt: skip
    return Pick(seq_id=seq_id, rules=rules, row=row, **{**values, **more})


def both(isa: str, threads: int, logits: F32, picks: Sequence[Pick], tokens: Sequence[int] = (0,)) -> SamplerOutput:
    """What the two samplers say, which is the same."""
    vocab = logits.shape[1]
    before = logits.copy()
    out = []
    for sampler in (Sampler(vocab), KernelSampler(kernel(isa, threads, vocab), vocab)):
        sampler.chain.track(SchedulerOutput(0, added=[AddedRow(p.seq_id, 0, list(tokens), 1, p.rules) for p in picks]))
        out.append(sampler.sample(logits, picks))
        again = sampler.sample(logits, picks)
        assert again == out[-1], "what one step leaves behind must not matter for the next"
    assert np.array_equal(logits, before, equal_nan=True), "the model's logits were written to"
    assert out[1] == out[0]
    return out[1]


def shapes(kind: str, vocab: int, rng: np.random.Generator) -> F32:
    """A row of logits of a certain look."""
    if kind == "peaked":
        row = rng.normal(0, 6, vocab)
    elif kind == "flat":
        row = rng.normal(0, 0.01, vocab)
    elif kind == "equal":
        row = np.full(vocab, 1.5)
    elif kind == "ties":
        row = rng.integers(-8, 9, vocab) / 4
    elif kind == "zeros":
        row = np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    elif kind == "masked":
        row = np.where(rng.random(vocab) < 0.98, -INF, rng.normal(0, 2, vocab))
        row[vocab // 2] = 0.25
    elif kind == "one":
        row = np.full(vocab, -INF)
        row[vocab - 1] = -3.0
    elif kind == "tiny":
        row = rng.normal(0, 1, vocab) * 1e-39
    else:
        row = rng.normal(0, 1, vocab) * 1e37
    return row.astype(np.float32)


KINDS = ("peaked", "flat", "equal", "ties", "zeros", "masked", "one", "tiny", "huge")
RULES = (
    {}, {"temperature": 0.8}, {"temperature": 2.0, "top_k": 1}, {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 1.0, "top_p": 0.9999999},
    {"temperature": 1.0, "min_p": 0.05}, {"temperature": 1.0, "min_p": 1.0}, {"temperature": 1.0, "min_p": 1e-20},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.7, "min_p": 0.001}, {"temperature": 1e-5, "top_p": 0.5},
    {"temperature": 2.0, "top_k": 10**6, "top_p": 0.99}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
)  # fmt: skip


@each_isa
@each_threads
@pytest.mark.parametrize("vocab", [1, 5, 64, 1003, 9001])
@pytest.mark.sampled(10)
def test_every_rule_on_every_shape(isa: str, threads: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.stack([shapes(kind, vocab, rng) for kind in KINDS for _ in RULES])
    named = rng.integers(0, vocab, 3).tolist()
    rules = [
        TokenRules(**rule, seed=int(rng.integers(2**63)), num_logprobs=int(rng.integers(-1, 6)))
        for _ in KINDS
        for rule in RULES
    ] + [TokenRules(num_logprobs=0, logprob_ids=named) for _ in KINDS for _ in RULES]
    logits = np.concatenate([logits, logits])
    picks = [
        pick(r, rule, r, position=int(rng.integers(2**34)), sample_index=3, num_samples=9)
        for r, rule in enumerate(rules)
    ]
    out = both(isa, threads, logits, picks)
    assert out.errors == []
    assert len(out.sampled) == len(picks)


@each_isa
def test_a_real_vocabulary(isa: str) -> None:
    vocab = 151_936
    rng = np.random.default_rng(1)
    logits = np.stack([shapes(kind, vocab, rng) for kind in ("peaked", "flat", "ties") for _ in RULES])
    picks = [pick(i, TokenRules(**rule, seed=i), i, position=i, num_samples=20) for i, rule in enumerate(RULES * 3)]
    out = both(isa, 2, logits, picks)
    assert len({token for s in out.sampled for token in s.token_ids}) > 200


@each_isa
@pytest.mark.parametrize("threads", [1, 3])
def test_more_rows_than_are_worked_on_together(isa: str, threads: int) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (300, 37)).astype(np.float32)
    rules = [TokenRules(**RULES[i % len(RULES)], seed=i) for i in range(300)]
    both(isa, threads, logits, [pick(i, rule, i) for i, rule in enumerate(rules)])


@each_isa
def test_company_and_threads_change_nothing(isa: str) -> None:
    rng = np.random.default_rng(3)
    logits = np.stack([shapes(KINDS[i % len(KINDS)], 1003, rng) for i in range(42)])
    picks = [pick(i, TokenRules(**RULES[i % len(RULES)], seed=i, num_logprobs=2), i, num_samples=3) for i in range(42)]
    alone = [both(isa, 1, logits[i : i + 1], [p._replace(row=0)]).sampled[0] for i, p in enumerate(picks)]
    for threads in (1, 2, 3):
        assert both(isa, threads, logits, picks).sampled == alone


@each_isa
def test_the_weights_are_those_of_numpy(isa: str) -> None:
    """Sums of one token's weight and its rank's: every unit counts."""
    rng = np.random.default_rng(9)
    for scale in (0.01, 1.0, 37.0):
        logits = (rng.normal(0, 1, 2000) * scale).astype(np.float32)
        total = int(weigh(logits, LOG2_E).sum())
        for num_top in (0, 1, 2000):
            (found,) = kernel(isa, 2, 2000).logprobs([(logits, (), num_top)])
            assert found.total == total


def test_weights_are_probabilities() -> None:
    logits = np.linspace(-40, 3, 5000).astype(np.float32)
    exact = np.exp((logits.astype(np.float64) - 3.0) / 0.9)
    assert np.abs(weigh(logits, scale_of(0.9)) / UNIT - exact).max() <= 0.5001 / UNIT + 4e-14
    assert weigh(np.array([-INF, 2.0], np.float32), 1.0).tolist() == [0, UNIT]


@each_isa
@each_threads
def test_logprobs_ranks_and_candidates(isa: str, threads: int) -> None:
    rng = np.random.default_rng(11)
    for vocab in (1, 7, 1003):
        for kind in KINDS:
            row = shapes(kind, vocab, rng)
            tokens = sorted({0, vocab // 2, vocab - 1})
            for num_top in (0, 1, 5, vocab, vocab + 3):
                found = kernel(isa, threads, vocab).logprobs([(row, tokens, num_top)])[0]
                oracle = RowLogprobs(row, num_top)
                assert found.ranks == [oracle.entry(token).rank for token in tokens]
                assert found.top_ids == oracle.entry(0).top_ids
                candidates = both(
                    isa, threads, row[None], [pick(1, TokenRules(), 0, num_samples=0, num_candidates=max(1, num_top))]
                )
                assert candidates.sampled[0].token_ids == []


@each_isa
def test_processed_rows_prompts_and_sick_rows(isa: str) -> None:
    rng = np.random.default_rng(13)
    logits = rng.normal(0, 2, (16, 101)).astype(np.float32)
    logits[3, 50] = np.nan
    logits[4, 100] = INF
    logits[5] = -INF
    logits[6, 7:] = -INF
    logits[15, 2] = np.nan
    ids = np.array([3, 99], np.int32)
    rules = [
        TokenRules(logit_bias={5: 9.0}, num_logprobs=3),
        TokenRules(temperature=0.9, top_p=0.8, repetition_penalty=1.2, seed=4),
        TokenRules(temperature=1.0, allowed_ids=[1, 2, 3], num_logprobs=0, seed=5),
        TokenRules(temperature=1.0, seed=1), TokenRules(), TokenRules(), TokenRules(temperature=1.0, top_k=50),
        TokenRules(allowed_ids=[]),
        TokenRules(temperature=1.0, logit_bias={5: 1e38, 6: 1e38}, repetition_penalty=1e-30),
    ]  # fmt: skip
    picks = [pick(i, rule, i, num_samples=2) for i, rule in enumerate(rules)]
    prompt = TokenRules(num_prompt_logprobs=4, temperature=1.0, num_logprobs=1)
    picks += [
        pick(20, prompt, 11, prompt_row=9, prompt_start=5, prompt_ids=ids),
        pick(21, prompt, -1, prompt_row=12, prompt_ids=ids, num_samples=0),
        pick(22, prompt, -1, prompt_row=14, prompt_ids=ids, num_samples=0),
        pick(23, TokenRules(logit_bias={8: 4.0}), 8, num_samples=0, num_candidates=6),
    ]
    out = both(isa, 2, logits, picks, (0, 5, 6))
    assert [e.seq_id for e in out.errors] == [3, 4, 5, 7, 8, 22]
    assert [p.seq_id for p in out.prompt_logprobs] == [20, 21]
    assert len(out.sampled[-1].candidates) == 6


@each_isa
def test_rows_that_are_parts_of_longer_ones(isa: str) -> None:
    wide = np.random.default_rng(17).normal(0, 2, (9, 77)).astype(np.float32)
    rules = [TokenRules(temperature=1.0, seed=i, num_logprobs=2) for i in range(9)]
    picks = [pick(i, rule, i) for i, rule in enumerate(rules)]
    assert both(isa, 2, wide[:, 5:60], picks) == both(isa, 2, wide[:, 5:60].copy(), picks)


@each_isa
def test_draws_are_those_of_the_reference_generator(isa: str) -> None:
    """A uniform row is the generator, spread over the ids."""
    vocab = 4096
    logits = np.zeros((1, vocab), np.float32)
    rows = SampleRows(kernel(isa, 1, vocab))
    for seed, index, position in ((0, 0, 0), (2**64 - 1, 2**31 - 100, 2**40 + 3), (-5, 3, 2**32), (1 << 33, 1, 9)):
        rows.point(logits)
        rows.ask(0, 1.0, 0.0, 0, 1.0, seed, index, position, 50)
        rows.run(1)
        want = [int(uniform(seed, index + j, position) * vocab) for j in range(50)]
        assert rows.tokens() == [want]


@each_isa
def test_a_boundary_bin_full_of_near_ties(isa: str) -> None:
    """The nucleus ends among thousands of logits that differ in their last bits."""
    rng = np.random.default_rng(19)
    base = np.float32(1.0).view(np.int32) + rng.integers(0, 40, 20_000).astype(np.int32)
    row = base.view(np.float32)
    row[::3] = -4.0
    for top_p in (0.01, 0.3, 0.77, 0.999):
        rules = TokenRules(temperature=1.0, top_p=top_p, seed=3)
        ids, weights = truncate(row, rules)
        assert ids is not None
        assert 50 < len(ids) <= 20_000
        assert weights.min() > 0
        out = both(isa, 1, row[None], [pick(1, rules, 0, num_samples=400)])
        assert set(out.sampled[0].token_ids) <= set(ids.tolist())


@each_isa
def test_what_does_not_fit_is_refused(isa: str) -> None:
    with pytest.raises(EngineError, match="no memory"):
        Kernel(pool(isa, 1), 1 << 21)
    small = Kernel(pool(isa, 1), 10)
    library, other = pool(isa, 2).library, pool(isa, 2)
    assert library.pst_sample(small.handle, other.handle, None, 0) == -1
    with pytest.raises(AssertionError, match="vocabulary"):
        small.logprobs([(np.zeros(10, np.float32), [10], 0)])


@each_isa
def test_what_was_asked_and_never_run_is_not_drawn_later(isa: str) -> None:
    """A step that fails between the two must not leave a row that writes where the next one has no room."""
    rows = SampleRows(kernel(isa, 1, 64))
    logits = np.zeros((2, 64), np.float32)
    rows.point(logits)
    rows.ask(1, 1.0, 0.0, 0, 1.0, 0, 0, 0, 4)
    rows.point(logits)
    assert rows.run(2) == ([0, 0], [1, 1])
    assert rows.tokens() == []
