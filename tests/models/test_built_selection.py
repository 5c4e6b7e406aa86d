"""What selectors promise, on a model that was built to need one token, for clones without a trained one.

Its only head looks at token 0 unless that is gone; the value of token 0 is nothing, and everybody else's drowns the
right answer (catalogue rows F01, F03, F04). What a trained model does of its own accord is in test_smollm2.py.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock import LLM, SamplingParams

VOCAB, HIDDEN, HEAD = 48, 64, 8
ALL, FIRST, NOISE = 48, 49, 50  # components of the residual: of every token, of token 0, what values add
SLOW = 3  # the pair (3, 7) of a head turns by a millionth of a radian per position
BUDGET, TOKENS = 32, 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def zeros(rows: int, columns: int) -> np.ndarray:
        return np.zeros((rows, columns), np.float32)

    embed, head = zeros(VOCAB, HIDDEN), zeros(VOCAB, HIDDEN)
    q, k, v, o = zeros(HEAD, HIDDEN), zeros(HEAD, HIDDEN), zeros(HEAD, HIDDEN), zeros(HIDDEN, HEAD)
    for token in range(VOCAB):
        embed[token, token] = embed[token, ALL] = 1.0
        head[1 + token % (VOCAB - 1), token] = 2.0  # 1, 2, ... 47, 1, ...
    embed[0, FIRST] = 1.0
    q[SLOW, ALL], k[SLOW, FIRST] = 1.0, 2.0
    v[0, ALL], v[0, FIRST] = 1.0, -1.0
    o[NOISE, 0], head[7, NOISE] = 1.0, 4.0
    layer = "model.layers.0."
    out = tmp_path_factory.mktemp("sink")
    tensors = {
        "model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": np.ones(HIDDEN, np.float32),
        layer + "self_attn.q_proj.weight": q, layer + "self_attn.k_proj.weight": k,
        layer + "self_attn.v_proj.weight": v, layer + "self_attn.o_proj.weight": o,
        layer + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
        layer + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        layer + "mlp.gate_proj.weight": zeros(8, HIDDEN), layer + "mlp.up_proj.weight": zeros(8, HIDDEN),
        layer + "mlp.down_proj.weight": zeros(HIDDEN, 8),
    }  # fmt: skip
    save_file(tensors, out / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": HEAD, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e8,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        "torch_dtype": "float32",
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    return out


@cache
def nats(folder: Path, selector: str | None, at: int = 0, budget: str = str(BUDGET), cut: int = 8) -> list[float]:
    """-ln p of every token of a text but the first. Token 0 stands at place `at`; a cut every `cut`."""
    more = {}
    if selector is not None:
        asked = json.dumps({"prompt_interval": cut, "interval": cut, "recent": 4})
        more = {"kv_selector": selector, "kv_budget": budget, "kv_selector_config": asked}
    llm = LLM(
        str(folder), ops="ref", max_num_seqs=1, skip_tokenizer_init=True, enable_prefix_caching=False,
        kv_cache_memory_bytes=4 << 20, **more,
    )  # fmt: skip
    ids = [1 + n % (VOCAB - 1) for n in range(TOKENS)]
    ids[at:] = [0, *ids[: TOKENS - at - 1]]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = llm.generate([{"prompt_token_ids": ids}], params)[0].prompt_logprobs
    llm.engine.core.executor.close()
    return [-entry[token].logprob for token, entry in zip(ids[1:], found[1:], strict=True)]


def perplexity(losses: list[float]) -> float:
    return math.exp(math.fsum(losses) / len(losses))


def test_F01_ten_windows_on_only_the_window_without_sinks_runs_away(folder: Path) -> None:
    full, streaming, window = (nats(folder, name) for name in (None, "streaming", "window"))
    filled = BUDGET - 1
    assert max(abs(a - b) for a, b in zip(full[:filled], streaming[:filled], strict=True)) < 1e-6, "nothing is dropped"
    last = slice(10 * BUDGET, None)
    assert len(full[last]) > BUDGET
    assert perplexity(streaming[last]) == pytest.approx(perplexity(full[last]), rel=1e-3)
    assert perplexity(streaming[last]) < 1.05
    assert perplexity(window[last]) > 10


@pytest.mark.parametrize("selector", ["h2o", "scissorhands"])
def test_F03_F04_a_fifth_holds_the_token_that_all_look_at_and_a_window_or_chance_does_not(
    folder: Path, selector: str
) -> None:
    at, budget, last = 20, "20%", slice(TOKENS // 2, None)
    full, kept = nats(folder, None, at), nats(folder, selector, at, budget, 64)
    assert perplexity(kept[last]) == pytest.approx(perplexity(full[last]), rel=1e-2)
    for baseline in ("window", "random"):
        assert perplexity(nats(folder, baseline, at, budget, 64)[last]) > 10, baseline
