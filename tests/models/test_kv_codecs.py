"""Codecs of keys and values on nano: what they cost, and which costs less (rows B26, F36, F37, F39, F41).

The built-in sample, one window of 512 tokens and what follows; benchmarks/quality/codecs.py measures the same on more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from penstock.backends.reference import BlasBackend
from penstock.base.bf16 import F32
from penstock.config import from_kwargs
from penstock.core.model_spec import cache_groups
from penstock.eval.compare import Comparison, Remembered, compare
from penstock.eval.perplexity import Passage, passage
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.ops.blas import BLAS
from penstock.ops.ref.codecs.packed import decode_tokens, encode_tokens
from penstock.ops.ref.rotation import hadamard
from penstock.ops.ref.storage import write_kv

RECENT = 32
UNIFORM = {"dtype": {"k": "int4", "v": "int2"}}
MIXED = {**UNIFORM, "layers": {"0-1": "int4", "2-3": "int2"}}
"""As benchmarks/quality/codecs.py found it, of the same mean of 3 bits."""


@cache
def bench() -> tuple[LoadedModel, Remembered, Passage]:
    model = load(from_kwargs(model="nano", ops="ref", kv_cache_dtype="float32"))
    assert model.tokenizer is not None
    reference = Remembered(ProgramScorer(model, BlasBackend()))
    return model, reference, passage(SAMPLE, model.tokenizer, reference, window=384, stride=192, max_tokens=900)


def measured(how: str | dict[str, Any], rotation: str = "none") -> Comparison:
    given = from_kwargs(model="nano", kv_cache_dtype=how)
    return _measured(given.cache.kv_cache_dtype, rotation)


@cache
def _measured(kv_dtype: str, rotation: str) -> Comparison:
    model, reference, read = bench()
    return compare(reference, ProgramScorer(replace(model, kv_dtype=kv_dtype, rotation=rotation), BlasBackend()), read)


def bytes_of(how: str | dict[str, Any]) -> int:
    """Of a block of all layers."""
    kv_dtype = from_kwargs(model="nano", kv_cache_dtype=how).cache.kv_cache_dtype
    return sum(g.slab_bytes(32) for g in cache_groups(bench()[0].spec, kv_dtype))


def test_F36_8_bits_cost_nothing_and_4_bits_little() -> None:
    eight, four, two = (measured(f"int{bits}") for bits in (8, 4, 2))
    assert abs(eight.score.perplexity / eight.reference.perplexity - 1) < 0.001
    assert four.score.perplexity / four.reference.perplexity < 1.03
    assert eight.mean_kl < 0.05 * four.mean_kl < 0.05 * 0.1 * two.mean_kl


def test_F37_2_bits_by_channel_beat_2_bits_by_token() -> None:
    """With equally many newest tokens left whole; the bytes are the same, block for block."""
    kivi, tokens = ({"dtype": name, "recent": RECENT} for name in ("kivi2", "int2"))
    assert bytes_of(kivi) == bytes_of(tokens)
    a, b = measured(kivi), measured(tokens)
    assert a.score.perplexity < b.score.perplexity < measured("int2").score.perplexity
    assert a.mean_kl < 0.5 * b.mean_kl


def test_F39_bits_where_they_count_beat_equal_bits() -> None:
    """By divergence: perplexities of so few windows differ by chance. docs/concepts/kv-quantisation.md has a book's."""
    assert bytes_of(MIXED) == bytes_of(UNIFORM)
    mixed, uniform = measured(MIXED), measured(UNIFORM)
    assert mixed.mean_kl < 0.7 * uniform.mean_kl


def test_F39_whole_first_tokens_change_something() -> None:
    """What it is worth is in docs/concepts/kv-quantisation.md: on nano nothing that can be told from chance."""
    plain, sinks = ({"dtype": "int2", "recent": RECENT, "sinks": n} for n in (0, 32))
    assert measured(sinks).mean_kl < measured(plain).mean_kl


@pytest.mark.parametrize(("more", "fewer"), [("int8", "int4"), ("int4", "int2")])
def test_B26_keys_need_the_bits_more_than_values(more: str, fewer: str) -> None:
    """K8V4 before K4V8, at equal bytes (LeanKV)."""
    keys, values = {"dtype": {"k": more, "v": fewer}}, {"dtype": {"k": fewer, "v": more}}
    assert bytes_of(keys) == bytes_of(values)
    a, b = measured(keys), measured(values)
    assert a.score.perplexity <= b.score.perplexity
    assert a.mean_kl < 0.6 * b.mean_kl


def test_F41_keys_lose_less_when_they_are_turned() -> None:
    model, _, read = bench()
    keys: dict[int, list[F32]] = {}

    def listening(step: Any, a: F32, b: F32, group: int, layer: int, names: tuple[str, str]) -> None:
        keys.setdefault(layer, []).append(a)
        write_kv(step, a, b, group, layer, names)

    ops = BLAS.replaced("listening", {"write_kv": listening}, batch_invariant=False)
    ProgramScorer(model, BlasBackend(table=ops)).logits(read.windows[0].token_ids)
    assert len(keys) == 6
    plain = turned = 0.0
    for parts in keys.values():
        k = np.concatenate(parts)
        plain += _error(k)
        turned += _error(hadamard(k))
    assert turned < plain


def _error(k: F32) -> float:
    """Of 4 bits: sum of squares over that of the keys."""
    packed, bounds = encode_tokens(k, 4, 32)
    back = decode_tokens(packed, bounds.astype(np.float32), 4)
    return float(np.square(back - k).sum() / np.square(k).sum())


@pytest.mark.parametrize("how", ["int4", "kivi2"])
def test_F41_rotation_composes_with_codecs(how: str) -> None:
    assert measured(how, "hadamard").mean_kl < 2 * measured(how).mean_kl
