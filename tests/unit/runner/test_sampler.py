"""Sampler: draws, ties, logprobs, candidates, bad rows, independence of company."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from penstock.base.rng import philox4x32, uniform
from penstock.core.batch import AddedRow, SchedulerOutput
from penstock.core.sampling import TokenRules
from penstock.runner import sampler as module
from penstock.runner.input_batch import Pick
from penstock.runner.sampler import Sampler, SamplerOutput

NO_IDS = np.zeros(0, np.int32)


def pick(seq_id: int, rules: TokenRules, row: int, **more: Any) -> Pick:
    values: dict[str, Any] = {
        "sample_index": 0,
        "position": 7,
        "num_samples": 1,
        "num_candidates": 0,
        "prompt_row": 0,
        "prompt_start": 0,
        "prompt_ids": NO_IDS,
    }
    return Pick(seq_id=seq_id, rules=rules, row=row, **{**values, **more})


def run(logits: Any, picks: Sequence[Pick], tokens: Sequence[int] = (0,)) -> SamplerOutput:
    """All rows have the same one-token prompt and then `tokens[1:]`."""
    logits = np.asarray(logits, np.float32)
    before = logits.copy()
    sampler = Sampler(logits.shape[1])
    sampler.chain.track(SchedulerOutput(0, added=[AddedRow(p.seq_id, 0, list(tokens), 1, p.rules) for p in picks]))
    out = sampler.sample(logits, picks)
    assert np.array_equal(logits, before, equal_nan=True), "the model's logits were written to"
    return out


def one(logits: Any, rules: TokenRules, **more: Any) -> Any:
    out = run([logits], [pick(1, rules, 0, **more)])
    assert out.errors == []
    return out.sampled[0]


def test_philox_known_answers() -> None:
    """The vectors of Random123's own test (kat_vectors, philox4x32-10)."""
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32(counter, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


LOGITS = np.array([1.0, 0.2, -0.5, 2.0, 1.9, -3.0, 0.0, 1.2, -1.0, 0.7], np.float32)


def exact(rules: TokenRules, logits: np.ndarray = LOGITS) -> np.ndarray:
    """Exact probabilities, by full sorts and in the documented order."""
    p = np.exp(logits.astype(np.float64) / rules.temperature)
    p /= p.sum()
    p[p < rules.min_p * p.max()] = 0
    order = np.lexsort((np.arange(len(p)), -p))
    if rules.top_k > 0:
        p[order[rules.top_k :]] = 0
    p /= p.sum()
    reached = np.cumsum(p[order])
    p[order[1:][reached[:-1] >= rules.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "rules",
    [
        TokenRules(temperature=1.0, seed=101),
        TokenRules(temperature=0.7, seed=1102),
        TokenRules(temperature=2.0, seed=103),
        TokenRules(temperature=1.0, top_k=4, seed=104),
        TokenRules(temperature=1.0, top_p=0.8, seed=105),
        TokenRules(temperature=1.0, min_p=0.15, seed=106),
        TokenRules(temperature=0.9, top_k=6, top_p=0.9, min_p=0.05, seed=107),
    ],
    ids=lambda r: f"T{r.temperature}-k{r.top_k}-p{r.top_p}-m{r.min_p}",
)
@pytest.mark.parametrize("vary", ["sample", "position"])
def test_D01_frequencies_match_probabilities(rules: TokenRules, vary: str) -> None:
    """Chi-square, over sample indices at one position and over positions at one sample index. Seeds are fixed."""
    draws = 8000
    if vary == "sample":
        tokens = one(LOGITS, rules, num_samples=draws).token_ids
    else:
        picks = [pick(i, rules, i, position=i) for i in range(draws)]
        tokens = [s.token_ids[0] for s in run(np.tile(LOGITS, (draws, 1)), picks).sampled]
    p = exact(rules)
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0, "a token was drawn that should have been cut off"
    result = chisquare(counts[p > 0], p[p > 0] * draws)
    assert result.pvalue > 0.01, f"{counts} against {p * draws}"


def test_D01_the_chi_square_itself_is_distributed_as_it_should() -> None:
    """Over many seeds the p-values are uniform: the seeds above were not picked to hide a bias."""
    values = []
    for seed in range(80):
        rules = TokenRules(temperature=0.7, top_k=8, seed=seed)
        p = exact(rules)
        counts = np.bincount(one(LOGITS, rules, num_samples=600).token_ids, minlength=len(p))
        values.append(chisquare(counts[p > 0], p[p > 0] * 600).pvalue)
    assert kstest(values, "uniform").pvalue > 0.01


def test_D01_a_draw_is_the_inverse_cdf_in_id_order() -> None:
    rules = TokenRules(temperature=0.8, top_k=7, seed=5)
    p = exact(rules)
    for position in range(200):
        u, total, want = uniform(5, 3, position), 0.0, -1
        for token in range(len(p)):
            total += p[token]
            if total > u:
                want = token
                break
        assert one(LOGITS, rules, sample_index=3, position=position).token_ids == [want]


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (1 - 2**-53, 3)])
@pytest.mark.parametrize("rules", [TokenRules(temperature=1.0), TokenRules(temperature=1.0, top_k=4)])
def test_the_ends_of_the_unit_interval(
    monkeypatch: pytest.MonkeyPatch, rules: TokenRules, u: float, token: int
) -> None:
    """Neither end may name a token of probability zero."""
    monkeypatch.setattr(module, "uniform", lambda *args: u)
    minus = float("-inf")
    for scale in (0.0, 0.1, 3.7):
        assert one([minus, scale, -scale, 0.0, minus, -2000.0], rules).token_ids == [token]


