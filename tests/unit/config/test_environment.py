"""Settings from environment variables: every one, what beats what, and what is said of those that cannot be meant."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.config import SERVING, add_arguments, from_kwargs, given_by, serve_from_args, serve_from_kwargs
from penstock.config.environment import OTHERS
from penstock.launch.llm import LLM

ROOT = Path(__file__).resolve().parents[3]

OTHER_VALUES: dict[str, Any] = {
    "preset": "orca",
    "keep_alive": "9m",
    "speculative_config": {"method": "ngram"}, "kv_cache_dtype": "int8", "kv_selector": "streaming", "kv_budget": "64",
    "kv_selector_config": {"sinks": 4}, "kv_events_config": {"enable_kv_cache_events": True},
    "rope_scaling": {"factor": 2.0, "rope_type": "linear"}, "seed": 5,
    "gpu_memory_utilization": 0.25, "threads": 3, "port": 9000, "probe_port": 9001,
    "cudagraph_capture_sizes": "1,8", "data_parallel_size_local": 1,
}  # fmt: skip
"""Where no value that is made up would do."""


def other(name: str) -> Any:
    """A value of the setting that is not its default."""
    item = SERVING[name]
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if item.choices is not None:
        return next(choice for choice in item.choices if choice != item.default)
    if item.kind is bool:
        return not item.default
    if item.kind is str:
        return "word"
    if item.maximum is not None:
        return item.kind(item.maximum)
    return item.kind(max(2048, (item.default or 0) + 1, item.minimum or 0))


def text_of(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)


def config(environment: dict[str, str], *words: str) -> Any:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, server=True)
    return serve_from_args(parser.parse_args(list(words)), environment)


@pytest.mark.parametrize("name", sorted(SERVING))
def test_every_setting_has_a_variable(name: str) -> None:
    value = other(name)
    base = {} if name == "model" else {"PENSTOCK_MODEL": "m"}
    if name == "kv_selector_config":
        base["PENSTOCK_KV_SELECTOR"] = "streaming"
    settings = {key.removeprefix("PENSTOCK_").lower(): given for key, given in base.items()}
    expected = serve_from_kwargs(**settings, **{name: value})
    assert config({**base, "PENSTOCK_" + name.upper(): text_of(value)}) == expected
    if name != "model":
        assert config(base) != expected


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "engine.toml"
    file.write_text(
        '[model]\nmodel = "m"\n[cache]\nblock_size = 16\n[scheduler]\nmax_num_seqs = 5\n[server]\nport = 1\n'
    )
    variables = {"PENSTOCK_BLOCK_SIZE": "64", "PENSTOCK_PORT": "2", "PENSTOCK_MAX_NUM_SEQS": "6"}
    found = config(variables, "--config", str(file), "--port", "3")
    assert (found.server.port, found.engine.cache.block_size) == (3, 64)
    found = config({}, "--config", str(file))
    assert (found.server.port, found.engine.cache.block_size, found.engine.execution.depth) == (1, 16, 1)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--config", str(file), "--max-num-seqs", "7"])
    origins = {name: item.origin for name, item in given_by(args, environment=variables).items()}
    assert origins == {
        "model": f"{file}: [model] model", "block_size": "PENSTOCK_BLOCK_SIZE", "max_num_seqs": "--max-num-seqs",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_switches(text: str) -> None:
    assert config({"PENSTOCK_MODEL": "m", "PENSTOCK_STRICT": text}).server.strict is True
    off = {"1": "0", "true": "false", "YES": "No", "on": "off"}[text]
    assert (
        config({"PENSTOCK_MODEL": "m", "PENSTOCK_ENABLE_PREFIX_CACHING": off}).engine.cache.enable_prefix_caching
        is False
    )


def test_an_empty_variable_is_not_set_and_sizes_have_suffixes() -> None:
    found = config({"PENSTOCK_MODEL": "m", "PENSTOCK_UDS": "", "PENSTOCK_KV_CACHE_MEMORY_BYTES": "4K"})
    assert (found.server.uds, found.engine.cache.kv_cache_memory_bytes) == (None, 4096)


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("PENSTOCK_BLOCK_SIZE", "0", "must be at least 1, not 0"),
        ("PENSTOCK_BLOCK_SIZE", "many", "'many' is not an integer"),
        ("PENSTOCK_SWAP_SPACE", "much", "'much' is not a number"),
        ("PENSTOCK_STRICT", "maybe", "must be true or false (1, 0, yes, no, on, off), not 'maybe'"),
        ("PENSTOCK_KV_CACHE_DTYPE", "fp8", "fp8 is another engine's: 8-bit floats"),
        ("PENSTOCK_PREFILL_CONTEXT_PARALLEL_SIZE", "2", "running one model on several devices"),
        ("PENSTOCK_TRUST_REMOTE_CODE", "1", "Penstock never runs code"),
        ("PENSTOCK_CONTEXT_LENGTH", "x", "'x' is not an integer"),
    ],
)
def test_a_wrong_value_is_said_of_the_variable(variable: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config({"PENSTOCK_MODEL": "m", variable: text})
    assert str(caught.value).startswith(f"{variable}: {says}")


def test_names_of_other_engines_are_taken_too(caplog: pytest.LogCaptureFixture) -> None:
    found = config({"PENSTOCK_MODEL_PATH": "m", "PENSTOCK_CONTEXT_LENGTH": "9", "PENSTOCK_ENFORCE_EAGER": "true"})
    assert (found.engine.model.model, found.engine.model.max_model_len) == ("m", 9)
    assert "PENSTOCK_CONTEXT_LENGTH is taken for max_model_len 9" in caplog.messages


def test_a_variable_that_nobody_reads_is_told_with_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    config({"PENSTOCK_MODEL": "m", "PENSTOCK_BLOK_SIZE": "3", "PENSTOCK_CPU_ISA": "avx2", "HOME": "/x"})
    assert caplog.messages == ["PENSTOCK_BLOK_SIZE is set, and nothing reads it; did you mean PENSTOCK_BLOCK_SIZE?"]


def test_what_kubernetes_sets_for_a_service_called_penstock_is_no_setting(caplog: pytest.LogCaptureFixture) -> None:
    """Every container of the namespace gets these, the port in the form of an address."""
    links = {
        "PENSTOCK_PORT": "tcp://10.0.0.7:8000", "PENSTOCK_SERVICE_HOST": "10.0.0.7", "PENSTOCK_SERVICE_PORT": "8000",
        "PENSTOCK_SERVICE_PORT_HTTP": "8000", "PENSTOCK_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.7",
    }  # fmt: skip
    assert config({"PENSTOCK_MODEL": "m"} | links).server.port == 8000
    assert len(caplog.messages) == 1
    assert "Kubernetes" in caplog.messages[0]


def test_a_command_without_a_server_leaves_a_servers_variables_alone(caplog: pytest.LogCaptureFixture) -> None:
    variables = {"PENSTOCK_PORT": "tcp:", "PENSTOCK_API_KEY": "secret"}
    assert given_by(argparse.Namespace(model="m"), environment=variables).keys() == {"model"}
    assert not caplog.messages


def test_keys_are_taken_from_the_environment_and_never_shown() -> None:
    assert config({"PENSTOCK_MODEL": "m", "VLLM_API_KEY": "theirs"}).server.api_key == "theirs"
    both = {
        "PENSTOCK_MODEL": "m",
        "VLLM_API_KEY": "theirs",
        "PENSTOCK_API_KEY": "ours",
        "PENSTOCK_ADMIN_API_KEY": "top",
    }
    found = config(both)
    assert (found.server.api_key, found.server.admin_api_key) == ("ours", "top")
    assert not any(word in repr(found) for word in ("ours", "top"))
    with pytest.raises(ConfigError) as caught:
        serve_from_kwargs(model="m", api_key=12345)
    assert "12345" not in str(caught.value)


def test_a_library_call_reads_the_environment_that_it_is_given_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_BLOCK_SIZE", "64")
    assert from_kwargs(model="m").cache.block_size == 32
    assert from_kwargs({"PENSTOCK_BLOCK_SIZE": "16"}, model="m").cache.block_size == 16
    assert from_kwargs({"PENSTOCK_BLOCK_SIZE": "16"}, model="m", block_size=8).cache.block_size == 8


def test_every_variable_that_is_read_is_known() -> None:
    """A new one that is no setting gets a line in `OTHERS`, or whoever sets it is told that nothing reads it."""
    known = {*OTHERS, *(item.variable for item in SERVING.values())}
    read = set()
    for folder in ("src", "tests", "tools", "benchmarks"):
        for file in [*(ROOT / folder).rglob("*.py"), ROOT / "setup.py"]:
            text = file.read_text("utf-8")
            if "environ" in text or "getenv" in text or "setenv" in text:
                read |= set(re.findall(r'"(PENSTOCK_[A-Z_]+)"', text)) if file.name != "test_environment.py" else set()
    assert len(read) > 8, "nothing was found"
    assert read <= known


def test_a_model_in_ones_own_program_has_the_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_MODEL_LEN", "64")
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "9")
    llm = LLM("nano", max_num_seqs=2)
    assert (llm.engine.limits.max_model_len, llm.engine.core.scheduler.max_num_seqs) == (64, 2)
