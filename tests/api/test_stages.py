"""H03: one model in stages, as people use it: `LLM` and a server, with what may go together, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import LLM
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.launch.build import plan_of
from penstock.launch.bundled import bundled_model
from tests.api.conftest import bundled
from tests.api.test_ranks import native, said, with_adapters
from tests.api.watch import grown, scrape, small

COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two ranks in each": {"tensor_parallel_size": 2},
    "prompts in pieces": {"max_num_batched_tokens": 7, "block_size": 4, "pipeline_microbatches": 3},
    "8-bit keys and values": {"kv_cache_dtype": "int8", "pipeline_microbatches": 2},
    "weights of 4 bits": {"quantization": "int4-wo"},
    "weights and rows of 8 bits": {"quantization": "int8-w8a8", "pipeline_microbatches": 4},
    "suffix drafts": {
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 4}, "pipeline_microbatches": 3,
    },
    "a draft model": {
        "speculative_config": {
            "method": "draft-model", "model": str(bundled_model("pico")), "num_speculative_tokens": 4, "tree": "k-ary",
            "controller": "fixed",
        },
        "pipeline_microbatches": 2,
    },
    "a tight pool, swapped": {"num_gpu_blocks_override": 24, "block_size": 4, "swap_space": 0.1, "max_model_len": 64},
    "cached blocks go to the host": {
        "num_gpu_blocks_override": 24, "block_size": 4, "swap_space": 0.1, "max_model_len": 64,
        "enable_hierarchical_cache": True,
    },
    "two steps in flight": {"depth": 2, "max_num_batched_tokens": 16, "pipeline_microbatches": 2},
    "hash, prefill first": {"prefix_cache": "hash", "scheduling_policy": "prefill-first"},
}  # fmt: skip
OURS = ("pipeline_microbatches", "tensor_parallel_size")


@native
@pytest.mark.parametrize("name", COMBINATIONS)
def test_H03_whatever_is_switched_on_the_tokens_are_those_of_one_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    settings = COMBINATIONS[name]
    alone = said(**{key: value for key, value in settings.items() if key not in OURS})
    assert said(**settings, pipeline_parallel_size=2) == alone


@native
def test_H03_three_and_six_stages_too() -> None:
    alone = said()
    for size in (3, 6):
        assert said(pipeline_parallel_size=size) == alone, size


@native
def test_H03_rows_with_adapters_have_their_tokens_on_stages_too(tmp_path: Path) -> None:
    hows = [{"pipeline_parallel_size": size, "pipeline_microbatches": 3} for size in (1, 2)]
    alone, staged = with_adapters(tmp_path, *hows)
    assert staged == alone


@native
def test_H03_a_server_says_the_same_and_counts_what_stages_give_each_other() -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    answers = []
    for size in (1, 2):
        with small(ops="native", pipeline_parallel_size=size, threads=1, engine_in_process=True) as live:
            before = scrape(live.url)
            answer = httpx.post(live.url + "/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200
            answers.append(answer.json()["choices"])
            more = grown(before, scrape(live.url))
    assert answers[0] == answers[1]
    steps = 5  # a piece through the channel, hidden states to all, logits of all
    assert more["penstock:rank_exchanges_total"] == 3 * steps
    row = 4 * (192 + 192 + 4096)
    assert steps * row < more["penstock:rank_bytes_total"] < steps * row + 20 * 4 * 192
    seconds = more["penstock:prefill_seconds_total"] + more["penstock:decode_seconds_total"]
    assert 0 < more["penstock:rank_wait_seconds_total"] < 2 * seconds


@native
def test_H03_each_stage_has_its_layers_keys_and_values_and_the_plan_says_so() -> None:
    machine = Machine(num_cores=4, memory_bytes=8 << 30, available_bytes=8 << 30)
    alone, three = (
        plan_of(
            from_kwargs(model=bundled(), ops="native", num_gpu_blocks_override=64, pipeline_parallel_size=n), machine
        )
        for n in (1, 3)
    )
    assert three.kv_bytes * 3 == alone.kv_bytes
    assert three.stages == (0, 2, 4, 6)
    assert alone.stages == ()
    (decision,) = (d for d in three.decisions if d.name == "pipeline_parallel_size")
    assert decision.value == 3
    assert "layers 0 to 1, 2 to 3, 4 to 5" in decision.why
    assert "pipeline_parallel_size" not in {d.name for d in alone.decisions}


STAGES = {"pipeline_parallel_size": 2}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pipeline_parallel_size": 7}, "a model of 6 layers falls into 6 stages at most, not 7; use at most 6"),
    ({**STAGES, "ops": "ref"}, "pipeline_parallel_size: only native kernels run on several ranks"),
    ({**STAGES, "tensor_parallel_size": 4}, "4 ranks cannot share out 6 attention heads"),
    ({**STAGES, "kv_offload": "disk:/tmp/x,1GiB"}, "kv_offload: it does not go together with pipeline_parallel_size 2"),
    ({**STAGES, "kv_selector": "snapkv", "kv_budget": "50%"}, "kv_selector: it does not go together"),
    ({**STAGES, "weight_memory_bytes": 3_300_000}, "weight_memory_bytes: it does not go together"),
    ({**STAGES, "packed_weights": "streamed"}, "packed_weights: it does not go together"),
    ({**STAGES, "speculative_config": {"method": "self-draft"}}, "speculative_config: it does not go together"),
    ({"pipeline_parallel_size": 33, "tensor_parallel_size": 2}, "33 stages of 2 ranks are more than 64 ranks"),
]


@native
@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_what_cannot_be_cut_is_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(bundled(), **settings)
    assert words in str(caught.value)
    assert str(caught.value).count("\n") == 0
