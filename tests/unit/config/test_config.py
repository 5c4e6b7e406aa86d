"""Settings: every way in, every refusal, and what their messages say."""

from __future__ import annotations

import argparse
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.config import (
    SECTIONS,
    SERVER_SETTINGS,
    SETTINGS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    add_arguments,
    foreign,
    from_args,
    from_kwargs,
    from_toml,
    serve_from_kwargs,
)
from penstock.config.environment import parse_size
from penstock.config.foreign import ALIASES, FOREIGN


def refused(**kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_kwargs(**({"model": "m"} | kwargs))
    assert caught.value.field in (*kwargs, "num_gpu_blocks_override")
    return str(caught.value)


def parse(*words: str, positional: bool = False) -> EngineConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_arguments(parser, model_positional=positional)
    return from_args(parser.parse_args(list(words)), {})


# --- the settings themselves


def test_defaults_are_the_documented_ones() -> None:
    assert from_kwargs(model="m").as_kwargs() == {
        "model": "m", "revision": None, "tokenizer": None, "dtype": "auto", "max_model_len": None,
        "rope_scaling": None, "rope_theta": None, "skip_tokenizer_init": False, "seed": 0,
        "generation_config": "auto", "repetition_detection": None, "prompt_compressor": "pico", "block_size": 32,
        "kv_cache_memory_bytes": None,
        "num_gpu_blocks_override": None,
        "gpu_memory_utilization": None, "enable_prefix_caching": True, "prefix_cache": "radix", "eviction": "lru",
        "kv_cache_dtype": "auto", "kv_rotation": "none", "kv_selector": "none", "kv_budget": "25%",
        "kv_selector_config": None,
        "slot_checkpoint_tokens": 512, "slot_checkpoint_rule": "distance",
        "scheduling_policy": "fcfs", "length_predictor": None, "max_num_seqs": None,
        "max_num_batched_tokens": None, "enable_chunked_prefill": True, "long_prefill_token_threshold": 0,
        "kv_allocator": "paged", "module_chunk_tokens": 0, "module_recompute": 0.0, "kv_layer_tpot": None,
        "kv_layer_rows": 0, "swap_space": 0.0, "preemption_mode": "auto",
        "ops": "auto", "device": "auto", "tensor_parallel_size": 1, "data_parallel_size": 1, "max_replicas": None,
        "data_parallel_size_local": None, "data_parallel_start_rank": None, "data_parallel_address": "127.0.0.1",
        "data_parallel_rpc_port": 29550,
        "tensor_parallel_sums": False, "distributed_executor_backend": "mp",
        "enable_expert_parallel": False,
        "nnodes": 1, "node_rank": 0, "master_addr": "127.0.0.1", "master_port": 29501, "ranks_secret_file": None,
        "context_parallel_size": 1, "context_parallel_reduce": "flat", "context_parallel_placement": "round",
        "pipeline_parallel_size": 1, "pipeline_microbatches": None,
        "swap_tier": "host", "pause_mode": "auto",
        "threads": None, "quantization": "none", "activation_quantization": "int8", "packed_weights": "auto",
        "memory_bytes": None, "offload_rates": "auto", "weight_memory_bytes": None, "weight_prefetch": 1,
        "enforce_eager": False, "cudagraph_capture_sizes": "auto", "batch_invariant": False,
        "cascade_attention": True, "expert_memory_bytes": None, "expert_eviction": "lru", "expert_prediction": "none",
        "enable_lora": False, "max_loras": 8, "max_lora_rank": 64, "max_cpu_loras": None, "lora_memory": None,
        "finetune_root": None, "finetune_share": 0.05,
        "lora_merge_threshold": None,
        "attention_backend": "ref", "executor": "inproc", "depth": 1, "grammar_cache_bytes": 64 << 20,
        "enable_hierarchical_cache": False, "kv_offload": "none", "kv_offload_format": "plain",
        "kv_load_policy": "auto", "kv_fetch_ahead": 0.25, "warm_grammars": False, "kv_offload_eviction": "lru",
        "kv_offload_secret_file": None, "kv_pin_share": 0.1, "kv_events_config": None,
        "offline_policy": "fcfs", "offline_step_ms": 100.0, "offline_slowdown": 0.1,
        "schedule_conservativeness": 1.0, "speculative_config": None, "log_file": None, "plugin": None,
        "simulated_device": None, "preset": None, "tuned_for": None, "decode_step_ms": 100.0, "adaptive": False,
            "adaptive_slo": "ttft=1,tpot=0.1", "adaptive_knobs": "all",
    }  # fmt: skip


def test_every_field_has_help_and_a_name_of_its_own() -> None:
    fields = [f for section in SECTIONS.values() for f in dataclasses.fields(section)]
    assert len({f.name for f in fields}) == len(fields) == len(SETTINGS)
    for item in SETTINGS.values():
        assert item.help.endswith("."), item.name
        assert len(item.help) < 250


def test_sections_are_frozen_and_check_themselves() -> None:
    cache = CacheConfig(block_size=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.block_size = 8  # type: ignore[misc]
    with pytest.raises(ConfigError, match="block_size: must be at least 1, not 0"):
        CacheConfig(block_size=0)
    assert EngineConfig(model=ModelConfig(model="m")) == from_kwargs(model="m")
    assert hash(from_kwargs(model="m")) == hash(from_kwargs(model="m"))


# --- keyword arguments


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("block_size", True, "must be an integer, not True (bool)"),
        ("block_size", 1.0, "must be an integer, not 1.0 (float)"),
        ("block_size", "32", "must be an integer, not '32' (str)"),
        ("block_size", None, "must be an integer, not None"),
        ("block_size", -1, "must be at least 1, not -1"),
        ("max_model_len", 0, "must be at least 1, not 0"),
        ("seed", -1, "must be at least 0, not -1"),
        ("seed", 2**64, f"must be at most {2**64 - 1}, not {2**64}"),
        ("gpu_memory_utilization", 0, "must be above 0.0, not 0.0"),
        ("gpu_memory_utilization", 1.1, "must be at most 1.0, not 1.1"),
        ("gpu_memory_utilization", float("nan"), "must be a number, not nan (float)"),
        ("gpu_memory_utilization", True, "must be a number, not True (bool)"),
        ("enable_prefix_caching", 1, "must be true or false, not 1 (int)"),
        ("enable_prefix_caching", "yes", "must be true or false, not 'yes' (str)"),
        ("dtype", "fp9", "must be one of auto, float32, float16, bfloat16, not 'fp9'"),
        (
            "kv_cache_dtype",
            "int5",
            "must be one of auto, bfloat16, float16, float32, int2, int4, int8, kivi4, kivi2 or "
            'a JSON object, not "int5"',
        ),
        ("kv_rotation", "random", "must be one of none, hadamard, not 'random'"),
        ("eviction", "", "must not be empty"),
        ("eviction", 3, "must be a text, not 3 (int)"),
        ("depth", 0, "must be at least 1, not 0"),
        ("long_prefill_token_threshold", -5, "must be at least 0, not -5"),
    ],
)
def test_types_and_ranges(name: str, value: Any, text: str) -> None:
    assert refused(**{name: value}) == f"{name}: {text}"


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match="model: is missing") as caught:
        from_kwargs(block_size=16)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("blok_size", "block_size"),
        ("max_num_seq", "max_num_seqs"),
        ("max-model-len", "max_model_len"),
        ("Dtype", "dtype"),
        ("prefix_caching", "prefix_cache"),
    ],
)
def test_a_typo_gets_the_closest_name(typo: str, meant: str) -> None:
    assert refused(**{typo: 1}) == f"{typo}: unknown setting; did you mean {meant}?"


