"""Whose blocks can be written as hidden states (`plan.hidden`)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.config import from_kwargs
from penstock.plan.hidden import hidden_decision
from tests import specs


def decided(name: str, kv_dtype: str = "float32", **more: Any) -> Any:
    config = from_kwargs(model="(test)", **({"kv_offload": "disk:/tmp/x", "kv_offload_format": "hidden"} | more))
    return hidden_decision(config, specs.make(name)[0], kv_dtype)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("windowed", "all keep keys and values of all of their context, unlike layer 0"),
        ("latent", "all keep keys and values of all of their context, unlike layer 0"),
        ("slots", "all keep keys and values of all of their context, unlike layer 0"),
        ("yoco", "all keep keys and values of all of their context, unlike layer"),
        ("gated", "as many heads of keys and values, and this one's differ"),
        ("llama_gqa", "would write 128 bytes per token and layer, and keys and values are 128"),
        ("llama_mqa", "would write 128 bytes per token and layer, and keys and values are 64"),
    ],
)
def test_what_cannot_be_done_or_saves_nothing_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_offload_format: hidden .*{why}.*; use plain or cachegen"):
        decided(name)


def test_it_is_for_the_cpu_and_for_types_that_are_numbers() -> None:
    with pytest.raises(ConfigError, match="is for the CPU, and device is cuda"):
        decided("llama_mha", device="cuda")
    with pytest.raises(ConfigError, match="and kv_cache_dtype is int4"):
        decided("llama_mha", "int4")


def test_without_a_store_it_means_nothing() -> None:
    assert decided("windowed", kv_offload="none") is None
    assert decided("windowed", kv_offload_format="plain") is None
    assert decided("llama_mha", "bfloat16").value == "hidden"
