"""H15: a mixture on several processes, in both ways, as people use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
from penstock.config import serve_from_kwargs
from penstock.core.model_spec import weight_shapes
from penstock.families.qwen_moe import Qwen3Moe
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.api.test_ranks import native
from tests.api.watch import grown, scrape
from tests.unit.families.test_families import TINY, write_folder

LAYERS, NUM, TOP_K, E, WIDTH = 2, 5, 2, 256, 256
WAYS: list[dict[str, Any]] = [
    {}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}
]  # fmt: skip


def mixture(folder: Path) -> Path:
    """Qwen3-MoE, small, without a tokenizer."""
    config = TINY | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": E, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 600, "num_experts": NUM,
        "num_experts_per_tok": TOP_K, "moe_intermediate_size": WIDTH, "norm_topk_prob": True,
        "num_hidden_layers": LAYERS,
    }  # fmt: skip
    spec = Qwen3Moe().spec(config)
    rng, names = np.random.default_rng(7), Qwen3Moe().weight_map(spec)
    tensors = {
        str(names[name]): rng.standard_normal(shape, dtype=np.float32) * np.float32(0.08 if len(shape) > 1 else 1.0)
        for name, shape in weight_shapes(spec).items()
    }
    return write_folder(folder, config, tensors)


def said(folder: Path, **settings: Any) -> tuple[list[Any], str]:
    """Tokens and log-probabilities, and where the packed weights came from."""
    params = [
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, detokenize=False),
        SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, logprobs=2, detokenize=False),
    ]
    prompts = [{"prompt_token_ids": [5 + i * 7 % 500 for i in range(length)]} for length in (4, 33)]
    llm = LLM(folder, ops="native", threads=1, skip_tokenizer_init=True, **settings)
    try:
        outputs = llm.generate(prompts, params)
    finally:
        llm.engine.core.executor.close()
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs], llm.engine.core.executor.packed_file


@native
@pytest.mark.parametrize("quantization", ["none", "int8-w8a8"])
def test_H15_processes_share_experts_out_in_both_ways_with_the_same_tokens(tmp_path: Path, quantization: str) -> None:
    folder = mixture(tmp_path / "m")
    alone, *shared = [said(folder, quantization=quantization, **way)[0] for way in WAYS]
    assert shared == [alone, alone]


@native
def test_H15_ranks_keep_their_experts_for_the_next_start_each_way_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    folder = mixture(tmp_path / "m")
    found = [said(folder, weight_memory_bytes=1 << 28, **way) for way in (*WAYS, *WAYS)]
    assert [packed for _, packed in found] == ["made"] * 3 + ["read"] * 3
    assert all(tokens == found[0][0] for tokens, _ in found)


@native
@pytest.mark.parametrize("way", WAYS[1:], ids=["by outputs", "whole"])
def test_H15_a_server_counts_what_experts_exchange(tmp_path: Path, way: dict[str, Any]) -> None:
    """A prompt of one token and four more, all by themselves: five steps of one row, which rank 1 combines."""
    config = serve_from_kwargs(
        model=str(mixture(tmp_path / "m")), port=0, ops="native", threads=1, max_model_len=64,
        skip_tokenizer_init=True, num_gpu_blocks_override=64, served_model_name="m", **way,
    )  # fmt: skip
    with LiveServer(config) as live:
        before = scrape(live.url)
        body = {"model": "m", "prompt": [7], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(live.url + "/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        more = grown(before, scrape(live.url))
    steps = 5
    # What attention gave and what it adds, of each layer; logits of 600, which are enough for two.
    exchanges, row = steps * (2 * LAYERS + 1), steps * 4 * (LAYERS * (4 * 32 + E) + 600)
    if "enable_expert_parallel" in way:
        assert more["penstock:rank_exchanges_total"] <= exchanges + steps * 2 * LAYERS
        least = row + steps * 4 * LAYERS * E  # the combined row; and of two results those that were rank 0's
        assert least <= more["penstock:rank_bytes_total"] <= least + steps * 4 * LAYERS * TOP_K * E
        assert (more["penstock:rank_bytes_total"] - least) % (4 * E) == 0
    else:
        assert more["penstock:rank_exchanges_total"] == exchanges + steps * 2 * LAYERS
        assert more["penstock:rank_bytes_total"] == row + steps * 4 * LAYERS * (TOP_K * WIDTH + E)


@native
def test_H15_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel: this model has no experts; leave it away"):
        LLM(bundled(), tensor_parallel_size=2, enable_expert_parallel=True)