def test_a_name_like_no_other_gets_the_list() -> None:
    text = refused(zzz=1)
    assert all(name in text for name in SETTINGS)


def test_paths_and_other_spellings_of_dtypes() -> None:
    class TorchDtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    config = from_kwargs(model=Path("a") / "b", dtype="half", kv_cache_dtype=TorchDtype())
    assert config.model.model == str(Path("a") / "b")
    assert (config.model.dtype, config.cache.kv_cache_dtype) == ("float16", "bfloat16")


def test_two_sizes_of_kv_memory_contradict() -> None:
    text = refused(kv_cache_memory_bytes=4096, num_gpu_blocks_override=7)
    assert text.startswith("num_gpu_blocks_override: 7 contradicts kv_cache_memory_bytes 4096")


# --- names of other engines


def harmful(name: str) -> Any:
    """A value that asks for what is not there: the opposite of a switch's harmless one, or a name nobody has."""
    found = FOREIGN[name]
    return (found.harmless[-1] is not True) if found.switch else "something else"


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_foreign_settings_are_refused_or_left_unused_with_one_sentence(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = FOREIGN[name]
    if found.unused:
        assert from_kwargs(model="m", **{name: harmful(name)}) == from_kwargs(model="m")
        assert caplog.messages == [f"{name} has no effect: {found.why}"]
    else:
        assert refused(**{name: harmful(name)}) == f"{name}: {found.why}"
    caplog.clear()
    for value in found.harmless:
        assert from_kwargs(model="m", **{name: value}) == from_kwargs(model="m")
    assert not caplog.messages
    assert name not in SETTINGS | SERVER_SETTINGS


def test_one_is_not_true() -> None:
    refused(tensor_parallel_size=True)
    refused(trust_remote_code=1)


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_names_that_mean_the_same_are_taken_with_a_word(name: str, caplog: pytest.LogCaptureFixture) -> None:
    alias = ALIASES[name]
    item = (SETTINGS | SERVER_SETTINGS)[alias.ours]
    given: Any = {bool: True, int: 7, float: 7.5, str: "word"}[item.kind]
    given = {"cudagraph_capture_sizes": "1,2"}.get(alias.ours, given)
    meant = not given if alias.opposite else given
    base: dict[str, Any] = {} if alias.ours == "model" else {"model": "m"}
    base |= {"data_parallel_size": 7} if alias.ours == "data_parallel_size_local" else {}
    assert serve_from_kwargs(**base, **{name: given}) == serve_from_kwargs(**base, **{alias.ours: meant})
    assert caplog.messages == [f"{name} is taken for {alias.ours} {meant}"]
    for value in alias.unset:
        assert serve_from_kwargs(**base, **{name: value}) == serve_from_kwargs(**base)
    with pytest.raises(ConfigError, match=f"is another engine's name for {alias.ours}, which is given, too"):
        serve_from_kwargs(**base | {alias.ours: meant, name: given})
    assert name not in SETTINGS | SERVER_SETTINGS | FOREIGN


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in foreign.VALUES for value in foreign.VALUES[name]]
)
def test_values_of_other_engines_are_refused_by_name(name: str, value: str) -> None:
    text = serve_refused(**{name: value.upper()})
    assert text == f"{name}: {value.upper()} is another engine's: {foreign.VALUES[name][value]}"


