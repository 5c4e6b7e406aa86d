"""Medusa heads on a real model: no token changes, and steps are saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock import LLM
from penstock.base.errors import ConfigError
from penstock.launch.bundled import bundled_heads
from penstock.model.forward import HeadForward
from penstock.runner.runner import Runner
from tests.engine import test_eagle
from tests.engine.test_eagle import NATIVE, PROSE, native_only, params
from tests.sampled import ALL, grid


def nano(ops: str, num_drafts: int) -> LLM:
    return test_eagle.nano(ops, "medusa" if num_drafts else "", num_drafts)


@pytest.mark.parametrize(
    ("ops", "num_drafts"), grid([NATIVE], [3, 12]) + grid(["ref", "torch"], [3, 12] if ALL else [12])
)
def test_D12_no_token_changes(ops: str, num_drafts: int) -> None:
    """Greedy and sampled rows in one batch, trees narrow and wide."""
    rules = params(12 if ops != "native" else 48, (0.0, 0.7, 0.0, 1.0))
    want = nano(ops, 0).generate(list(PROSE), rules)
    llm = nano(ops, num_drafts)
    got = llm.generate(list(PROSE), rules)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
    assert llm.engine.core.stats.num_accepted_tokens > 0


@native_only
def test_D12_one_and_a_half_tokens_a_step() -> None:
    """Greedy text like what the model was trained on; every step counts, the first ones without drafts too."""
    llm = nano("native", 8)
    stats = llm.engine.core.stats
    before = (stats.num_drafts, stats.num_accepted_tokens)
    llm.generate(list(PROSE), params(96, (0.0,)))
    drafts, accepted = stats.num_drafts - before[0], stats.num_accepted_tokens - before[1]
    steps = len(PROSE) * 96 - accepted
    assert drafts <= steps
    assert len(PROSE) * 96 / steps >= 1.5


@pytest.mark.parametrize("ops", ["ref", pytest.param("native", marks=native_only)])
def test_the_output_matrix_alone_gives_the_logits_of_the_model(ops: str) -> None:
    runner: Runner = nano(ops, 0).engine.core.executor.runner  # type: ignore[attr-defined]
    forward, planes = runner._forward, runner.storage.planes
    assert isinstance(forward, HeadForward)
    seen: list[Any] = []
    run = forward.run

    def spy(plan: Any, given: Any) -> Any:
        from dataclasses import replace

        assert isinstance(forward, HeadForward)
        logits, hidden = forward.run_pooling(replace(plan, hidden_indices=plan.logits_indices), given)
        logits = logits.copy()
        seen.append((logits, forward.run_head(hidden, planes).copy()))
        return logits

    forward.run = spy  # type: ignore[method-assign]
    try:
        nano(ops, 0).generate(list(PROSE), params(3, (0.8,)))  # greedy steps ask for no logits
    finally:
        forward.run = run  # type: ignore[method-assign]
    assert len(seen) >= 3
    for logits, again in seen:
        np.testing.assert_array_equal(logits, again)


def test_D12_heads_of_another_model_are_refused_at_start(tmp_path: Path) -> None:
    shape = (1, 1, 64, 64)
    save_file(
        {"weight": np.ones(shape, np.float32), "bias": np.ones(shape[:3], np.float32)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"kind": "medusa", "base": "0" * 16, "hidden_size": 64}))
    for heads, says in [
        (str(tmp_path), "another model"),
        ("nosuch-heads", "cannot be read"),
        (None, "heads: the folder"),
    ]:
        config = {"method": "medusa", "heads": heads} if heads else {"method": "medusa"}
        with pytest.raises(ConfigError, match=says):
            LLM(model="nano", speculative_config=json.dumps(config))
    assert bundled_heads("../nano-medusa") is None
