"""Attention of the backend torch by others: FlexAttention as it is, and FlashInfer by a mock that computes naively."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends.gpu.backend import TorchBackend
from penstock.backends.gpu.flashinfer import KINDS, FlashInferAttention, obstacle
from penstock.base.errors import ConfigError, EngineError
from penstock.config import from_kwargs
from penstock.launch.backend import choose_ops
from penstock.launch.names import check_names
from penstock.ops.tree import tree_mask
from tests import specs
from tests.engine import test_laws_models as laws
from tests.engine.harness import Knobs
from tests.gpu import mock_flashinfer
from tests.paged import Paged
from tests.sampled import ALL

CPU = torch.device("cpu")
IDS = [3 + i * 7 % 50 for i in range(40)]
STEPS: list[dict[str, Any]] = [
    {"a": (IDS, [len(IDS) - 1]), "b": (IDS[:21], [20])},
    {"a": ([5], [0]), "b": (IDS[21:24], [0, 2])},
    {"a": ([8], [0]), "b": ([11], [0])},
    {"b": ([9], [0]), "c": (IDS[:3], [2])},
    {"a": ([7], [0]), "c": ([3], [0])},
    {"a": ([6, 2], [1])},
]
"""The last two without b: tables of slabs, which layers share."""
NONE = ("mamba", "mamba2", "rwkv4", "rwkv5", "rwkv6", "rwkv7", "indexed", "entries")
HAS_ATTENTION = [name for name in specs.ALL if name not in NONE]


def config(**settings: Any) -> Any:
    return from_kwargs(model="m", **settings)


def pair(name: str, backend: TorchBackend, cap: float | None = None, **how: Any) -> list[Paged]:
    """A model on the reference, and on `backend`; sequence b has a page of unrelated slabs per layer. `cap`: of
    scores, which the model has not."""
    spec, weights = specs.make(name)
    spec = spec if cap is None else replace_mixers(spec, soft_cap=cap)
    drivers = [Paged(spec, weights, num_slabs=40, **how) for _ in range(2)]
    drivers[1].on(backend)
    for driver in drivers:
        driver.make_ragged("b")
    return drivers


def furthest(drivers: list[Paged], steps: list[dict[str, Any]]) -> float:
    """The largest difference of logits, as a share of the largest logit."""
    worst = 0.0
    for step in steps:
        want, got = (driver.run(step) for driver in drivers)
        for seq in step:
            assert np.isfinite(got[seq]).all(), seq
            worst = max(worst, float(np.abs(got[seq] - want[seq]).max() / np.abs(want[seq]).max()))
    return worst


# -- FlexAttention -----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = laws.draw_knobs

    def drawn(*args: Any) -> Knobs:
        knobs = draw(*args)
        knobs.ops, knobs.attention = "torch", "flex"
        return knobs

    monkeypatch.setattr(laws, "draw_knobs", drawn)


RULES = [
    "llama_mqa", "llama_rope3", "layernorm", "latent", "narrow_values", "inner_norms", "key_bias", "gated", "scores",
    "shared_kv", "blocks", "yoco", "streams", "windowed", "slots", "shared",
]  # fmt: skip
"""One model for each rule of attention that any has: the others have the same beside layers of other kinds."""


@pytest.mark.parametrize("name", HAS_ATTENTION if ALL else RULES)
def test_flex_gives_the_reference_s_logits(name: str) -> None:
    drivers = pair(name, TorchBackend(CPU, attention="flex"), block_size=16)
    assert furthest(drivers, STEPS) < 1e-3
    assert drivers[1].program.attention.counts["flex"] >= len(STEPS)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "bfloat16"])
def test_flex_reads_what_codecs_left(kv_dtype: str) -> None:
    assert furthest(pair("llama_gqa", TorchBackend(CPU, attention="flex"), kv_dtype=kv_dtype), STEPS) < 2e-3


@pytest.mark.usefixtures("on_flex")
@pytest.mark.parametrize("name", ["llama_gqa", "windowed", "latent"])
def test_flex_obeys_the_laws(name: str) -> None:
    laws.in_turmoil(name, 1)


@pytest.mark.usefixtures("on_flex")
def test_flex_obeys_the_laws_over_codes() -> None:
    laws.in_turmoil("llama_gqa", 1, "int8", 0, "none")


@pytest.mark.parametrize("name", ["llama_gqa", "windowed", "scores"])
def test_flex_follows_the_paths_of_a_tree(name: str) -> None:
    """Nodes of a tree see what they would see if their path alone had come."""
    parents = [-1, 0, 0, 1, 2, 3]
    bits, depths = tree_mask(parents)
    found = []
    for driver in pair(name, TorchBackend(CPU, attention="flex"), block_size=16):
        driver.run({"a": (IDS[:19], [18]), "b": (IDS[:5], [4])})
        run = driver.program.run

        def as_tree(plan: Any, planes: Any, run: Any = run) -> Any:
            mask = np.zeros(len(plan.positions), np.uint64)
            mask[1:] = bits
            positions = plan.positions.copy()
            positions[1:] = positions[1] + depths
            return run(replace(plan, mask=mask, positions=positions), planes)

        driver.program.run = as_tree
        found.append(driver.run({"b": ([4], [0]), "a": (IDS[20:26], range(6))}))
    for seq in ("a", "b"):
        np.testing.assert_allclose(found[1][seq], found[0][seq], atol=1e-4 * np.abs(found[0][seq]).max())


def test_flex_says_what_it_cannot_do() -> None:
    spec, _ = specs.make("llama_gqa")
    for settings, words in (
        ({"kv_selector": "h2o"}, "reads whole contexts"),
        ({"kv_cache_dtype": "kivi2"}, "keeps beside their codes"),
        ({"batch_invariant": True}, "same bits in every batch"),
    ):
        with pytest.raises(ConfigError, match=words):
            choose_ops(config(device="cpu-torch", attention_backend="flex", **settings), spec)
    assert choose_ops(config(device="cpu-torch", attention_backend="FLEX_ATTENTION"), spec)[0].execution.ops == "torch"


@pytest.mark.parametrize("name", ["flex", "flashinfer"])
def test_where_torch_does_not_compute_that_is_said(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} runs by torch, and device is auto; set device to cuda or cpu-torch"):
        check_names(config(attention_backend=name))
    check_names(config(attention_backend=name, device="cuda"))


# -- FlashInfer, by a mock ---------------------------------------------------------------------------------------------


class OnMock(TorchBackend):
    """With FlashInfer's place taken by the mock."""

    def compile(self, *args: Any, **named: Any) -> Any:
        forward = super().compile(*args, **named)
        adapter = FlashInferAttention(CPU, mock_flashinfer, workspace_bytes=16)
        for i, call in enumerate(forward.code):
            if call.op == "attention":
                object.__setattr__(forward.code[i], "fn", adapter.attend)
        forward.attention = adapter
        return forward