def serve_refused(**kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        serve_from_kwargs(model="m", **kwargs)
    return str(caught.value)


FINGERS = """
--calculate-kv-scales --enforce-eager --tensor-parallel-size=1 -tp=1 -ngl=99 -c=512 -np=4 -t=2 -fa=on -ub=512 --mlock
--enable-prefix-caching --no-enable-prefix-caching --gpu-memory-utilization=0.5 --max-model-len=4K --jinja
--disable-log-requests --async-scheduling --prefix-caching-hash-algo=sha256 --context-length=512 --disable-cuda-graph
--max-running-requests=4 --page-size=16 --schedule-policy=lpm --skip-server-warmup --numa=distribute --no-mmap
--trust-remote-code --kv-cache-dtype=fp8 --mem-fraction-static=0.8 --chunked-prefill-size=2048 -ctk=q8_0 -md=draft
--lora=x.gguf --num-shard=2 --max-total-tokens=4096 --max-input-length=1024 --max-batch-prefill-tokens=4096 -b=2048
--speculative-algorithm=EAGLE --quantization=awq --attention-backend=flashinfer --hf-overrides={} --mmproj=x.gguf
--enable-lora --cpu-offload-gb=0 --disaggregation-mode=prefill --hicache-size=30 --cache-ram=8192 --keepalive=5m
--swap-space=1 --kv-transfer-config={} --middleware=x --load-format=auto --download-dir=/x --hf-token=x -sm=row
--spec-method=ngram --limit-mm-per-prompt={} --max-loras=2 --disable-radix-cache --radix-eviction-policy=lfu
"""
"""What people type who come from vLLM, SGLang, llama.cpp, TGI and Ollama (FEATURES section 2)."""


@pytest.mark.parametrize("word", FINGERS.split())
def test_no_flag_of_another_engine_is_unknown(word: str) -> None:
    """It is taken, left unused with a word, or refused by a sentence that says what to do."""
    flag, _, value = word.partition("=")
    said = ""
    try:
        parse("--model", "m", flag, *([value] if value else []))
    except ConfigError as error:
        said = str(error)
    label, _, why = said.partition(": ")
    sentences = {found.why for found in FOREIGN.values()}
    assert not said or (label.startswith("--") and (why in sentences or "is another engine's" in why))


# --- TOML


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "engine.toml"
    path.write_text(text)
    return path


def test_toml_and_its_precedence(tmp_path: Path) -> None:
    path = write(
        tmp_path, '[model]\nmodel = "m"\ndtype = "bf16"\n[cache]\nblock_size = 16\n[scheduler]\nmax_num_seqs=4\n'
    )
    config = from_toml(path, block_size=64)
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (64, 4), "argument > file > default"
    assert config.model.dtype == "bfloat16"
    flags = parse("--config", str(path), "--max-num-seqs", "9")
    assert (flags.cache.block_size, flags.scheduler.max_num_seqs, flags.execution.depth) == (16, 9, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cache]\nblock_size = 0", "[cache] block_size: must be at least 1, not 0"),
        ("[cache]\nblock_size = true", "[cache] block_size: must be an integer, not True (bool)"),
        ("[cache]\nblocksize = 1", "[cache] blocksize: unknown setting; did you mean block_size?"),
        ("[cache]\nmax_num_seqs = 1", "[cache] max_num_seqs: belongs into the table [scheduler]"),
        ("[cache]\nbest_of = 4", f"[cache] best_of: {FOREIGN['best_of'].why}"),
        ("[cash]\nblock_size = 1", "[cash]: unknown table; did you mean cache?"),
        ("[zzz]\na = 1", "[zzz]: unknown table; the tables are [model], [cache], [scheduler], [execution]"),
        ("block_size = 16", "block_size: belongs into the table [cache]"),
        ('model = "m"', "model: must be a table; write [model] above its settings"),
        ("[[cache]]\nblock_size = 1", "cache: must be a table; write [cache] above its settings"),
        ("[cache", "is not TOML: "),
    ],
)
def test_toml_errors_name_the_place(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        from_toml(path, model="m")
    assert str(caught.value).startswith(f"{path}: {message}")


def test_toml_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        from_toml(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'[model]\nmodel = "\xff"\n')
    with pytest.raises(ConfigError, match="is not TOML"):
        from_toml(tmp_path / "latin.toml")


# --- command line


def test_every_setting_has_a_flag_with_help() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = io.StringIO()
    parser.print_help(out)
    for item in SETTINGS.values():
        assert item.flag in out.getvalue()
    assert "best-of" not in out.getvalue(), "refused names stay out of the help"


def test_flags_are_read() -> None:
    config = parse(
        "--model", "m", "--block-size", "16", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "4K",
        "--gpu-memory-utilization", "0.5", "--dtype", "half", "-tp", "1", "--swap-space", "0", "--no-enable-lora",
        "-c", "512",
    )  # fmt: skip
    assert config == from_kwargs(
        model="m", block_size=16, enable_prefix_caching=False, kv_cache_memory_bytes=4096, gpu_memory_utilization=0.5,
        dtype="float16", max_model_len=512,
    )  # fmt: skip


def test_the_model_may_be_positional() -> None:
    assert parse("m", positional=True).model.model == "m"
    assert parse("--model", "m", positional=True).model.model == "m"
    assert parse("m", "--model", "m", positional=True).model.model == "m"
    with pytest.raises(ConfigError, match="two models are given: a and --model b"):
        parse("a", "--model", "b", positional=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block-size", "0"], "--block-size: must be at least 1, not 0"),
        (["--dtype", "fp9"], "--dtype: must be one of"),
        (["--prefill-context-parallel-size", "2"], "--prefill-context-parallel-size: running one model on"),
        (["--trust-remote-code"], "--trust-remote-code: Penstock never runs code"),
        (["--context-length", "0"], "--context-length: must be at least 1, not 0"),
        (["-c", "9", "--max-model-len", "8"], "--ctx-size: is another engine's name for max_model_len, which is given"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype: fp8 is another engine's: 8-bit floats aren't"),
    ],
)
def test_flag_errors_are_written_as_the_flag(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--model", "m", *words)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("1.5K", 1536), ("2g", 2 * 10**9), ("3GiB", 3 * 1024**3),
     ("1MB", 1024**2), ("1T", 1024**4), ("-3", -3)],
)  # fmt: skip
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1x", "1.0001k", "0x10", "1 2", "٣k"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        parse_size(text)