def mixed_rows(num: int, vocab: int) -> tuple[np.ndarray, list[TokenRules]]:
    rng = np.random.default_rng(1)
    kinds = [
        TokenRules(),
        TokenRules(temperature=0.9, seed=3),
        TokenRules(temperature=1.1, top_p=0.9, seed=4, num_logprobs=5),
        TokenRules(temperature=0.7, top_k=9, seed=5, repetition_penalty=1.3, presence_penalty=0.5),
        TokenRules(num_logprobs=0, logit_bias={3: 5.0}),
        TokenRules(num_logprobs=0, logprob_ids=[7, 900, 7]),
        TokenRules(temperature=1.0, min_p=0.02, seed=6, allowed_ids=list(range(0, vocab, 3))),
    ]
    return rng.normal(0, 2, (num, vocab)).astype(np.float32), [kinds[i % len(kinds)] for i in range(num)]


def test_D01_company_changes_nothing() -> None:
    """Alone, in the batch, and in the batch turned round: bit-equal tokens and logprobs. Odd V: rows are unaligned."""
    num, vocab = 24, 1003
    logits, rules = mixed_rows(num, vocab)
    alone = [
        run(logits[i : i + 1], [pick(i, rules[i], 0, position=i, num_samples=2)], (0, 3, 6)).sampled[0]
        for i in range(num)
    ]
    batch = run(logits, [pick(i, rules[i], i, position=i, num_samples=2) for i in range(num)], (0, 3, 6))
    turned = run(
        logits[::-1],
        [pick(i, rules[i], num - 1 - i, position=i, num_samples=2) for i in reversed(range(num))],
        (0, 3, 6),
    )
    assert batch.sampled == alone
    assert turned.sampled[::-1] == alone
    assert len({s.token_ids[0] for s in alone}) > 10


def test_D01_same_seed_same_tokens_other_seed_others() -> None:
    def tokens(seed: int) -> list[int]:
        return one(LOGITS, TokenRules(temperature=1.0, seed=seed), num_samples=50).token_ids

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)
    assert tokens(1) != tokens(1 + 2**32), "the seed's upper half is not used"


def test_D02_n_samples_equal_n_runs() -> None:
    rules = TokenRules(temperature=1.3, seed=77, num_logprobs=1)
    together = one(LOGITS, rules, num_samples=6)
    alone = [one(LOGITS, rules, sample_index=j) for j in range(6)]
    assert together.token_ids == [s.token_ids[0] for s in alone]
    assert together.logprobs == [s.logprobs[0] for s in alone]
    assert one(LOGITS, rules, num_samples=2, sample_index=4).token_ids == together.token_ids[4:]


