"""Encoders in the engine: vectors depend on their text alone, steps hold whole texts, a recorded run replays."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import ConfigError, InputError
from penstock.core.held_weights import HeldWeights
from penstock.core.output import EngineOutput
from penstock.core.pooler import HEAD, POOLINGS, WHOLE
from penstock.core.request import Abort, Control, Request
from penstock.engine.core import EngineCore
from penstock.engine.record import Recorder, load, replay
from penstock.families.registry import open_model
from penstock.launch.llm import LLM
from penstock.weights.load import load_weights
from tests.encoders import add_modules, write_encoder
from tests.engine.harness import Knobs, assert_idle, plain_core, real_engine, request

RNG = random.Random(2)
TEXTS = [[RNG.randrange(5, 60) for _ in range(RNG.randrange(1, 41))] for _ in range(14)]
KINDS = [*POOLINGS, WHOLE, "mean" + HEAD, "cls" + HEAD]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    checkpoint = open_model(write_encoder(tmp_path_factory.mktemp("engine"), labels=3, max_position_embeddings=64))
    return checkpoint.spec, load_weights(checkpoint.weights, checkpoint.spec, HeldWeights(dtype="float32"))


def pooling(ids: list[int], kind: str, name: str, priority: int = 0) -> Request:
    return Request(
        request_id=name, prompt_token_ids=ids, rules=request(ids, max_tokens=1).rules, max_tokens=1, pooling=kind,
        priority=priority,
    )  # fmt: skip


def knobs(**more: Any) -> Knobs:
    return Knobs(**{"chunked": False, "prefix_cache": "none", "budget": 64, "num_blocks": 16, **more})


def vectors(core: EngineCore, meddle: random.Random | None = None) -> dict[str, bytes]:
    todo = [pooling(ids, KINDS[i % len(KINDS)], f"t{i}", i % 3) for i, ids in enumerate(TEXTS)]
    done: dict[str, bytes] = {}
    while todo or core.has_work:
        while todo and (meddle is None or meddle.random() < 0.6):
            core.add(todo.pop(0))
        if meddle is not None and core.groups and meddle.random() < 0.3:
            core.add(Control(kind="preempt", request_id=meddle.choice(sorted(core.groups))))
        if meddle is not None and meddle.random() < 0.2:
            core.add(pooling(TEXTS[0], "mean", name := f"gone{meddle.random()}"))
            core.add(Abort(request_id=name))
        for out in core.step():
            assert out.error is None, out.error
            if out.pooled:
                done[out.request_id] = out.pooled
    assert_idle(core)
    return {name: found for name, found in done.items() if name.startswith("t")}


@pytest.mark.parametrize("ops", ["ref", "native"])
def test_a_vector_depends_on_its_text_alone(model: tuple[Any, Any], ops: str) -> None:
    """Whatever is beside it, how large steps are, and whether it is preempted on its way."""
    want = vectors(real_engine(*model, knobs(ops=ops, max_num_seqs=1)))
    assert len(want) == len(TEXTS)
    for seed, more in enumerate([{}, {"budget": 200}, {"depth": 2, "max_num_seqs": 3}, {"policy": "priority"}]):
        assert vectors(real_engine(*model, knobs(ops=ops, **more)), random.Random(seed)) == want


def test_a_step_holds_whole_texts(model: tuple[Any, Any]) -> None:
    core, seen = real_engine(*model, knobs(budget=64)), []
    submit = core.executor.submit

    def watch(step: Any) -> None:
        seen.extend((row.start, row.num_tokens) for row in step.scheduled)
        submit(step)

    core.executor.submit = watch  # type: ignore[method-assign]
    vectors(core)
    assert sorted(seen) == sorted((0, len(ids)) for ids in TEXTS)


def test_poolings_fold_hidden_states(model: tuple[Any, Any]) -> None:
    core = real_engine(*model, knobs())
    for kind in KINDS:
        core.add(pooling(TEXTS[1], kind, kind))
    found = {}
    while core.has_work:
        found |= {out.request_id: np.frombuffer(out.pooled, "<f4") for out in core.step() if out.pooled}
    h = found[WHOLE].reshape(len(TEXTS[1]), -1).astype(np.float64)
    n = len(h)
    assert n > 3
    want = {
        "last": h[-1], "cls": h[0], "mean": h.mean(0), "max": h.max(0), "mean_sqrt_len": h.sum(0) / n**0.5,
        "weightedmean": (h * np.arange(1, n + 1)[:, None]).sum(0) / np.arange(1, n + 1).sum(),
    }  # fmt: skip
    for kind, vector in want.items():
        np.testing.assert_allclose(found[kind], vector, rtol=1e-5, atol=1e-6)
    weights = {name: np.asarray(model[1][name], np.float64) for name in model[1] if name.startswith("head.")}
    inner = np.tanh(weights["head.0"] @ h[0] + weights["head.0.bias"])
    np.testing.assert_allclose(found["cls" + HEAD], weights["head.1"] @ inner + weights["head.1.bias"], atol=1e-5)


def test_a_recorded_run_replays(tmp_path: Path, model: tuple[Any, Any]) -> None:
    settings = knobs(depth=2, budget=70)
    core = real_engine(*model, settings)
    core.recorder = recorder = Recorder()
    emitted: list[EngineOutput] = []
    step = core.step

    def watch() -> list[EngineOutput]:
        emitted.extend(found := step())
        return found

    core.step = watch  # type: ignore[method-assign]
    vectors(core, random.Random(5))
    assert sum(len(i.digests) for i in recorder.iterations) > 5
    recorder.save(tmp_path / "run.log")
    again = replay(load(tmp_path / "run.log"), lambda e, c: plain_core(model[0], settings, e, c), depth=2)
    assert again == emitted


def test_settings_about_what_is_kept_are_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path)
    for field, value in (
        ("kv_selector", "h2o"),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
    ):
        with pytest.raises(ConfigError, match="is an encoder"):
            LLM(folder, **{field: value})
    llm = LLM(folder)
    with pytest.raises(InputError, match="writes none"):
        llm.generate("the mill")
    with pytest.raises(InputError, match="no classifier's head"):
        llm.classify("the mill")


def test_texts_are_never_cut_into_steps(tmp_path: Path) -> None:
    """Whatever the settings say, and however little is left of a step."""
    llm = LLM(write_encoder(tmp_path), max_num_batched_tokens=64, enable_chunked_prefill=True, max_num_seqs=4)
    prompts = [{"prompt_token_ids": ids} for ids in TEXTS]
    alone = [llm.embed(prompt)[0].outputs for prompt in prompts]
    assert [one.outputs for one in llm.embed(prompts)] == alone


def test_texts_are_cut_at_their_end(tmp_path: Path) -> None:
    """As sentence-transformers cuts them: the tokenizer's last token stays."""
    llm = LLM(add_modules(write_encoder(tmp_path), "cls_token", max_tokens=16))
    long = "the mill stands by the river " * 5
    with pytest.raises(InputError, match=r"32 tokens.*16 tokens"):
        llm.embed(long)
    (out,) = llm.embed(long, truncate_prompt_tokens=-1)
    assert len(out.prompt_token_ids) == 16
    assert out.prompt_token_ids[-1] == 3
    assert llm.engine.limits.pooler.mode == "cls"  # type: ignore[union-attr]
