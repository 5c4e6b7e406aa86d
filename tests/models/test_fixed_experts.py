"""Experts that tokens do not choose: by a hash of the token (C68), by the task (C69)."""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from penstock.backends.native.backend import NativeBackend
from penstock.base.bf16 import narrow
from penstock.base.errors import ConfigError, ModelError
from penstock.core.model_spec import Experts, FeedForward, Layer, ModelSpec, Router, weight_shapes
from penstock.families.checkpoint import Checkpoint, TokenizerFiles, WeightRef
from penstock.formats.safetensors import read_safetensors
from penstock.model.hashes import HASHES, hashed
from penstock.ops.native.library import best_library
from penstock.ops.native.program import Pool
from penstock.ops.plan import I32
from penstock.weights.load import load_weights
from penstock.weights.tasks import for_task, load_task
from tests import specs
from tests.engine.harness import Knobs, real_engine, request, run
from tests.oracle import NaiveModel
from tests.paged import Paged

OPS = ["ref", *(["native"] if best_library() is not None else [])]
TASKS, EXPERTS, K = 3, 6, 2


def answers(spec: ModelSpec, weights: Any, ops: str, knobs: dict[str, Any]) -> list[list[int]]:
    core = real_engine(spec, weights, Knobs(ops=ops, num_blocks=96, **knobs))
    asked = [request([5 + i, 9, 3 * i + 1, 7], request_id=f"r{i}", max_tokens=9) for i in range(5)]
    got = run(core, asked)
    return [got[r.request_id].tokens[0] for r in asked]


def test_C68_a_token_s_experts_are_a_function_of_the_token() -> None:
    """Wherever it stands, whatever it is beside; spread evenly over experts, other ones in another layer."""
    for name in HASHES:
        if name == "all":
            continue
        table = hashed(name, 4100, 8, 2, 3)
        np.testing.assert_array_equal(table, hashed(name, 4100, 8, 2, 3))
        assert table.shape == (4100, 2)
        assert (table[:, 0] < table[:, 1]).all()
        counts = Counter(table.ravel().tolist())
        assert set(counts) == set(range(8))
        assert max(counts.values()) < 1.15 * 4100 * 2 / 8
    assert hashed("random", 4100, 8, 2, 3).tolist() != hashed("random", 4100, 8, 2, 4).tolist()
    # Part of the model, so the same on every machine and in every version.
    assert hashed("random", 6, 8, 2, 3).tolist() == RANDOM
    assert hashed("modulo", 6, 8, 2, 3).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5]]
    assert hashed("all", 6, 3, 3, 0).tolist() == [[0, 1, 2]]


RANDOM = [[4, 6], [3, 5], [1, 4], [2, 7], [1, 2], [2, 5]]


