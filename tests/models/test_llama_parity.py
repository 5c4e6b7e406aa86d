"""Llama against transformers: tiny random checkpoints, logits and greedy text (catalogue rows A01, A02, C01, L18)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Norm, Rope
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


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Torch's threads wait for each other by spinning: on a busy machine they make tiny models ten times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def reference(case: str) -> LlamaForCausalLM:
    """A random model whose layers outweigh its embedding, so that greedy text is varied."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        attn_implementation="eager", **CASES[case],
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    torch.manual_seed(list(CASES).index(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(0.4 * noise)  # logits of deviation 2, as real models have; errors grow with them
            else:
                parameter.copy_(noise * 2 / parameter.shape[1] ** 0.5)
    return model


def spec_of(config: LlamaConfig) -> ModelSpec:
    told = dict(config.rope_parameters)
    rope = Rope(
        kind=told["rope_type"], theta=told["rope_theta"], dim=config.head_dim, factor=told.get("factor", 1.0),
        low_freq_factor=told.get("low_freq_factor", 1.0), high_freq_factor=told.get("high_freq_factor", 4.0),
        original_max_position=told.get("original_max_position_embeddings", 8192),
    )  # fmt: skip
    mixer = Attention(
        num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
        rope=rope, qkv_bias=config.attention_bias, o_bias=config.attention_bias,
    )  # fmt: skip
    norm = Norm(eps=config.rms_norm_eps)
    ffn = FeedForward(width=config.intermediate_size, bias=config.mlp_bias)
    return ModelSpec(
        family="llama", vocab_size=config.vocab_size, hidden_size=config.hidden_size, final_norm=norm,
        layers=(Layer(mixer=mixer, ffn=ffn, norm=norm),) * config.num_hidden_layers,
        tie_embeddings=config.tie_word_embeddings, max_position=config.max_position_embeddings,
    )  # fmt: skip


PARTS = {
    "embed_tokens": "embed", "norm": "final_norm", "lm_head": "lm_head", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip


def weights_of(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """`model.layers.3.self_attn.q_proj.bias` -> `layers.3.q.bias`."""
    out = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        path = name.split(".")
        prefix = f"layers.{path[2]}." if "layers" in path else ""
        bias = ".bias" if path[-1] == "bias" else ""
        out[prefix + PARTS[path[-2]] + bias] = tensor.numpy().copy()
    return out


def paged_of(case: str, **options: Any) -> Paged:
    model = reference(case)
    return Paged(spec_of(model.config), weights_of(model), **{"num_slabs": 800, "block_size": 8, **options})


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
    naive = NaiveModel(spec_of(model.config), weights_of(model))
    assert naive.greedy(prompts[7], NEW_TOKENS) == want[7]
