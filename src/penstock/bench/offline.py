"""An engine in this process, without a server: how long a batch takes, and how much goes through."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.base.errors import ConfigError
from penstock.bench.prompts import WORDS, Maker, Sample
from penstock.core.acceptance import Acceptance
from penstock.core.sampling import SamplingParams
from penstock.launch.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


def local_maker(llm: LLM) -> Maker:
    """Prompts of exact lengths, of ids that stand for words; without a tokenizer of any ids."""
    engine = llm.engine
    if engine.tokenizer is None:
        return Maker(list(range(engine.limits.vocab_size)))
    return Maker(engine.tokenizer.encode(" ".join(WORDS * 2), False))


def acceptance_of(llm: LLM) -> Acceptance:
    """Speculation's numbers since the engine began; all zero without it."""
    return Acceptance.of(llm.engine.core.stats.counters())


def _drafts(llm: LLM, before: Acceptance) -> dict[str, Any]:
    """What came of drafts since `before`; nothing without speculation."""
    return {} if llm.config.speculation is None else (acceptance_of(llm) - before).figures()


def latency(
    llm: LLM,
    *,
    input_len: int = 32,
    output_len: int = 128,
    batch_size: int = 8,
    n: int = 1,
    num_iters: int = 30,
    num_iters_warmup: int = 10,
    seed: int = 0,
    on_iter: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """How long one batch takes from its prompts to its last token. Units: seconds.

    Every iteration has prompts of its own: with the same ones the prefix cache would answer for the prefill.
    """
    if min(input_len, output_len, batch_size, n, num_iters) < 1 or num_iters_warmup < 0:
        raise ConfigError("lengths, batch size, n and iterations must be at least 1", field="num_iters")
    rng, maker = np.random.default_rng(seed), local_maker(llm)
    params = SamplingParams(n=n, temperature=1.0 if n > 1 else 0.0, max_tokens=output_len, ignore_eos=True, seed=seed)
    times: list[float] = []
    ttfts: list[float] = []
    before = acceptance_of(llm)
    for number in range(-num_iters_warmup, num_iters):
        if number == 0:
            before = acceptance_of(llm)
        prompts = [{"prompt_token_ids": maker.draw(rng, input_len)} for _ in range(batch_size)]
        began_s = time.perf_counter()
        outputs = llm.generate(prompts, params)
        took_s = time.perf_counter() - began_s
        on_iter()
        if number >= 0:
            times.append(took_s)
            ttfts += [o.metrics.ttft_s for o in outputs if o.metrics.ttft_s is not None]
    mean_s = float(np.mean(times))
    return {
        "avg_latency": mean_s,
        "latencies": times,
        "percentiles": {str(p): float(np.percentile(times, p)) for p in PERCENTILES},
        "avg_ttft": float(np.mean(ttfts)) if ttfts else None,
        "output_tokens_per_second": batch_size * n * output_len / mean_s,
        "input_len": input_len, "output_len": output_len, "batch_size": batch_size, "n": n,
        **_drafts(llm, before),
    }  # fmt: skip


def throughput(
    llm: LLM, samples: Sequence[Sample], *, n: int = 1, seed: int = 0, use_tqdm: bool = False
) -> dict[str, Any]:
    """All prompts at once, as fast as they go. Units: requests and tokens, per second where the name says so."""
    default = max((s.output_len or 0 for s in samples), default=0) or 128
    params = [
        SamplingParams(n=n, temperature=1.0, max_tokens=s.output_len or default, ignore_eos=True, seed=seed + i)
        for i, s in enumerate(samples)
    ]
    prompts = [{"prompt_token_ids": s.prompt} if isinstance(s.prompt, list) else s.prompt for s in samples]
    before = acceptance_of(llm)
    began_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    took_s = time.perf_counter() - began_s
    failed = sum(o.error is not None for o in outputs)
    num_in = sum(len(o.prompt_token_ids) for o in outputs)
    num_out = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    cached = sum(o.num_cached_tokens for o in outputs)
    return {
        "elapsed_time": took_s,
        "num_requests": len(outputs),
        "failed": failed,
        "total_num_tokens": num_in + num_out,
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "requests_per_second": len(outputs) / took_s,
        "tokens_per_second": (num_in + num_out) / took_s,
        "output_tokens_per_second": num_out / took_s,
        "prefix_cache_hit_rate": cached / num_in if num_in else None,
        **_drafts(llm, before),
    }
