"""Serving systems as the surveys compare them, as plain settings: the setting `preset`.

Source: the comparison table (table 2) of arXiv 2312.15234, of systems as they were in November 2023, and what Orca,
DeepSpeed-FastGen, SGLang, gpt-fast, llama.cpp and transformers say of themselves.
What a user sets beats a preset; nothing here changes a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.base.errors import ConfigError

_WHOLE: dict[str, Any] = {
    "kv_allocator": "contiguous",
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "cascade_attention": False,
}
"""A run of memory for the longest sequence, each prompt in one step, nothing kept for reuse."""
_REQUESTS = _WHOLE | {"scheduling_policy": "static"}
"""Besides, batches are formed of requests and run until their longest one ends."""
_PAGES: dict[str, Any] = _WHOLE | {"kv_allocator": "paged", "block_size": 16}
PARALLEL = {"tensor parallel": "tensor_parallel_size", "pipeline parallel": "pipeline_parallel_size"}
"""Column -> the setting that switches it on, which need not exist yet."""


@dataclass(frozen=True)
class Preset:
    """`survey`: what the table says of the system, by column. `asks`: settings that no preset can know, and why they
    are needed for the whole of it. `lacks`: what it had, beside what `survey` says, that Penstock has not."""

    what: str
    settings: Mapping[str, Any]
    survey: Mapping[str, str]
    asks: Mapping[str, str] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()


def _said(tensor: bool | None, pipeline: bool | None, offload: bool | None, iteration: bool | None, prefill: str,
          decode: str, target: str) -> dict[str, str]:  # fmt: skip
    flags = {"tensor parallel": tensor, "pipeline parallel": pipeline, "offload": offload, "iteration": iteration}
    found = {name: "yes" if value else "no" for name, value in flags.items() if value is not None}
    return found | {"prefill": prefill, "decode": decode, "target": target}


_DRAFTS = 'a small model that drafts: {"method": "specinfer", "model": "SMALL", "tree": "k-ary"}'
PRESETS: dict[str, Preset] = {
    "hf-generate": Preset(
        "one batch at a time, keys and values in one piece",
        _REQUESTS | {"kv_allocator": "contiguous-pow2"},
        {"iteration": "no", "target": "reference"},
    ),
    "fastertransformer": Preset(
        "batches of requests, memory for the longest answer set aside, fused decoding",
        _REQUESTS,
        _said(True, True, False, False, "cuBLAS GEMM", "fused attention", "latency"),
    ),
    "deepspeed-inference": Preset(
        "batches of requests, fused modules",
        _REQUESTS,
        _said(True, True, False, False, "cuBLAS GEMM", "cuBLAS GEMM", "latency"),
        lacks=("fused modules put into a Hugging Face model in place of its own",),
    ),
    "zero-inference": Preset(
        "weights come from the disk layer by layer, for large batches of requests",
        _REQUESTS,
        _said(True, True, True, False, "cuBLAS GEMM", "cuBLAS GEMM", "throughput"),
        asks={"weight_memory_bytes": "how much of the weights is in memory at a time; without it all are"},
    ),
    "flexgen": Preset(
        "weights, keys and values beyond memory on the disk, for throughput",
        _REQUESTS | {"kv_allocator": "paged"},
        _said(False, True, True, False, "torch.bmm", "torch.bmm", "throughput"),
        asks={"memory_bytes": "what weights, keys and values may take together; without it nothing is offloaded"},
    ),
    "orca": Preset(
        "requests come and go at every step, memory for the longest answer set aside",
        _WHOLE | {"scheduling_policy": "fcfs"},
        {
            "tensor parallel": "yes",
            "pipeline parallel": "yes",
            "offload": "no",
            "iteration": "yes",
            "target": "throughput",
        },
    ),
    "vllm-2023": Preset(
        "paged attention, whole prompts before decoding, preempted sequences swapped",
        _PAGES | {"scheduling_policy": "prefill-first", "swap_space": 4.0, "preemption_mode": "auto"},
        _said(True, None, True, True, "xFormers", "paged attention", "throughput"),
    ),
    "tgi-2023": Preset(
        "paged attention, whole prompts before decoding",
        _PAGES | {"scheduling_policy": "prefill-first"},
        _said(True, False, False, True, "flash attention", "paged attention", "throughput"),
    ),
    "lightllm": Preset(
        "memory by the token: blocks of one, nothing wasted at the end of a sequence",
        _PAGES | {"block_size": 1, "scheduling_policy": "prefill-first"},
        _said(True, False, False, True, "flash attention", "token attention", "throughput"),
    ),
    "mlc-llm": Preset(
        "kernels compiled for the device ahead of time, paged attention",
        _PAGES | {"scheduling_policy": "prefill-first"},
        _said(True, False, False, True, "compiled MatMul", "paged attention", "latency"),
        lacks=("compilation by TVM for many kinds of devices",),
    ),
    "tensorrt-llm-2023": Preset(
        "in-flight batching over paged memory in blocks of 64",
        _PAGES | {"block_size": 64, "scheduling_policy": "fcfs"},
        _said(True, True, True, True, "cuBLAS GEMM or flash attention, by length", "paged attention", "latency"),
        asks={"quantization": "int8-w8a8 or int4-wo, if the checkpoint is not quantised"},
        lacks=("engines of NVIDIA's compiler",),
    ),
    "flexflow-serve": Preset(
        "trees of drafts are verified at every step, preempted sequences swapped",
        _PAGES
        | {"scheduling_policy": "fcfs", "speculative_config": '{"method": "suffix", "num_speculative_tokens": 8}'}
        | {"swap_space": 4.0, "preemption_mode": "auto"},
        _said(True, True, True, True, "cuBLAS GEMM", "tree attention", "latency"),
        asks={"speculative_config": _DRAFTS + "; without it a tree of what was said before drafts"},
    ),
    "deepspeed-fastgen": Preset(
        "prompts are split and fused with decoding so that steps are alike",
        {
            "scheduling_policy": "splitfuse",
            "block_size": 64,
            "enable_prefix_caching": False,
            "cascade_attention": False,
        },
        {
            "tensor parallel": "yes",
            "offload": "no",
            "iteration": "yes",
            "prefill": "split and fused",
            "decode": "paged attention",
            "target": "throughput",
        },
    ),
    "sglang": Preset(
        "a radix tree of what was computed, requests ordered by it, grammars ready",
        {"prefix_cache": "radix", "scheduling_policy": "cache-aware", "warm_grammars": True},
        {
            "tensor parallel": "yes",
            "offload": "no",
            "iteration": "yes",
            "decode": "radix attention",
            "target": "throughput",
        },
    ),
    "gpt-fast": Preset(
        "one sequence, as soon as possible",
        _WHOLE | {"max_num_seqs": 1, "scheduling_policy": "static:size=1"},
        {"tensor parallel": "yes", "offload": "no", "iteration": "no", "target": "latency"},
        asks={"speculative_config": _DRAFTS, "quantization": "int8-wo or int4-wo, if the checkpoint is not quantised"},
        lacks=("torch.compile of the whole step",),
    ),
    "llama.cpp": Preset(
        "a fixed number of slots with memory of their own, prompts in pieces",
        {
            "kv_allocator": "contiguous",
            "enable_prefix_caching": False,
            "max_num_seqs": 4,
            "cascade_attention": False,
            "max_num_batched_tokens": 2048,
            "long_prefill_token_threshold": 512,
        },
        {"tensor parallel": "yes", "offload": "yes", "iteration": "yes", "target": "latency"},
    ),
}


def preset_settings(text: str, given: Collection[str] = ()) -> dict[str, Any]:
    """What a preset sets, or several with commas between them; `given`: what the user has set, which beats them.

    Raises ConfigError for an unknown preset, and for two that contradict each other.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name in (part.strip() for part in text.split(",")):
        if name not in PRESETS:
            raise ConfigError(f"preset: {name!r} is unknown; the presets are {', '.join(PRESETS)}", field="preset")
        for setting, value in PRESETS[name].settings.items():
            other, whose = found.setdefault(setting, (value, name))
            if other != value and setting not in given:
                raise ConfigError(
                    f"preset: {whose} has {setting} {other} and {name} has {value}; give one of them, or "
                    f"--{setting.replace('_', '-')} yourself",
                    field="preset",
                )
    return {setting: value for setting, (value, _) in found.items() if setting not in given}