@pytest.mark.parametrize(("name", "kv_dtype", "cap"), [
    ("llama_gqa", "bfloat16", None), ("llama_gqa", "float16", None), ("llama_mqa", "float32", None),
    ("windowed", "float32", None), ("llama_gqa", "float32", 0.5), ("slots", "float32", None),
])  # fmt: skip
def test_flashinfer_is_called_as_its_mock_wants(
    name: str, kv_dtype: str, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which FlashInfer has not, nothing but the wiring can make a difference."""
    if kv_dtype == "float32":
        monkeypatch.setitem(KINDS, kv_dtype, torch.float32)
        monkeypatch.setattr(mock_flashinfer, "KINDS", (torch.float32,))
    drivers = pair(name, OnMock(CPU, kernels=False), cap, kv_dtype=kv_dtype, block_size=16)
    assert furthest(drivers, STEPS) < {"bfloat16": 3e-2, "float16": 4e-3, "float32": 5e-4}[kv_dtype]
    counts = drivers[1].program.attention.counts
    assert counts["decode"] > 0
    assert counts["prefill"] > counts["decode"]


def test_flashinfer_says_what_it_cannot_do() -> None:
    good = {"kv_cache_dtype": "bfloat16", "device": "cuda"}
    spec = specs.make("llama_gqa")[0]
    mixer: Any = spec.layers[0].mixer
    usual = replace_mixers(spec, head_dim=64)
    assert obstacle(config(**good), usual) is None
    for settings, words in (
        ({"block_size": 4}, "blocks of 16, 32 or 64 tokens, and block_size is 4"),
        ({"kv_cache_dtype": "int8"}, "values are int8; set kv_cache_dtype bfloat16"),
        ({"kv_selector": "h2o"}, "whole contexts"),
        ({"speculative_config": '{"method": "ngram"}'}, "asks for them"),
    ):
        assert words in (obstacle(config(**(good | settings)), usual) or ""), words
    for changes, words in (({"sinks": True}, "sinks"), ({"chunk": 8}, "chunks"), ({}, "64, 128 or 256")):
        other = replace_mixers(spec, **({"head_dim": 64} | changes if changes else {"head_dim": mixer.head_dim}))
        assert words in (obstacle(config(**good), other) or ""), words
    assert "latent" in (obstacle(config(**good), specs.make("latent")[0]) or "")
    assert "device is cpu-torch" in (FlashInferAttention.why_not(config(device="cpu-torch"), usual) or "")
    assert "pip install flashinfer-python" in (FlashInferAttention.why_not(config(**good), usual) or "")


def replace_mixers(spec: Any, **changes: Any) -> Any:
    import msgspec

    layers = [msgspec.structs.replace(x, mixer=msgspec.structs.replace(x.mixer, **changes)) for x in spec.layers]
    return msgspec.structs.replace(spec, layers=tuple(layers))


def test_a_context_that_flashinfer_was_not_planned_for_is_an_error() -> None:
    drivers = pair("llama_gqa", OnMock(CPU, kernels=False), block_size=16)
    with pytest.raises(EngineError, match="float16 or bfloat16"):
        drivers[1].run(STEPS[0])
    drivers = pair("scores", OnMock(CPU, kernels=False), kv_dtype="bfloat16", block_size=16)
    with pytest.raises(EngineError, match="no form for"):
        drivers[1].run(STEPS[0])
