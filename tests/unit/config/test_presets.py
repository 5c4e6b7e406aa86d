"""Presets: settings that users' own beat, that contradict each other in one sentence, and that change no token."""

from __future__ import annotations

import pytest

from penstock import SamplingParams
from penstock.base.errors import ConfigError
from penstock.cli.bench_presets import COLUMNS as SHOWN
from penstock.cli.bench_presets import page
from penstock.cli.features import COLUMNS, chosen, columns_of, notes_of
from penstock.config.engine import SETTINGS, EngineConfig
from penstock.config.load import from_kwargs
from penstock.config.presets import PARALLEL, PRESETS, preset_settings
from penstock.launch.llm import LLM

PROMPTS = ["The captain of the ship said to his men that " * times for times in (1, 3, 7, 2)]


def of(name: str, **more: object) -> EngineConfig:
    return from_kwargs(model="nano", preset=name, **more)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_settings_that_exist_and_the_users_own_beat_it(name: str) -> None:
    made = of(name)
    values = made.as_kwargs()
    for setting, value in PRESETS[name].settings.items():
        assert values[setting] == value
    assert from_kwargs(**values) == made
    assert of(name, block_size=8).cache.block_size == 8
    assert set(PRESETS[name].asks) <= set(SETTINGS)
    assert set(PRESETS[name].survey) <= {*COLUMNS, "target"}


def test_of_two_presets_each_adds_its_own_unless_they_contradict_each_other() -> None:
    assert of("deepspeed-inference,fastertransformer").scheduler.scheduling_policy == "static"
    with pytest.raises(ConfigError, match="preset: orca has kv_allocator contiguous and lightllm has paged; give one"):
        of("orca,lightllm", scheduling_policy="fcfs")
    both = of("orca, lightllm", scheduling_policy="fcfs", kv_allocator="paged", block_size=4)
    assert (both.cache.kv_allocator, both.cache.enable_prefix_caching) == ("paged", False)
    with pytest.raises(ConfigError, match="preset: 'vllm' is unknown; the presets are hf-generate, fastertransformer"):
        preset_settings("vllm")


def test_L01_to_L14_no_preset_changes_a_token() -> None:
    wanted = None
    for name in [None, *PRESETS]:
        llm = LLM("nano", max_model_len=512, kv_cache_memory_bytes=32 << 20, preset=name)
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        tokens = [output.outputs[0].token_ids for output in outputs]
        wanted = wanted or tokens
        assert tokens == wanted, name


def test_L20_columns_follow_the_settings() -> None:
    def tell(column: str, **settings: object) -> str:
        return columns_of(from_kwargs(model="nano", **settings))[column]

    assert tell("offload") == "no"
    assert tell("offload", swap_space=1.0, kv_offload="disk:/tmp/x") == "keys and values to host, blocks kept outside"
    assert tell("offload", weight_memory_bytes=1 << 30) == "weights to disk"
    assert tell("iteration") == "yes: fcfs"
    assert tell("iteration", scheduling_policy="static:size=4") == "no: static:size=4"
    assert tell("prefill", max_num_batched_tokens=64) == "in pieces, 64 tokens a step"
    assert tell("prefill", enable_chunked_prefill=False) == "whole prompts"
    assert tell("decode") == "paged attention, blocks of 32"
    assert tell("decode", block_size=1) == "token attention"
    assert tell("decode", kv_allocator="contiguous") == "contiguous attention"
    assert tell("decode", speculative_config={"method": "suffix"}) == "paged attention, blocks of 32, drafts by suffix"
    assert tell("reuse", enable_prefix_caching=False) == "no"
    assert tell("precision", quantization="int8-wo", kv_cache_dtype="int4") == "weights int8-wo, keys and values int4"
    assert tell("hardware", device="cuda") == "cuda, by auto"
    assert tell("language", device="cuda") == "Python, C++, Triton"
    assert tell("sequences", max_num_seqs=3) == "3"
    assert int(tell("models").removesuffix(" architectures")) > 100


@pytest.mark.parametrize("name", PRESETS)
def test_where_the_survey_says_yes_the_settings_do_or_a_note_says_what_is_lacking(name: str) -> None:
    columns, notes = columns_of(of(name)), " ".join(notes_of(name))
    for column, said in PRESETS[name].survey.items():
        if column == "iteration":
            assert columns[column].startswith(said)
        elif column in PARALLEL and said == "yes":
            absent = column in notes.partition("not yet switched on: ")[2]
            assert absent != (f"give {PARALLEL[column]}: over how many ranks" in notes)
            assert not absent
        elif column == "offload" and said == "yes":
            assert columns[column] != "no" or "nothing is offloaded without swap_space" in notes
        elif column == "offload":
            assert columns[column] == "no"


def test_L01_fastertransformer_is_static_batches_over_memory_set_aside() -> None:
    made = of("fastertransformer")
    assert (made.scheduler.scheduling_policy, made.cache.kv_allocator) == ("static", "contiguous")
    assert not made.cache.enable_prefix_caching
    assert not made.scheduler.enable_chunked_prefill


def test_L11_sglang_is_a_radix_tree_an_order_by_it_and_grammars_at_the_start() -> None:
    made = of("sglang")
    assert (made.cache.prefix_cache, made.cache.enable_prefix_caching) == ("radix", True)
    assert made.scheduler.scheduling_policy == "cache-aware"
    assert made.cache.warm_grammars


def test_L12_fastgen_splits_and_fuses_so_that_steps_are_alike() -> None:
    made = of("deepspeed-fastgen")
    assert made.scheduler.scheduling_policy == "splitfuse"
    assert made.scheduler.enable_chunked_prefill


def test_a_column_that_is_none_is_one_sentence() -> None:
    assert chosen("decode, reuse") == ["decode", "reuse"]
    with pytest.raises(ConfigError, match="--columns: 'decoding' is no column; did you mean decode\\?"):
        chosen("decoding")


def test_the_page_says_of_each_what_it_does_and_what_it_leaves_out() -> None:
    work = {"requests": 4, "input_len": 8, "output_len": 8, "rate": None}
    heads = ["first token", "per token", "tokens/s", "mean latency", "same tokens"]
    line = ["orca", *("x" for _ in SHOWN), "1; 1.00", "2; 1.00", "3; 1.00", "4; 1.00", "yes"]
    text = page(heads, [line], {"work": work, "rounds": 2, "machine": "M", "model": "nano"})
    assert "| orca | 1; 1.00 | 2; 1.00 | 3; 1.00 | 4; 1.00 | yes |" in text
    assert "`orca`: requests come and go at every step" in text
    assert "Give tensor_parallel_size: over how many ranks;" in text
    assert "Give pipeline_parallel_size: over how many ranks;" in text
