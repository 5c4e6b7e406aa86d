"""H11, H12: sequences whose tokens several ranks share out, as people use it: processes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.launch.build import plan_of
from tests.api.conftest import bundled
from tests.api.test_ranks import PARAMS, PROMPTS, kept_on_disk, native
from tests.api.watch import grown, scrape, small
from tests.unit.families.test_families import TINY, tiny_tensors, write_folder

TIGHT = {"num_gpu_blocks_override": 24, "block_size": 6, "swap_space": 0.1, "max_model_len": 72}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {"block_size": 6},
    "prompts in pieces": {"max_num_batched_tokens": 7, "block_size": 6},
    "8-bit keys and values": {"kv_cache_dtype": "int8", "block_size": 12},
    "weights of 4 bits": {"quantization": "int4-wo", "block_size": 12},
    "the type of the file": {"dtype": "auto", "block_size": 12},
    "what was said drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, "block_size": 6},
    "a tight pool, swapped": TIGHT,
    "cached blocks go to the host": TIGHT | {"enable_hierarchical_cache": True},
    "two steps in flight": {"depth": 2, "max_num_batched_tokens": 16, "block_size": 6},
    "hash, prefill first": {"prefix_cache": "hash", "scheduling_policy": "prefill-first", "block_size": 6},
}

ROUNDED = {"8-bit keys and values": 0.1, "the type of the file": 0.01}


def said(**settings: Any) -> list[Any]:
    """Tokens and log-probabilities, twice: the second time with hits."""
    llm = LLM(bundled(), ops="native", threads=1, **{"max_model_len": 144, "dtype": "float32", **settings})
    try:
        outputs = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS, PARAMS)]
    finally:
        llm.engine.core.executor.close()
    return [o for output in outputs for o in output.outputs]


def compare(found: list[Any], alone: list[Any], to: float) -> None:
    assert [(o.token_ids, o.text, o.finish_reason) for o in found] == [
        (o.token_ids, o.text, o.finish_reason) for o in alone
    ]
    for a, b in zip(found, alone, strict=True):
        for step, other in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert {t: v.logprob for t, v in step.items()} == pytest.approx(
                {t: v.logprob for t, v in other.items()}, abs=to
            )


@native
@pytest.mark.parametrize("name", COMBINATIONS)
def test_H11_whatever_is_switched_on_the_tokens_are_those_of_one_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six heads, three of keys: two ranks have tokens of all of them. Logits differ by 1e-5; where keys and values are
    rounded, one that lies between two numbers may become the other of them."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    settings = COMBINATIONS[name]
    compare(said(**settings, context_parallel_size=2), said(**settings), ROUNDED.get(name, 1e-4))


@native
def test_H11_blocks_on_the_disk_are_a_ranks_own_tokens(tmp_path: Path) -> None:
    kept_on_disk(tmp_path, "context_parallel_size", 2)


@native
@pytest.mark.parametrize("reduce", ["flat", "tree"])
def test_H11_H12_four_processes_with_one_head_of_keys_have_the_logits_of_one(tmp_path: Path, reduce: str) -> None:
    """More ranks than heads of keys: by heads each rank would have all of the cache, by tokens it has a quarter."""
    wide = TINY | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 1,
                   "vocab_size": 600, "initializer_range": 0.02}  # fmt: skip
    tensors = {name: x * np.float32(0.05 if x.ndim > 1 else 1.0) for name, x in tiny_tensors(wide).items()}
    folder = write_folder(tmp_path / "m", wide, tensors)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, detokenize=False)
    found, held = [], []
    for how in ({}, {"tensor_parallel_size": 4}, {"context_parallel_size": 4, "context_parallel_reduce": reduce}):
        llm = LLM(
            folder, ops="native", threads=1, skip_tokenizer_init=True, num_gpu_blocks_override=16, **how
        )  # fmt: skip
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 300, 41, 7, 7, 12]}], params)
        held.append(llm.engine.plan.kv_bytes)
        llm.engine.core.executor.close()
        found.append([{k: v.logprob for k, v in step.items()} for step in output.outputs[0].logprobs])
    for step, other in zip(found[0], found[2], strict=True):
        assert step == pytest.approx(other, abs=1e-5)
    assert found[1] == found[0]
    assert held[2] * 4 == held[1] == held[0]


@native
def test_what_ranks_give_each_other_is_counted() -> None:
    with small(ops="native", context_parallel_size=2, threads=1, engine_in_process=True) as live:
        before = scrape(live.url)
        body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert httpx.post(live.url + "/v1/completions", json=body, timeout=60).status_code == 200
        more = grown(before, scrape(live.url))
    assert more["penstock:rank_exchanges_total"] > 0
    assert more["penstock:rank_exchanges_total"] % 5 == 0, "as many in each of five steps"


HOMES: dict[str, dict[str, Any]] = {
    "a tight pool, prompts in pieces, two steps in flight": {
        "num_gpu_blocks_override": 24, "block_size": 6, "max_model_len": 72, "depth": 2, "max_num_batched_tokens": 7,
    },
    "8-bit keys and values": {"kv_cache_dtype": "int8", "block_size": 12},
    "what was said drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}, "block_size": 6},
}  # fmt: skip


@native
@pytest.mark.parametrize("name", HOMES)
def test_B17_blocks_of_homes_that_lend_have_the_tokens_of_one_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    settings = HOMES[name]
    placed = said(**settings, context_parallel_size=2, context_parallel_placement="home")
    compare(placed, said(**settings), ROUNDED.get(name, 1e-4))


@native
def test_B17_who_lends_and_who_borrows_is_shown() -> None:
    """Two ranks of eight blocks: a text of 100 tokens has its thirteen on both."""
    settings = {"context_parallel_size": 2, "context_parallel_placement": "home", "threads": 1, "block_size": 8,
                "num_gpu_blocks_override": 16, "max_model_len": 128, "engine_in_process": True}  # fmt: skip
    with small(ops="native", **settings) as live:
        before: dict[str, float] = {}
        while "penstock:rank_blocks{rank=1,which=total}" not in before:  # until the engine has said how it is
            before = scrape(live.url)
        assert before["penstock:rank_blocks{rank=1,which=total}"] == 8
        body = {"prompt": [5] * 60, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
        most = 0
        with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=60) as answer:
            for _ in answer.iter_lines():
                ranks = httpx.get(live.url + "/internal/state", timeout=30).json()["ranks"]
                assert sum(rank["lent"] for rank in ranks) == sum(rank["borrowed"] for rank in ranks)
                most = max(most, ranks[1]["lent"])
        more = grown(before, scrape(live.url))
    assert 0 < most <= 5
    assert more["penstock:borrowed_blocks_total"] == 5


@native
def test_each_rank_has_its_share_of_every_block_and_the_plan_says_so() -> None:
    machine = Machine(num_cores=4, memory_bytes=8 << 30, available_bytes=8 << 30)
    alone, two = (
        plan_of(
            from_kwargs(model=bundled(), ops="native", num_gpu_blocks_override=64, context_parallel_size=n), machine
        )
        for n in (1, 2)
    )
    assert two.kv_bytes * 2 == alone.kv_bytes
    assert two.kv_capacity_tokens == alone.kv_capacity_tokens
    (decision,) = (d for d in two.decisions if d.name == "tensor_parallel_size")
    assert decision.value == 2
    assert "each rank keeps 1 of 2 tokens of 6 layers" in decision.why


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tensor_parallel_size": 3}, "context_parallel_size: tokens are shared out over all ranks, and there are 3"),
    ({"context_parallel_size": 3}, "block_size: 32 tokens cannot be shared out evenly over 3 ranks; use 30 or 33"),
    ({"context_parallel_size": 6, "block_size": 4}, "cannot be shared out evenly over 6 ranks; use 6"),
    ({"context_parallel_size": 4}, "4 ranks cannot share out 6 attention heads evenly; use 3 or 6"),
    ({"ops": "ref"}, "tensor_parallel_size: only native kernels run on several ranks"),
    ({"kv_selector": "snapkv"}, "kv_selector: snapkv chooses among all tokens"),
    ({"kv_rotation": "hadamard"}, "kv_rotation: hadamard turns keys where they are read"),
    ({"kv_cache_dtype": {"dtype": "kivi2", "recent": 6}}, "native kernels"),
    ({"speculative_config": {"method": "suffix"}}, "suffix drafts trees"),
    ({"kv_offload_format": "cachegen", "kv_offload": "disk:/tmp/x,1GiB"}, "kv_offload_format: cachegen codes whole"),
    ({"context_parallel_reduce": "ring"}, "context_parallel_reduce"),
    ({"context_parallel_placement": "away"}, "context_parallel_placement"),
    ({"context_parallel_placement": "home", "preemption_mode": "swap"}, "preemption_mode: blocks leave the ranks"),
]


@native
@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_what_needs_all_tokens_is_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(bundled(), **{"context_parallel_size": 2, **settings})
    assert words in str(caught.value)
    assert str(caught.value).count("\n") == 0
