"""H01: one model on several ranks, as people use it: `LLM`, with what may go together, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock import LLM, LoRARequest, SamplingParams
from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.core.machine import Machine
from penstock.core.sampling import StructuredOutputs
from penstock.launch.build import plan_of
from penstock.ops.native.library import best_library
from tests.adapting import nano, nano_folder
from tests.api.conftest import bundled
from tests.api.watch import grown, scrape, small
from tests.unit.families.test_families import TINY, tiny_tensors, write_folder

native = pytest.mark.skipif(best_library() is None, reason="no native library was built: no C++17 compiler")
PROMPTS = ["Once upon a time", "The dog said that", "Once upon a time there was a cat. The cat"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=3),
    SamplingParams(temperature=1.1, seed=7, top_p=0.9, max_tokens=20, n=2, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=1,
                   structured_outputs=StructuredOutputs(regex="[a-m ]{8,}")),
]  # fmt: skip
COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompts in pieces": {"max_num_batched_tokens": 7, "block_size": 4},
    "8-bit keys and values": {"kv_cache_dtype": "int8"},
    "weights of 8 bits": {"quantization": "int8-w8a8"},
    "weights of 4 bits": {"quantization": "int4-wo"},
    "suffix drafts": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
    "layers skipped by drafts": {"speculative_config": {"method": "self-draft", "num_speculative_tokens": 2}},
    "heads choose": {"kv_selector": "snapkv", "kv_budget": "50%"},
    "pages chosen": {"kv_selector": "quest", "kv_budget": "50%"},
    "a tight pool, swapped": {"num_gpu_blocks_override": 24, "block_size": 4, "swap_space": 0.1, "max_model_len": 64},
    "cached blocks go to the host": {
        "num_gpu_blocks_override": 24,
        "block_size": 4,
        "swap_space": 0.1,
        "max_model_len": 64,
        "enable_hierarchical_cache": True,
    },
    "weights read from the disk": {"weight_memory_bytes": 3_300_000},
    "two steps in flight": {"depth": 2, "max_num_batched_tokens": 16},
    "hash, prefill first": {"prefix_cache": "hash", "scheduling_policy": "prefill-first"},
}


BOTH = ("plain", "weights of 4 bits", "suffix drafts")


def said(**settings: Any) -> list[Any]:
    llm = LLM(bundled(), ops="native", threads=1, **{"max_model_len": 128, **settings})
    try:
        outputs = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS, PARAMS)]  # the second time with hits
    finally:
        llm.engine.core.executor.close()
    return [(o.token_ids, o.text, o.logprobs, o.finish_reason) for output in outputs for o in output.outputs]


@native
@pytest.mark.parametrize("name", COMBINATIONS)
def test_H01_whatever_is_switched_on_the_tokens_are_those_of_one_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks have all three heads of keys each; three ranks one, where nothing but attention looks at them."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    settings = COMBINATIONS[name]
    alone = said(**settings)
    for size in (2, 3) if name in BOTH else (3,):
        assert said(**settings, tensor_parallel_size=size) == alone, size


def with_adapters(folder: Path, *hows: dict[str, Any]) -> list[Any]:
    """By settings: tokens and log-probabilities of a prompt without an adapter, and with each of three made ones."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for i in range(3):
        nano_folder(folder / str(i), i, targets=targets)
    asked = [None, *(LoRARequest(f"a{i}", i + 1, str(folder / str(i))) for i in range(3))]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
    found = []
    for how in hows:
        llm = LLM(
            nano(), ops="native", threads=1, max_model_len=128, enable_lora=True, max_loras=2, max_cpu_loras=2,
            lora_memory=1.0, **how,
        )  # fmt: skip
        outputs = llm.generate([PROMPTS[0]] * 4, params, lora_request=asked)
        llm.engine.core.executor.close()
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert len({tuple(ids) for ids, _ in found[0]}) > 2, "adapters change something"
    return found


def kept_on_disk(folder: Path, setting: str, size: int) -> None:
    """One rank, then `size` of them twice: the same tokens, and the second engine has what the first one wrote."""
    prompt = "Once upon a time there was a little girl named Lily. She loved to play outside in the park. " * 3
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found, hits = [], []
    for n in (1, size, size):
        llm = LLM(
            bundled(), ops="native", threads=1, max_model_len=128, block_size=8, kv_load_policy="wait",
            kv_offload=f"disk:{folder / f'kv{n}'},1GiB", **{setting: n},
        )  # fmt: skip
        (output,) = llm.generate([prompt], params)
        found.append(output.outputs[0].token_ids)
        hits.append(output.num_cached_tokens)
        for _ in range(20):  # what waits is written
            llm.generate(["x"], SamplingParams(max_tokens=1))
        llm.engine.core.executor.close()
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert hits[:2] == [0, 0]
    assert hits[2] > 40


