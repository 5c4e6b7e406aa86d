"""Row E01 through the engine: what rounded weights cost in perplexity and save in bytes, on the bundled model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock import LLM, SamplingParams
from penstock.eval.sample import SAMPLE
from tests.native.running import pytestmark_native

pytestmark = pytestmark_native
ROW, ROWS = 192, 3


def measured(quantization: str) -> tuple[float, int]:
    """(perplexity of the sample's first 573 tokens, each behind those of its row; bytes of the packed matrices)."""
    llm = LLM("nano", dtype="float32", quantization=quantization, max_model_len=ROW + 8)
    tokenizer: Any = llm.get_tokenizer()
    ids = tokenizer.encode(SAMPLE)
    texts = [[0, *ids[n * (ROW - 1) : (n + 1) * (ROW - 1)]] for n in range(ROWS)]
    outputs = llm.generate([{"prompt_token_ids": t} for t in texts], SamplingParams(max_tokens=1, prompt_logprobs=0))
    nats = []
    for text, output in zip(texts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, found in zip(text[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            nats.append(-found[token].logprob)
    assert len(nats) == ROWS * (ROW - 1)
    matrices = llm.engine.core.executor.runner._forward.matrices  # type: ignore[attr-defined]
    return math.exp(float(np.mean(nats))), sum(m.num_bytes for m in matrices.values())


def test_E01_8_bits_cost_less_than_half_a_percent_and_4_bits_more() -> None:
    """By the kernels that serve. 4 bits show that the text can tell."""
    plain, plain_bytes = measured("none")
    found = {name: measured(name) for name in ("int8-wo", "int8-w8a8", "int4-wo:32")}
    delta = {name: perplexity / plain - 1 for name, (perplexity, _) in found.items()}
    share = {name: num_bytes / plain_bytes for name, (_, num_bytes) in found.items()}
    print(
        "perplexity",
        round(plain, 2),
        {n: f"{d:+.2%}" for n, d in delta.items()},
        {n: f"{s:.3f}" for n, s in share.items()},
    )
    assert abs(delta["int8-wo"]) < 0.005
    assert abs(delta["int8-w8a8"]) < 0.005
    assert 0.01 < delta["int4-wo:32"] < 0.15
    assert 0.25 <= share["int8-wo"] < 0.27
    assert 4.5 / 32 <= share["int4-wo:32"] < 4.7 / 32
