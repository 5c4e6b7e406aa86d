"""Presets beside each other, by what can be counted: sequences at once, steps, slots of memory nobody fills."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock import SamplingParams
from penstock.cli.features import columns_of
from penstock.config.load import from_kwargs
from penstock.kv.waste import unfilled
from penstock.launch.llm import LLM
from tests.native.running import pytestmark_native

KV_BYTES = 3 << 20
LENGTHS = (4, 9, 40, 6, 12, 5, 30, 8, 10, 7, 3, 20)
PROMPTS = [f"The {n}th captain of the ship said to his men that" for n in range(len(LENGTHS))]
SAME = "one two three four five six " * 8


@dataclass
class Counted:
    tokens: list[tuple[int, ...]]
    steps: int
    most_at_once: int
    internal: int
    """Slots that are held and never filled, at most after a step."""


def run(preset: str, prompts: list[str], lengths: tuple[int, ...], **settings: object) -> Counted:
    llm = LLM("nano", max_model_len=256, preset=preset, **{"kv_cache_memory_bytes": KV_BYTES, **settings})
    core, wastes = llm.engine.core, [0]
    inner = core.step

    def step() -> object:
        outputs = inner()
        wastes.append(unfilled(core.kv, core.scheduler.running)[1])
        return outputs

    core.step = step  # type: ignore[method-assign, assignment]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(prompts, params)
    tokens = [tuple(out.outputs[0].token_ids) for out in outputs]
    return Counted(tokens, core.stats.num_steps, core.stats.peak_running, max(wastes))


def test_L01_L03_paging_holds_more_at_once_in_equal_memory_and_ends_in_fewer_steps() -> None:
    """Where a step's time is its weights', fewer steps are more throughput. The columns are the settings'."""
    base, paged = (run(name, PROMPTS, LENGTHS) for name in ("fastertransformer", "vllm-2023"))
    assert paged.tokens == base.tokens
    assert paged.most_at_once >= 2 * base.most_at_once
    assert paged.steps < 0.6 * base.steps
    columns = {name: columns_of(from_kwargs(model="nano", preset=name)) for name in ("fastertransformer", "vllm-2023")}
    assert [columns["fastertransformer"][c] for c in ("iteration", "decode", "offload")] == [
        "no: static", "contiguous attention", "no",
    ]  # fmt: skip
    assert [columns["vllm-2023"][c] for c in ("iteration", "decode", "offload")] == [
        "yes: prefill-first", "paged attention, blocks of 16", "keys and values to host",
    ]  # fmt: skip


def test_L02_trees_of_drafts_say_repetitive_text_in_fewer_steps_than_the_baseline() -> None:
    # The preset's drafts, always: by default as many are made as pay, which depends on what this machine does now.
    drafts = '{"method": "suffix", "num_speculative_tokens": 8, "controller": "fixed"}'
    base = run("fastertransformer", [SAME], (64,))
    drafting = run("flexflow-serve", [SAME], (64,), speculative_config=drafts)
    assert drafting.tokens == base.tokens
    assert drafting.steps < 0.8 * base.steps
    columns = columns_of(from_kwargs(model="nano", preset="flexflow-serve"))
    assert columns["iteration"] == "yes: fcfs"
    assert columns["decode"].endswith("drafts by suffix")
    assert columns["offload"] == "keys and values to host"


def test_L08_blocks_of_a_token_hold_nothing_that_is_never_filled() -> None:
    tokens, blocks = (run(name, PROMPTS, LENGTHS) for name in ("lightllm", "vllm-2023"))
    assert tokens.tokens == blocks.tokens
    assert tokens.internal == 0
    assert blocks.internal > 0


@pytestmark_native
def test_L07_layers_are_streamed_with_half_of_the_memory_that_weights_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    whole = run("fastertransformer", PROMPTS[:3], (6, 6, 6))
    half = LLM("nano", max_model_len=256).engine.plan.weight_bytes // 2
    llm = LLM("nano", max_model_len=256, preset="zero-inference", weight_memory_bytes=half)
    params = [SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)] * 3
    assert [tuple(out.outputs[0].token_ids) for out in llm.generate(PROMPTS[:3], params)] == whole.tokens
    core: Any = llm.engine.core
    layers = core.executor.runner._forward._resident
    assert layers.most_bytes <= half < layers.num_read
    made = from_kwargs(model="nano", preset="zero-inference", weight_memory_bytes=half)
    assert columns_of(made)["offload"] == "weights to disk"
