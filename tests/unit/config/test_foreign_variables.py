"""Environment variables of other engines: told in one line, never obeyed in silence."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

import pytest

from penstock.config import SERVING, add_arguments, serve_from_args
from penstock.config.foreign import ENVIRONMENT
from penstock.config.foreign_variables import PREFIXES, VARIABLES, instead, seen


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_what_is_advised_exists(name: str) -> None:
    said = instead(name, SERVING)
    flags = set(re.findall(r"--[a-z][a-z-]+", said)) - {"--log-level"}
    assert flags <= {item.flag for item in SERVING.values()}
    assert name in seen({name: "x"}, SERVING)


def test_one_that_is_called_like_a_flag_is_meant_as_that() -> None:
    assert instead("LLAMA_ARG_CTX_SIZE", SERVING) == "use --max-model-len or PENSTOCK_MAX_MODEL_LEN"
    assert instead("VLLM_ATTENTION_BACKEND", SERVING) == "use --attention-backend or PENSTOCK_ATTENTION_BACKEND"
    assert "main memory" in instead("LLAMA_ARG_N_GPU_LAYERS", SERVING)
    assert "always formed anew" in instead("LLAMA_ARG_NO_CONT_BATCHING", SERVING)
    off = "use --no-enable-prefix-caching or PENSTOCK_ENABLE_PREFIX_CACHING=false"
    assert instead("LLAMA_ARG_NO_CACHE_PROMPT", SERVING) == off
    assert instead("SGLANG_DISABLE_RADIX_CACHE", SERVING) == off
    assert instead("SGLANG_SOMETHING", SERVING) == "nothing here is set by it"


def test_the_line_has_names_and_no_values() -> None:
    environment = {
        "PATH": "/bin", "OLLAMA_HOST": "secret:1", "VLLM_API_KEY": "secret", "LLAMA_ARG_PORT": "", "OLLAMA_X": "secret",
    }  # fmt: skip
    assert seen(environment, SERVING) == (
        "variables of other engines are set; VLLM_API_KEY is taken for --api-key; not read: OLLAMA_HOST (use --host or "
        "PENSTOCK_HOST and --port or PENSTOCK_PORT), OLLAMA_X (nothing here is set by it)"
    )
    assert seen({"VLLM_API_KEY": "a", "PENSTOCK_API_KEY": "b"}, SERVING) == ""
    assert seen({"PATH": "/bin", "OLLAMAX": "1"}, SERVING) == ""
    many = seen({f"SGLANG_{n:02d}": "1" for n in range(20)}, SERVING)
    assert many.endswith("SGLANG_11 (nothing here is set by it) and 8 more")


def test_what_kubernetes_sets_is_passed_over() -> None:
    names = ("VLLM_SERVICE_HOST", "OLLAMA_SERVICE_PORT_HTTP", "VLLM_PORT_8000_TCP", "SGLANG_PORT_80_TCP_ADDR")
    assert seen(dict.fromkeys(names, "10.0.0.1") | {"VLLM_PORT": "tcp://10.0.0.1:8000"}, SERVING) == ""
    assert "VLLM_PORT" in seen({"VLLM_PORT": "8000"}, SERVING)


def test_nothing_but_what_is_said_to_be_is_obeyed() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, server=True)
    args = parser.parse_args(["--model", "nano"])
    guesses = {f"{prefix}{name.upper()}": "7" for prefix in PREFIXES for name in SERVING}
    switches = {name: "1" for name, own in ENVIRONMENT.items() if SERVING[own].kind is bool}
    theirs = {**guesses, **dict.fromkeys(VARIABLES, "7"), **switches}
    plain = serve_from_args(args, {})
    obeyed = {name for name, value in theirs.items() if serve_from_args(args, {name: value}) != plain}
    assert obeyed == set(ENVIRONMENT)


def test_a_server_says_so_when_it_starts() -> None:
    command = [sys.executable, "-m", "penstock", "serve", "nano", "--explain"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(PREFIXES)}
    for more, count in (({}, 0), ({"OLLAMA_HOST": "h:1", "LLAMA_ARG_THREADS": "2"}, 1)):
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, check=True, timeout=60)
        lines = [line for line in done.stderr.splitlines() if "other engines" in line]
        assert len(lines) == count
        assert all("OLLAMA_HOST (use --host" in line and "LLAMA_ARG_THREADS (use --threads" in line for line in lines)
