"""Perplexity and divergence against their definitions, written out; windows that count every token once. Row K14."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.backends.reference import ReferenceBackend
from penstock.base.bf16 import F32
from penstock.base.errors import EngineError, InputError
from penstock.config import from_kwargs
from penstock.core.matrix_format import NONE, parse_scheme
from penstock.eval.compare import Remembered, compare, divergence
from penstock.eval.perplexity import Passage, Window, beginning, cut, passage, score, token_nats
from penstock.eval.sample import SAMPLE
from penstock.eval.schemes import as_json, measure
from penstock.eval.scorer import LoadedModel, ProgramScorer, load, make_scorer, weight_sizes
from penstock.launch.bundled import bundled_model
from tests import specs
from tests.oracle import NaiveModel

SCHEMES = ("int8-w8a8", "int8-wo", "int4-w4a8", "int4-wo:32")


def tiny(name: str) -> LoadedModel:
    spec, weights = specs.make(name)
    return LoadedModel(name, spec, weights, "float32", "float32", 1024)


@cache
def nano() -> LoadedModel:
    return load(from_kwargs(model=str(bundled_model("nano")), num_gpu_blocks_override=64))


class Fixed:
    """Expects what a table of bigrams says, wherever a token stands."""

    vocab_size, max_len = 7, 50

    def __init__(self, seed: int, wide: float = 1.0) -> None:
        self.table = (np.random.default_rng(seed).standard_normal((7, 7)) * wide).astype(np.float32)
        self.read: list[tuple[int, ...]] = []

    def logits(self, token_ids: Sequence[int]) -> F32:
        self.read.append(tuple(token_ids))
        return self.table[list(token_ids)]


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 7, n).tolist()


def passage_of(ids: list[int], window: int, stride: int, num_bytes: int = 100) -> Passage:
    return Passage(cut(ids, window, stride, None), num_bytes, window, stride)


# -- windows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [None, 99])
@pytest.mark.parametrize(("n", "window", "stride"), [(2, 2, 1), (5, 50, 25), (50, 50, 25), (51, 50, 25), (300, 50, 25),
                                                   (300, 50, 49), (301, 50, 1), (7, 2, 1), (100, 3, 2)])  # fmt: skip
def test_every_token_is_counted_once_with_enough_before_it(n: int, window: int, stride: int, bos: int | None) -> None:
    ids = list(range(n))
    if bos is not None:
        ids[0] = bos
    windows = cut(ids, window, stride, bos)
    assert [t for w in windows for t in w.token_ids[w.first :]] == ids[1:]
    for i, w in enumerate(windows):
        assert len(w.token_ids) <= window
        assert w.first >= 1
        assert bos is None or w.token_ids[0] == bos
        if i:
            body = w.token_ids[1:] if bos is not None else w.token_ids
            assert list(body) == list(range(body[0], body[0] + len(body))), "an unbroken piece of the text"
            assert w.first >= min(window - stride, window - 1), "enough stands before what is counted"


def test_windows_keep_the_stride() -> None:
    windows = cut(list(range(200)), 50, 25, None)
    assert [w.token_ids[0] for w in windows] == [0, 25, 50, 75, 100, 125, 150]
    assert [w.first for w in windows] == [1, *[25] * 6]


# -- definitions -------------------------------------------------------------------------------------------------


def test_perplexity_is_that_of_the_definition() -> None:
    scorer, ids = Fixed(1), ids_of(120)
    read = passage_of(ids, 20, 10, num_bytes=333)
    found = score(scorer, read)
    nats = 0.0
    for a, b in pairwise(ids):  # of bigrams, windows change nothing
        row = [math.exp(v) for v in scorer.table[a].tolist()]
        nats -= math.log(row[b] / sum(row))
    assert read.num_tokens == 119
    assert found.perplexity == pytest.approx(math.exp(nats / 119))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / 333)
    low, high = found.interval() or (0, 0)
    assert low < found.perplexity < high
    assert found.interval() == found.interval(), "the draws are fixed"


def test_one_window_has_no_interval() -> None:
    read = passage_of(ids_of(10), 20, 10)
    found = compare(Fixed(1), Fixed(2), read)
    assert found.score.interval() is found.kl_interval() is found.score.difference(found.reference) is None


def test_equal_expectations_give_the_size_of_the_vocabulary() -> None:
    scorer = Fixed(1)
    scorer.table[:] = 3.25
    found = score(scorer, passage_of(ids_of(60), 20, 10, num_bytes=59))
    assert found.perplexity == pytest.approx(7)
    assert found.bits_per_byte == pytest.approx(math.log2(7))


def test_divergence_is_that_of_the_definition() -> None:
    one, two, ids = Fixed(1, 3.0), Fixed(2), ids_of(90)
    found = compare(one, two, passage_of(ids, 20, 10))
    kl, same = [], []
    for a in ids[:-1]:
        p, q = (np.exp(s.table[a].astype(np.float64)) for s in (one, two))
        p, q = p / p.sum(), q / q.sum()
        kl.append(sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)))
        same.append(p.argmax() == q.argmax())
    assert found.kl == pytest.approx(np.array(kl))
    assert found.mean_kl == pytest.approx(np.mean(kl))
    assert found.p99_kl == pytest.approx(np.percentile(kl, 99))
    assert found.max_kl == pytest.approx(max(kl))
    assert found.agreement == pytest.approx(np.mean(same))
    low, high = found.kl_interval() or (0, 0)
    assert low < found.mean_kl < high
    itself = compare(one, one, passage_of(ids, 20, 10))
    assert itself.max_kl == 0
    assert itself.agreement == 1
    assert itself.score.difference(itself.reference) == (0, 0)


def test_the_difference_is_drawn_in_pairs() -> None:
    """A worse model by the same amount everywhere: the difference is known far better than either perplexity."""
    one = Fixed(1)
    two = Fixed(1)
    two.table = one.table * np.float32(0.98)
    found = compare(one, two, passage_of(ids_of(400), 20, 10))
    low, high = found.score.difference(found.reference) or (0, 0)
    own = found.score.interval() or (0, 0)
    difference = found.score.perplexity - found.reference.perplexity
    assert low < difference < high
    assert high - low < (own[1] - own[0]) / 4


def test_logits_that_are_not_finite_are_an_error_of_the_scheme() -> None:
    window = Window((1, 2, 3), 1)
    rows = np.zeros((3, 7), np.float32)
    rows[1, 4] = np.nan
    with pytest.raises(EngineError, match="not finite"):
        token_nats(rows, window)
    good = np.zeros((3, 7), np.float32)
    with pytest.raises(EngineError, match="not finite"):
        divergence(good, rows, window)
    ruled_out = good.copy()
    ruled_out[:, 5] = -np.inf
    assert np.allclose(divergence(ruled_out, good, window), math.log(7 / 6)), "nothing is left of what p rules out"
    with pytest.raises(EngineError, match="divergence"):
        divergence(good, ruled_out, window)


def test_the_reference_is_read_once_as_far_as_it_fits() -> None:
    scorer = Fixed(1)
    read = passage_of(ids_of(60), 20, 10)
    for room, times in ((1 << 20, 1), (0, 2)):
        scorer.read.clear()
        remembered = Remembered(scorer, room)
        for _ in range(2):
            for window in read.windows:
                assert np.array_equal(remembered.logits(window.token_ids), scorer.table[list(window.token_ids)])
        assert len(scorer.read) == times * len(read.windows)


# -- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa", "windowed", "slots", "latent", "experts", "mamba2_hybrid", "rwkv7"])
def test_the_scorer_reads_as_the_naive_loop_does(name: str) -> None:
    model = tiny(name)
    ids = np.random.default_rng(3).integers(0, model.spec.vocab_size, 70).tolist()
    expected = NaiveModel(model.spec, dict(model.weights)).logits(ids)
    exact = ProgramScorer(model, ReferenceBackend())
    assert np.array_equal(exact.logits(ids), expected)
    assert np.array_equal(exact.logits(ids), expected), "nothing is left of the text before"
    assert np.allclose(make_scorer(model, NONE).logits(ids), expected, atol=1e-3)


def test_steps_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = ProgramScorer(tiny("llama_gqa"), ReferenceBackend())
    ids = np.random.default_rng(3).integers(0, 61, 70).tolist()
    whole = scorer.logits(ids)
    monkeypatch.setattr("penstock.eval.scorer._STEP_TOKENS", 16)
    assert np.array_equal(scorer.logits(ids), whole)


def test_it_says_what_the_engine_says() -> None:
    """Prompt logprobs of `LLM`, window by window, are the same nats."""
    model = nano()
    assert model.tokenizer is not None
    scorer = make_scorer(model, NONE)
    read = passage(SAMPLE, model.tokenizer, scorer, window=64, max_tokens=150)
    found = score(scorer, read)
    llm = LLM(str(bundled_model("nano")), num_gpu_blocks_override=64)
    outputs = llm.generate(
        [{"prompt_token_ids": list(w.token_ids)} for w in read.windows],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
    )
    for window, nats, output in zip(read.windows, found.nats, outputs, strict=True):
        entries: list[Any] = output.prompt_logprobs or []
        own = [entries[i][window.token_ids[i]].logprob for i in range(window.first, len(window.token_ids))]
        assert -sum(own) == pytest.approx(nats, rel=1e-4)


def test_a_text_s_bytes_are_those_of_its_counted_tokens() -> None:
    model = nano()
    tokenizer = model.tokenizer
    assert tokenizer is not None
    scorer = make_scorer(model, NONE)
    text = beginning(SAMPLE, tokenizer, 200)
    assert SAMPLE.startswith(text)
    assert 150 < len(tokenizer.encode(text)) <= 200
    read = passage(SAMPLE, tokenizer, scorer, max_tokens=200)
    ids = tokenizer.encode(text)
    first = 0 if ids[0] == tokenizer.bos_id else len(tokenizer.decode(ids[:1]))
    assert read.num_bytes == len(text.encode()) - first
    assert read.num_tokens == len(ids) - 1
    assert read.window == 512
    assert beginning("short", tokenizer, 100) == "short"


@pytest.mark.parametrize(
    ("options", "says"),
    [({"window": 1}, "window"), ({"window": 2049}, "2048"), ({"window": 64, "stride": 64}, "stride"),
     ({"stride": 0}, "stride"), ({"max_tokens": 1}, "max_tokens")],
)  # fmt: skip
def test_conditions_that_cannot_be(options: dict[str, int], says: str) -> None:
    model = nano()
    assert model.tokenizer is not None
    with pytest.raises(InputError, match=says):
        passage(SAMPLE, model.tokenizer, make_scorer(model, NONE), **options)


def test_a_text_of_one_token_is_refused() -> None:
    model = nano()
    assert model.tokenizer is not None
    with pytest.raises(InputError, match="too few"):
        passage("a", model.tokenizer, make_scorer(model, NONE))


def test_schemes_lose_in_the_order_of_their_bits() -> None:
    model = nano()
    assert model.tokenizer is not None
    scorer = make_scorer(model, NONE)
    read = passage(SAMPLE, model.tokenizer, scorer, window=128, max_tokens=300)
    steps = []
    found = measure(model, scorer, [NONE, *map(parse_scheme, SCHEMES)], read, lambda: steps.append(1))
    assert len(steps) == len(found) * len(read.windows)
    kl = {m.scheme.name: m.found.mean_kl for m in found if m.found is not None}
    assert kl["none"] == 0
    assert 0 < kl["int8-wo"] < kl["int8-w8a8"] < kl["int4-wo:32"] / 4
    assert kl["int4-wo:32"] < kl["int4-w4a8"]
    bits = [m.sizes.bits_per_weight for m in found]
    assert bits[0] > 16
    assert 8 < bits[1] == bits[2] < 8.5
    assert 4.2 < bits[3] < 4.5 < bits[4] < 5
    told = as_json(found[1])
    assert told["perplexity_difference"] == pytest.approx(told["perplexity"] - as_json(found[0])["perplexity"])
    assert all(m.tokens_per_s > 0 for m in found)


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mha", "experts", "latent", "rwkv7", "mamba2"])
def test_every_kind_of_model_can_be_measured(name: str) -> None:
    model = tiny(name)
    ids = np.random.default_rng(5).integers(0, model.spec.vocab_size, 60).tolist()
    read = Passage(cut(ids, 30, 15, None), 60, 30, 15)
    scorer = make_scorer(model, NONE)
    for scheme in map(parse_scheme, SCHEMES):
        (m,) = measure(model, scorer, [scheme], read)
        assert m.found is not None
        assert m.found.mean_kl > 0


def test_sizes_count_every_matrix_once() -> None:
    tied, apart, mixed = tiny("llama_mha"), tiny("llama_gqa"), tiny("experts")
    sizes = weight_sizes(apart, NONE)
    assert sizes.matrix_params == sum(w.size for n, w in apart.weights.items() if w.ndim == 2 and n != "embed")
    sizes = weight_sizes(tied, NONE)
    assert sizes.matrix_params == sum(w.size for w in tied.weights.values() if w.ndim == 2), "a tied table is packed"
    vectors = sum(w.nbytes for w in tied.weights.values() if w.ndim == 1)
    assert sizes.total_bytes == sizes.matrix_bytes + tied.weights["embed"].nbytes + vectors, "and kept for looking up"
    kept = ("router", "shared_gate", "embed")
    packed = [w for n, w in mixed.weights.items() if w.ndim == 2 and not n.endswith(kept)]
    assert weight_sizes(mixed, NONE).matrix_params == sum(w.size for w in packed), "all experts, no router"


def test_a_scheme_that_gives_no_numbers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama_gqa")
    scorer = make_scorer(model, NONE)
    read = Passage(cut(list(range(40)), 30, 15, None), 60, 30, 15)

    def broken(self: Any, token_ids: Sequence[int]) -> F32:
        return np.full((len(token_ids), 61), np.nan, np.float32)

    good = scorer.logits
    monkeypatch.setattr(ProgramScorer, "logits", broken)
    monkeypatch.setattr(scorer, "logits", good)
    monkeypatch.setattr("penstock.eval.schemes.weight_sizes", lambda *_: weight_sizes_of_none(model))
    found = measure(model, scorer, [NONE, parse_scheme("int4-wo")], read)
    assert found[0].found is not None
    assert found[1].found is None
    assert "not finite" in as_json(found[1])["error"]


def weight_sizes_of_none(model: LoadedModel) -> Any:
    from penstock.eval.scorer import WeightSizes

    return WeightSizes(1, 1, 1)