def middle(vocab_size: int, num_experts: int, top_k: int, layer: int) -> I32:
    """A plug-in: every token's experts begin at half its id."""
    return ((np.arange(vocab_size)[:, None] // 2 + np.arange(top_k)) % num_experts).astype(np.int32)


def twice(vocab_size: int, num_experts: int, top_k: int, layer: int) -> I32:
    return np.zeros((vocab_size, top_k), np.int32)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HASHES, "_entries", dict(HASHES._entries))
    HASHES.add("middle", f"{__name__}:middle")
    HASHES.add("twice", f"{__name__}:twice")


@pytest.mark.parametrize("ops", OPS)
def test_C68_a_hash_router_is_a_plug_in(ops: str, plugged: None) -> None:
    """One function and one line. The engine's tokens are the naive model's, which looks experts up token by token; with
    the experts of another function they are others."""
    f = Experts(num_experts=5, top_k=2, expert=FeedForward(width=11), router=Router(score="even", hash="middle"))
    spec = with_experts(f)
    weights = drawn(spec)
    got = answers(spec, weights, ops, {})
    model = NaiveModel(spec, weights)
    assert got[:2] == [model.greedy([5 + i, 9, 3 * i + 1, 7], 9) for i in range(2)]
    assert got == answers(spec, weights, ops, {"budget": 3, "block_size": 16})
    other = with_experts(msgspec.structs.replace(f, router=Router(score="even", hash="random")))
    assert got != answers(other, weights, ops, {})
    assert "layers.0.router" not in weight_shapes(spec), "nothing has to be learned to choose"


@pytest.mark.parametrize(("name", "error", "words"), [
    ("nobody", ConfigError, "choose one of: all"), ("twice", ModelError, "2 different experts of 5"),
])  # fmt: skip
def test_what_cannot_be_experts_is_refused(name: str, error: Any, words: str, plugged: None) -> None:
    f = Experts(num_experts=5, top_k=2, expert=FeedForward(width=11), router=Router(score="even", hash=name))
    spec = with_experts(f)
    with pytest.raises(error, match=words):
        Paged(spec, drawn(spec))


def with_experts(f: Experts) -> ModelSpec:
    spec = specs.make("llama_gqa")[0]
    plain, last = spec.layers
    return msgspec.structs.replace(spec, layers=(msgspec.structs.replace(plain, ffn=f), last, plain_of(plain, f)))


def plain_of(layer: Layer, f: Experts) -> Layer:
    return msgspec.structs.replace(layer, ffn=msgspec.structs.replace(f, shared=FeedForward(width=9)))


def drawn(spec: ModelSpec) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    out = {}
    for name, shape in weight_shapes(spec).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        wide = len(shape) == 1 or name in ("embed", "lm_head") or name.endswith("router_tasks")
        out[name] = noise if wide else noise * np.float32(2.0 / np.sqrt(shape[1]))
    return out


@pytest.fixture(params=["softmax", "sigmoid"])
def by_task(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """A file with all experts of all tasks, in bfloat16, and what it holds."""
    router = {
        "softmax": Router(tasks=TASKS),
        "sigmoid": Router(
            score="sigmoid", renormalize=True, tasks=TASKS, correction=True, expert_scale=True, scale=1.7
        ),
    }[request.param]  # fmt: skip
    spec = with_experts(Experts(num_experts=EXPERTS, top_k=K, expert=FeedForward(width=40), router=router))
    weights = {name: narrow(w) for name, w in drawn(spec).items()}
    path = tmp_path / "model.safetensors"
    save_file({name: torch.from_numpy(w).view(torch.bfloat16) for name, w in weights.items()}, path)
    refs = {name: WeightRef(tensor) for name, tensor in read_safetensors(path).items()}
    return Checkpoint(tmp_path, spec, refs, TokenizerFiles("none")), weights


@pytest.mark.parametrize("ops", OPS)
def test_C69_a_task_s_experts_alone_give_what_the_whole_model_gives(
    by_task: tuple[Checkpoint, dict[str, Any]], ops: str
) -> None:
    """Logits bit by bit, and the engine's tokens; those of the tasks differ. The naive whole model says so, too."""
    source, weights = by_task
    ids, texts = [3, 17, 40, 5, 5, 22, 9, 60], []
    for task in range(TASKS):
        spec, part = load_task(source, task)
        told = for_task(source.spec, task)
        whole = load_weights(source, told, "float32")
        want = NaiveModel(told, weights).logits(ids)
        if ops == "native":
            library = best_library()
            assert library is not None
            backend = NativeBackend(Pool(library, 2))
            close, want = want, Paged(told, whole).on(backend).one_go("a", ids)
            np.testing.assert_allclose(want, close, atol=2e-3)
            np.testing.assert_array_equal(Paged(spec, part).on(backend).chunked("a", ids, [3, 1]), want)
        else:
            np.testing.assert_array_equal(Paged(told, whole).one_go("a", ids), want)
            np.testing.assert_array_equal(Paged(spec, part).chunked("a", ids, [3, 1]), want)
        text = answers(told, whole, ops, {})
        assert answers(spec, part, ops, {"budget": 5}) == text
        texts.append(text)
    assert texts[0] != texts[1] != texts[2] != texts[0]


def test_C69_what_a_task_does_not_need_is_not_in_memory(by_task: tuple[Checkpoint, dict[str, Any]]) -> None:
    """Bytes that are read, and of arrays: less by exactly the experts that the task does not choose, and by the rows
    of the other tasks."""
    source, weights = by_task
    seen: list[int] = []
    spec, part = load_task(source, 1, progress=lambda done, total: seen.append(total))
    experts = [name for name in weights if ".experts." in name]
    every = sum(prod(w.shape) for w in weights.values())
    fixed = sum(prod(weights[name].shape) for name in weights if ".router_" in name)
    of_others = sum(prod(weights[name].shape) for name in experts) * (EXPERTS - K) // EXPERTS
    held = sum(prod(w.shape) for w in part.values())
    assert held == every - of_others - fixed + 2 * K  # two layers, of which each says what its experts weigh
    assert seen[-1] == 2 * (every - of_others - fixed)
    assert spec.num_params == held
    assert held < 0.6 * every


def test_tasks_that_are_not_there_are_refused(by_task: tuple[Checkpoint, dict[str, Any]]) -> None:
    with pytest.raises(ModelError, match="no task 3: the model has 3, 0 to 2"):
        load_task(by_task[0], 3)
    with pytest.raises(ModelError, match="no layer"):
        for_task(specs.make("experts")[0], 0)
