"""Several models behind one server: what each has of its own, and how long one stays that nobody asks for."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ConfigError

NOT_SHARED = frozenset(
    (
        "model", "revision", "tokenizer", "quantization", "max_model_len", "rope_scaling", "rope_theta",
        "kv_cache_memory_bytes", "num_gpu_blocks_override", "gpu_memory_utilization", "kv_offload", "kv_selector",
        "kv_selector_config", "kv_budget", "kv_events_config", "speculative_config", "weight_memory_bytes",
        "expert_memory_bytes", "enable_lora", "served_model_name", "lora_modules", "chat_template",
        "tool_call_parser", "reasoning_parser", "fault",
    )
)  # fmt: skip
"""Settings of the first model that say nothing about the others; all else is theirs, too, unless they say otherwise."""
OF_A_MODEL = frozenset(
    (
        "served_model_name", "lora_modules", "lora_root", "chat_template", "tool_call_parser", "reasoning_parser",
        "tool_prompt", "bare_tool_calls", "enable_auto_tool_choice", "max_logprobs", "max_logprob_entries",
        "max_num_queued_reqs", "max_num_queued_tokens", "max_queue_wait", "ttft_slo", "tpot_slo",
        "request_timeout", "max_n", "max_prompts", "qoe_ttft_s", "qoe_tds",
        "max_restarts_per_minute", "watchdog_timeout", "keep_alive", "fault",
    )
)  # fmt: skip
"""Settings of [server] that a table [models.NAME] may have."""
KEEP_ALIVE = "5m"
"""By default, of servers with several models; that of Ollama."""
_NAME = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)
_NAMED = re.compile(r"([\w.:/@+-]{1,128})=(.+)", re.ASCII | re.DOTALL)
_SPAN = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def named(text: str) -> tuple[str, str] | None:
    """(name, path) of NAME=PATH; None for anything else, such as a path with a = in it."""
    found = None if os.path.exists(text) else _NAMED.fullmatch(text)
    return None if found is None else (found[1], found[2])


def check_name(name: str, where: str) -> None:
    """Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: {name[:80]!r} cannot name a model; use 1 to 128 letters, digits and . _ - : / @ +",
            field="models",
        )


def add_named(tables: dict[str, Mapping[str, Any]], name: str, table: Mapping[str, Any], where: str) -> None:
    """Mutates `tables`. Raises ConfigError for a name that is there, or is none."""
    check_name(name, where)
    if name in tables:
        raise ConfigError(f"{where}: two models are called {name}; give one of them another name", field="models")
    tables[name] = table


def seconds_of(value: str | float) -> float:
    """Of a time to stay: seconds, "90s", "5m", "1h30m"; below zero: for ever. Raises ValueError, completing "NAME "."""
    text = str(value).strip().lower()
    if text.startswith("-"):
        seconds_of(text[1:])
        return math.inf
    found = _SPAN.fullmatch(text)
    if text and found is not None:
        return sum(float(part or 0) * size for part, size in zip(found.groups(), (3600, 60, 1), strict=True))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"must be seconds, a time such as 90s, 5m or 1h30m, or -1 (for ever), not {text[:40]!r}")
    return seconds
