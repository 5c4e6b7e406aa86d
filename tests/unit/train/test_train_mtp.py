"""The trainer of heads for multi-token prediction: it goes on where it was, and writes a model with its head."""

from __future__ import annotations

import json
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from penstock import LLM, SamplingParams
from penstock.drafters.mtp import MtpDrafter
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from tests import specs

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from train import mtp

ROOT = Path(__file__).resolve().parents[3]
PICO = ROOT / "src" / "penstock" / "bundled" / "pico"
GIVEN = [
    str(PICO), "--texts", str(ROOT / "docs" / "log.md"), str(ROOT / "docs" / "tour.md"), "--own", "5", "--read", "28",
    "--length", "48", "--rows", "3", "--steps", "8", "--others", "64",
]  # fmt: skip


def trained(monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> dict[str, Any]:
    """Weights of the head."""
    monkeypatch.setattr(sys, "argv", ["mtp", *GIVEN, "--out", str(out), *more])
    mtp.main()
    (head,) = open_model(out).heads
    return dict(load_weights(head, head.spec, "float32"))


def test_a_training_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = trained(monkeypatch, tmp_path / "whole")
    with monkeypatch.context() as patched:
        minutes = count()
        patched.setattr(mtp, "time", SimpleNamespace(monotonic=lambda: 60.0 * next(minutes)))
        early = trained(monkeypatch, tmp_path / "parts", "--minutes", "6")
    assert any(not np.array_equal(early[name], array) for name, array in want.items()), "it was not stopped"
    got = trained(monkeypatch, tmp_path / "parts")
    assert all(np.array_equal(got[name], array) for name, array in want.items())
    lines = [json.loads(line) for line in (tmp_path / "parts" / "training" / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 8
    assert lines[-1]["minutes"] >= 6
    assert {"loss", "right", "held_out"} <= lines[-1].keys()
    more = trained(monkeypatch, tmp_path / "parts", "--seed", "1", "--steps", "9")
    assert len(list((tmp_path / "parts" / "training").glob("texts-*.npz"))) == 2
    assert any(not np.array_equal(more[name], array) for name, array in want.items())


def test_what_it_writes_is_the_model_with_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(monkeypatch, tmp_path)
    made, own = open_model(tmp_path), open_model(PICO)
    weights, want = (load_weights(c, c.spec, "bfloat16") for c in (made, own))
    assert all(np.array_equal(weights[name], array) for name, array in want.items())
    tokens = []
    for speculation in ('{"method": "none"}', '{"method": "mtp", "controller": "fixed"}'):
        llm = LLM(str(tmp_path), tokenizer=str(PICO), speculative_config=speculation)
        out = llm.generate("Once upon a time", SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        tokens.append(list(out[0].outputs[0].token_ids))
    assert tokens[0] == tokens[1]
    assert isinstance(llm.engine.core.executor.runner.drafter, MtpDrafter)  # type: ignore[attr-defined]
    assert llm.engine.core.stats.num_draft_tokens > 0


def test_models_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="layers of one kind"):
        mtp.mimo_config(specs.make("windowed")[0])
