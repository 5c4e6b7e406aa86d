"""Sequences that begin with the same pages: their keys and values are read once, and no bit changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.micro.kernels.attention import Call

from penstock import LLM, SamplingParams
from tests.native.running import each_isa, each_threads, pool
from tests.native.test_attention import DTYPES, SPAN, Rule, Text, assert_right, attend, same, sinks_of, slopes_of, text

TREES = [
    [(600, "")],
    [(512, ""), (300, "a")],  # two levels
    [(256, ""), (256, "a"), (256, "aa"), (40, "aaa")],
    [(255, "")],  # less than a chunk
]


def family(rng: np.random.Generator, rule: Rule, levels: list[tuple[int, str]], members: int, most: int) -> list[Text]:
    """Texts of which each begins with some of the levels, one after the other, and goes on by itself."""
    parts = [text(rng, rule, n) for n, _ in levels]
    out = []
    for _ in range(members):
        begins = parts[: int(rng.integers(0, len(parts) + 1))]
        own = text(rng, rule, int(rng.integers(1, most)))
        q, k, v = (np.concatenate([getattr(p, of) for p in [*begins, own]]) for of in ("q", "k", "v"))
        out.append(Text(q, k, v, len(k) - int(rng.integers(1, min(len(own.k), 5) + 1)), len(k)))
    return out


@each_isa
@each_threads
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sampled
def test_B10_C55_C56_C57_a_common_beginning_changes_no_bit(isa: str, threads: int, dtype: str) -> None:
    """Hydragen, bifurcated attention, DeFT: trees of beginnings, tokens of several levels, some sequences apart."""
    rng = np.random.default_rng([55, threads])
    for trial, levels in enumerate(TREES):
        per = (7, 1, 3, 2)[trial]
        heads = 2 * per
        rule = Rule(heads, 2, 24, 40, soft_cap=3.0 * (trial % 2), slopes=slopes_of(heads) if trial % 2 else None,
                    sinks=sinks_of(heads) if trial > 1 else None)  # fmt: skip
        texts = family(rng, rule, levels, 9, 300)
        got = attend(isa, threads, texts, rule, dtype, (16, 32, 64, 1)[trial], seed=trial)
        for t, of_text in zip(texts, got, strict=True):
            same(of_text, attend(isa, 1, [t], rule, dtype, 16)[0])
        assert_right(got[0], texts[0], rule, dtype, isa)


@each_isa
def test_a_common_beginning_of_more_than_a_span(isa: str) -> None:
    """Some members end in the span in which others still share, some one span later."""
    rule = Rule(4, 2, 8, 8)
    rng = np.random.default_rng(57)
    for t in (texts := family(rng, rule, [(SPAN - 256, ""), (1024, "a"), (SPAN, "aa")], 7, 600)):
        assert t.stop > 0
    for threads in (1, 2):
        for t, got in zip(texts, attend(isa, threads, texts, rule, "bfloat16", 32), strict=True):
            same(got, attend(isa, 1, [t], rule, "bfloat16", 256)[0])


@each_isa
@pytest.mark.parametrize("common", [[0, *[1024] * 7], [0, 1024, 1024, 768, 1024, 768, 1024, 1024]], ids=["one", "tree"])
def test_C55_C57_keys_of_a_common_beginning_are_looked_up_once(isa: str, common: list[int]) -> None:
    """Counted: every node of a tree of beginnings once, in whole chunks of 256; with sharing off all of each text."""
    one, shape = pool(isa, 1), (4, 2, 8)
    lengths = [1100 + 20 * i for i in range(8)]
    once, apart = (Call(one, shape, lengths, 1, common=common, once=once) for once in (True, False))
    counts, results = [], []
    for call, shares in ((once, True), (once, False), (apart, True)):
        call.program.share_prefixes(shares)
        before = call.program.keys_read(), call.program.keys_shared()
        call()
        counts.append((call.program.keys_read() - before[0]) // 2)
        assert counts[-1] + (call.program.keys_shared() - before[1]) // 2 == sum(lengths)
        results.append(call.result().copy())
    for result in results:
        same(result, results[0])
    assert counts == [sum(lengths) - sum(n // 256 * 256 for n in common), sum(lengths), sum(lengths)]


@each_isa
def test_who_has_much_of_its_own_stays_apart(isa: str) -> None:
    """Between two that share its first chunk alone and two that share more with it, in any order of pages."""
    rule = Rule(4, 2, 8, 16)
    rng = np.random.default_rng(59)
    head, one, two = text(rng, rule, 256), text(rng, rule, 768), text(rng, rule, 768)
    texts = []
    for parts in ((head, one, 40), (head, one, 30), (head, two, 2000), (head, two, 50), (head, two, 60)):
        begin = [*parts[:2], text(rng, rule, parts[2])]
        q, k, v = (np.concatenate([getattr(p, of) for p in begin]) for of in ("q", "k", "v"))
        texts.append(Text(q, k, v, len(k) - 1, len(k)))
    alone = [attend(isa, 1, [t], rule, "float32", 32)[0] for t in texts]
    for seed in range(12):
        for got, want in zip(attend(isa, 1, texts, rule, "float32", 32, seed=seed), alone, strict=True):
            same(got, want)


@each_isa
def test_more_rows_than_a_task_holds(isa: str) -> None:
    rule = Rule(8, 1, 16, 16)
    rng = np.random.default_rng(58)
    texts = [replace(t, start=t.stop - 1) for t in family(rng, rule, [(512, "")], 40, 40)]
    for t, got in zip(texts, attend(isa, 2, texts, rule, "float32", 32), strict=True):
        same(got, attend(isa, 1, [t], rule, "float32", 16)[0])


@each_isa
@each_threads
@pytest.mark.parametrize("members", [2, 3, 9])
def test_what_is_left_of_a_bundles_heads_is_dealt_out(isa: str, threads: int, members: int) -> None:
    """Three kv heads: each thread takes some members of the one, or two, that not all of them have; some nobody."""
    rule = Rule(6, 3, 16, 16)
    rng = np.random.default_rng([60, members])
    texts = [replace(t, start=t.stop - 1) for t in family(rng, rule, [(512, "")], members, 40)]
    alone = [attend(isa, 1, [t], rule, "bfloat16", 32)[0] for t in texts]
    for got, want in zip(attend(isa, threads, texts, rule, "bfloat16", 32), alone, strict=True):
        same(got, want)


def test_C56_an_engine_reads_a_common_beginning_once_and_says_so() -> None:
    """Same tokens as without; keys that were not read again are counted, in whole chunks of 256."""
    before = [3 + i % 200 for i in range(600)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    tokens, stats = [], []
    for cascade in (True, False):
        llm = LLM("nano", ops="native", threads=1, max_num_seqs=4, skip_tokenizer_init=True, cascade_attention=cascade)
        llm.generate([{"prompt_token_ids": before}], params)
        outs = llm.generate([{"prompt_token_ids": [*before, 5 + i]} for i in range(4)], params)
        tokens.append([list(out.outputs[0].token_ids) for out in outs])
        stats.append(llm.engine.core.stats)
    assert tokens[0] == tokens[1]
    assert stats[0].num_keys_shared % (3 * 512) == 0 < stats[0].num_keys_shared
    assert stats[0].num_keys_read > 0 == stats[1].num_keys_shared