@native
@pytest.mark.parametrize("quantization", ["none", "int8-wo"])
def test_rows_with_adapters_have_their_tokens_on_ranks_too(tmp_path: Path, quantization: str) -> None:
    hows = [{"quantization": quantization, "tensor_parallel_size": size} for size in (1, 2, 3)]
    alone, *ranked = with_adapters(tmp_path, *hows)
    assert ranked == [alone, alone]


@native
def test_blocks_on_the_disk_are_a_ranks_own_and_outlive_it(tmp_path: Path) -> None:
    kept_on_disk(tmp_path, "tensor_parallel_size", 3)
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["kv1", "kv3", "kv3.rank1of3", "kv3.rank2of3"]


@native
def test_what_ranks_give_each_other_is_counted() -> None:
    with small(ops="native", tensor_parallel_size=3, threads=1, engine_in_process=True) as live:
        before = scrape(live.url)
        body = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        assert httpx.post(live.url + "/v1/completions", json=body, timeout=60).status_code == 200
        more = grown(before, scrape(live.url))
    # What attention gave and activations; products with fewer than 128 outputs a rank run whole. Logits besides.
    layers, steps = 6, 5
    assert more["penstock:rank_exchanges_total"] == steps * (2 * layers + 1)
    row = 4 * 2 * (layers * (192 + 512) + 4096)  # bytes, to two others
    assert steps * row < more["penstock:rank_bytes_total"] < (steps + 10) * row


@native
def test_more_ranks_share_out_heads_of_keys_too() -> None:
    alone = said()
    for size in (3, 6):
        assert said(tensor_parallel_size=size) == alone, size


@native
def test_H01_one_two_and_four_processes_have_the_same_logits_and_sums_nearly(tmp_path: Path) -> None:
    """A model whose every product is shared out, also among four."""
    wide = TINY | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
                   "vocab_size": 600, "initializer_range": 0.02}  # fmt: skip
    tensors = {name: x * np.float32(0.05 if x.ndim > 1 else 1.0) for name, x in tiny_tensors(wide).items()}
    folder = write_folder(tmp_path / "m", wide, tensors)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, detokenize=False)
    found: dict[tuple[int, bool], Any] = {}
    for size, sums in ((1, False), (2, False), (4, False), (2, True), (4, True)):
        llm = LLM(
            folder, ops="native", threads=1, skip_tokenizer_init=True, tensor_parallel_size=size,
            tensor_parallel_sums=sums,
        )  # fmt: skip
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 300, 41]}], params)
        llm.engine.core.executor.close()
        found[size, sums] = [{k: v.logprob for k, v in step.items()} for step in output.outputs[0].logprobs]
    assert found[2, False] == found[1, False]
    assert found[4, False] == found[1, False]
    for size in (2, 4):
        for step, other in zip(found[1, False], found[size, True], strict=True):
            assert step == pytest.approx(other, abs=1e-4)
        assert found[size, True] != found[1, False], "sums have other bits"


@native
def test_each_rank_has_its_heads_of_keys_and_values_and_the_plan_says_so() -> None:
    machine = Machine(num_cores=4, memory_bytes=8 << 30, available_bytes=8 << 30)
    alone, three = (
        plan_of(from_kwargs(model=bundled(), ops="native", num_gpu_blocks_override=64, tensor_parallel_size=n), machine)
        for n in (1, 3)
    )
    assert three.kv_bytes * 3 == alone.kv_bytes
    (decision,) = (d for d in three.decisions if d.name == "tensor_parallel_size")
    assert decision.value == 3
    assert "each rank keeps its own heads of" in decision.why
    assert "tensor_parallel_size" not in {d.name for d in alone.decisions}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"tensor_parallel_size": 4},
        "tensor_parallel_size: 4 ranks cannot share out 6 attention heads evenly; use 3 or 6",
    ),
    ({"tensor_parallel_size": 16}, "16 ranks cannot share out 6 attention heads evenly; use 6"),
    ({"tensor_parallel_size": 2, "ops": "ref"}, "tensor_parallel_size: only native kernels run on several ranks"),
    ({"tensor_parallel_size": 2, "kv_offload": "remote:127.0.0.1:9"}, "kv_offload: it does not go together"),
    (
        {"tensor_parallel_size": 2, "enable_lora": True, "tensor_parallel_sums": True},
        "ranks would have sums of parts",
    ),
    ({"tensor_parallel_size": 2, "finetune_root": "/tmp"}, "finetune_root"),
    ({"tensor_parallel_size": 2, "tensor_parallel_sums": True, "quantization": "int8-wo"}, "is for plain weights"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size: must be at least 1"),
]


@native
@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_what_cannot_be_shared_out_is_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(bundled(), **settings)
    assert words in str(caught.value)
    assert str(caught.value).count("\n") == 0