@pytest.mark.parametrize("rules", [TokenRules(), TokenRules(logit_bias={9: 1.0}), TokenRules(num_logprobs=2)])
def test_greedy_ties_go_to_the_lowest_id(rules: TokenRules) -> None:
    logits = [0.0, 3.0, 1.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    assert one(logits, rules, num_samples=3).token_ids == [1, 1, 1]


def test_greedy_follows_the_processors() -> None:
    assert one([0.0, 3.0, 1.0], TokenRules(allowed_ids=[0, 2])).token_ids == [2]
    assert one([0.0, 3.0, 1.0], TokenRules(logit_bias={0: 3.5})).token_ids == [0]


def test_logprobs_are_raw_and_ranked() -> None:
    """Bias and temperature choose the token, but the numbers are the model's own."""
    logits = [1.0, 2.0, 2.0, 0.0, 2.0]
    rules = TokenRules(temperature=0.5, logit_bias={4: 50.0}, num_logprobs=3)
    (entry,) = one(logits, rules).logprobs
    lse = float(np.log(np.exp(np.array(logits)).sum()))
    assert entry.token_id == 4
    assert entry.logprob == pytest.approx(2.0 - lse, abs=1e-12)
    assert entry.rank == 3  # behind its equals 1 and 2
    assert entry.top_ids == [1, 2, 4]
    assert entry.top_logprobs == pytest.approx([2.0 - lse] * 3, abs=1e-12)
    (entry,) = one(logits, TokenRules(logit_bias={3: 50.0}, num_logprobs=99)).logprobs
    assert (entry.rank, entry.top_ids) == (5, [1, 2, 4, 0, 3])
    assert np.exp(entry.top_logprobs).sum() == pytest.approx(1.0, abs=1e-12)
    (entry,) = one(logits, TokenRules(num_logprobs=0)).logprobs
    assert (entry.token_id, entry.top_ids) == (1, [])
    assert one(logits, TokenRules()).logprobs == []
    (entry,) = one(logits, TokenRules(num_logprobs=0, logprob_ids=[3, 0])).logprobs
    assert (entry.token_id, entry.rank, entry.top_ids) == (1, 1, [3, 0])
    assert entry.top_logprobs == pytest.approx([0.0 - lse, 1.0 - lse], abs=1e-12)


def test_candidates_are_of_the_processed_logits_without_temperature() -> None:
    logits = [1.0, 2.0, 2.0, 0.5, -1.0]
    rules = TokenRules(temperature=0.1, top_k=1, logit_bias={3: 2.0}, allowed_ids=[0, 1, 2, 3])
    hit = one(logits, rules, num_samples=0, num_candidates=3)
    processed = np.array([1.0, 2.0, 2.0, 2.5])
    want = processed - np.log(np.exp(processed).sum())
    assert hit.token_ids == []
    assert [t for t, _ in hit.candidates] == [3, 1, 2]
    assert [x for _, x in hit.candidates] == pytest.approx([want[3], want[1], want[2]], abs=1e-7)
    hit = one(logits, rules, num_samples=0, num_candidates=5)
    assert [t for t, _ in hit.candidates] == [3, 1, 2, 0], "a masked token is no candidate"


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 500, 1002])
def test_bad_logits_fail_their_row_alone(poison: float, where: int) -> None:
    logits, rules = mixed_rows(12, 1003)
    healthy = run(logits, [pick(i, rules[i], i) for i in range(12)]).sampled
    for sick in range(6):
        broken = logits.copy()
        broken[sick, where] = poison
        out = run(broken, [pick(i, rules[i], i) for i in range(12)])
        assert [e.seq_id for e in out.errors] == [sick]
        assert "position 7" in out.errors[0].message
        assert out.sampled == [s for s in healthy if s.seq_id != sick]


def test_all_minus_infinity_is_an_error_too() -> None:
    out = run([[-np.inf] * 4, [0.0, -np.inf, -np.inf, -np.inf]], [pick(1, TokenRules(), 0), pick(2, TokenRules(), 1)])
    assert [e.seq_id for e in out.errors] == [1]
    assert [s.token_ids for s in out.sampled] == [[0]]


@pytest.mark.parametrize(
    "rules",
    [
        TokenRules(allowed_ids=[1, 2], bad_sequences=[[1], [2]]),
        TokenRules(temperature=1.0, allowed_ids=[3], stop_ids=[3], min_tokens=2),
        TokenRules(allowed_ids=[]),
        TokenRules(allowed_ids=[400]),
    ],
)
def test_a_row_with_nothing_left_fails_alone(rules: TokenRules) -> None:
    logits = [[1.0, 2.0, 3.0, 4.0]] * 2
    for job in ({}, {"num_samples": 0, "num_candidates": 2}):
        out = run(logits, [pick(1, rules, 0, **job), pick(2, TokenRules(allowed_ids=[0]), 1)])
        assert [e.seq_id for e in out.errors] == [1]
        assert "every token is excluded" in out.errors[0].message
        assert [s.token_ids for s in out.sampled] == [[0]]


def test_overflowing_penalties_fail_their_row_alone() -> None:
    picks = [pick(1, TokenRules(repetition_penalty=1e-30), 0), pick(2, TokenRules(repetition_penalty=2.0), 1)]
    out = run([[1e20, 0.0], [3.0, 2.0]], picks)
    assert [e.seq_id for e in out.errors] == [1]
    assert "float32" in out.errors[0].message
    assert out.sampled[0].token_ids == [1]


def test_a_nan_in_a_prompt_row_is_named() -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = np.nan
    rules = TokenRules(num_prompt_logprobs=1)
    ids = np.array([3, 1], np.int32)
    out = run(logits, [pick(1, rules, 2, prompt_row=0, prompt_start=5, prompt_ids=ids)])
    assert (out.sampled, out.prompt_logprobs) == ([], [])
    assert "position 6" in out.errors[0].message


def test_nothing_to_do() -> None:
    assert Sampler(4).sample(np.zeros((0, 4), np.float32), []) == SamplerOutput([], [], [])