# --- properties

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "tokenizer": st.sampled_from(["m", "some/folder"]),
    "dtype": st.sampled_from(["auto", "float32", "float16", "bfloat16"]),
    "max_model_len": st.integers(1, 10**9),
    "seed": st.integers(0, 2**64 - 1),
    "block_size": st.integers(1, 4096),
    "kv_cache_memory_bytes": st.integers(1, 2**60),
    "gpu_memory_utilization": st.floats(0.01, 1.0),
    "enable_prefix_caching": st.booleans(),
    "scheduling_policy": st.sampled_from(["fcfs", "other"]),
    "max_num_seqs": st.integers(1, 10**6),
    "enable_chunked_prefill": st.booleans(),
}


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_kwargs_and_flags_agree(kwargs: dict[str, Any]) -> None:
    config = from_kwargs(model="m", **kwargs)
    assert from_kwargs(**config.as_kwargs()) == config
    words: list[str] = []
    for name, value in kwargs.items():
        flag = SETTINGS[name].flag
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    assert parse("--model", "m", *words) == config


ANYTHING = st.none() | st.booleans() | st.integers() | st.text("ab ", max_size=3) | st.floats() | st.lists(st.none())


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SETTINGS)), ANYTHING, max_size=4))
def test_any_value_is_taken_or_refused_by_name(kwargs: dict[str, Any]) -> None:
    try:
        config = from_kwargs(**({"model": "m"} | kwargs))
    except ConfigError as caught:
        error: ConfigError | None = caught
    else:
        error = None
        assert all(config.as_kwargs()[name] == value for name, value in kwargs.items())
    assert error is None or (error.field in kwargs and str(error).startswith(f"{error.field}: "))


# --- a server's settings


def test_a_server_has_settings_of_its_own_beside_the_engines(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nmodel = "m"\n[cache]\nblock_size = 16\n[server]\nport = 9000\nhost = "::1"\n')
    config = serve_from_kwargs(config=str(path), port=9001)
    assert (config.server.port, config.server.host, config.engine.cache.block_size) == (9001, "::1", 16)
    assert from_toml(path).cache.block_size == 16  # the same file serves `penstock run`, which has no port
    with pytest.raises(ConfigError, match="port: unknown setting"):
        from_kwargs(model="m", port=9000)


def test_what_is_wrong_in_the_server_table_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, '[model]\nmodel = "m"\n[server]\nport = 70000\n')
    with pytest.raises(ConfigError, match=r"\[server\] port: must be at most 65535"):
        serve_from_kwargs(config=str(path))
    with pytest.raises(ConfigError, match="did you mean max_num_queued_reqs"):
        serve_from_kwargs(model="m", max_num_queued_req=3)


def test_lists_are_written_with_commas() -> None:
    config = serve_from_kwargs(model="m", served_model_name="a, b,")
    assert config.server.names("served_model_name") == ["a", "b"]
    assert config.server.names("api_key") == []
