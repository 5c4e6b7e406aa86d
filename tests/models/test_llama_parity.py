"""Llama against transformers: tiny random checkpoints, logits and greedy text (catalogue rows A01, A02, C01, L18)."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.core.model_spec import ModelSpec
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests.models.parity import vary
from tests.oracle import NaiveModel
from tests.paged import Paged

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {"num_key_value_heads": 2},
    "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "biased": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3_rope": {"num_key_value_heads": 2, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-6},
}
PROMPTS_PER_CASE = 20
NEW_TOKENS = 64


@cache
def reference(case: str) -> LlamaForCausalLM:
    """A random model whose layers outweigh its embedding, so that greedy text is varied."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        attn_implementation="eager", **CASES[case],
    )  # fmt: skip
    return vary(LlamaForCausalLM(config), list(CASES).index(case))


@cache
def loaded(case: str) -> tuple[ModelSpec, dict[str, Any]]:
    with TemporaryDirectory() as folder:
        reference(case).save_pretrained(folder)
        checkpoint = open_model(folder)
        return checkpoint.spec, load_weights(checkpoint, checkpoint.spec, "float32")


def paged_of(case: str, **options: Any) -> Paged:
    return Paged(*loaded(case), **{"num_slabs": 800, "block_size": 8, **options})


@pytest.mark.parametrize("attention", ["ref", "ref-online"])
@pytest.mark.parametrize("case", list(CASES))
def test_C01_logits_equal_transformers(case: str, attention: str) -> None:
    """In one go, in chunks and token by token; 150 tokens are beyond llama3's original 32 and several blocks long."""
    ids = np.random.default_rng(len(case)).integers(0, 97, 150).tolist()
    with torch.no_grad():
        want = reference(case)(torch.tensor([ids])).logits[0].numpy()
    assert want.std() > 1, "a flat model proves nothing"
    paged = paged_of(case, attention=attention)
    one_go = paged.one_go("one go", ids)
    np.testing.assert_allclose(one_go, want, atol=1e-4)
    np.testing.assert_array_equal(paged.chunked("chunks", ids, [7, 64, 1, 30]), one_go)
    np.testing.assert_array_equal(paged.chunked("decode", ids, [110, 1]), one_go)


@pytest.mark.parametrize("case", list(CASES))
def test_A02_decode_equals_transformers_with_its_cache(case: str) -> None:
    ids = np.random.default_rng(9).integers(0, 97, 80).tolist()
    model, paged = reference(case), paged_of(case)
    got = paged.one_go("a", ids[:60])[-1:]
    with torch.no_grad():
        out = model(torch.tensor([ids[:60]]), use_cache=True)
        for i in range(60, 80):
            np.testing.assert_allclose(got[0], out.logits[0, -1].numpy(), atol=1e-4)
            got = paged.one_go("a", ids[i : i + 1])
            out = model(torch.tensor([ids[i : i + 1]]), past_key_values=out.past_key_values, use_cache=True)
    np.testing.assert_allclose(got[0], out.logits[0, -1].numpy(), atol=1e-4)


@pytest.mark.parametrize("case", list(CASES))
def test_A01_L18_greedy_text_equals_generate(case: str) -> None:
    """64 tokens after 20 prompts per case, 120 in all. Ours run as one ragged batch; generate gets equal lengths."""
    rng = np.random.default_rng([18, list(CASES).index(case)])
    model = reference(case)
    prompts: dict[int, list[int]] = {}
    want: dict[int, list[int]] = {}
    for length in (1, 9, 40, 70):
        batch = rng.integers(0, 97, (PROMPTS_PER_CASE // 4, length))
        with torch.no_grad():
            out = model.generate(
                torch.tensor(batch), attention_mask=torch.ones(batch.shape, dtype=torch.long), do_sample=False,
                max_new_tokens=NEW_TOKENS,
            )  # fmt: skip
        for ids, text in zip(batch.tolist(), out[:, length:].tolist(), strict=True):
            want[len(prompts)] = text
            prompts[len(prompts)] = ids
    assert len(prompts) == PROMPTS_PER_CASE
    assert len(prompts) * len(CASES) >= 100
    got = paged_of(case).greedy(prompts, NEW_TOKENS)
    assert got == want
    assert sum(len(set(text)) >= 8 for text in got.values()) > PROMPTS_PER_CASE // 2
    naive = NaiveModel(*loaded(case))
    assert naive.greedy(prompts[7], NEW_TOKENS) == want[7]
