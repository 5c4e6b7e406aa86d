"""InfiniGen on nano (row B18): what is chosen one layer before holds most of the attention, and costs little.

benchmarks/quality/infinigen.py measures the same on more, and on larger models.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from penstock.backends.reference import BlasBackend
from penstock.base.bf16 import F32
from penstock.config import from_kwargs
from penstock.core.selection import TokenReads, num_components
from penstock.eval.rehearsal import Fetched, counting_scorer, turns_of_text
from penstock.eval.sample import SAMPLE
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.model.emitter import Reading
from penstock.select.infinigen import turns_of
from penstock.weights.load import fingerprint

FIRST, LENGTH = 400, 496
ROOT = Path(__file__).resolve().parents[2]


@cache
def bench() -> tuple[LoadedModel, tuple[int, ...], list[F32]]:
    model = load(from_kwargs(model="nano", ops="ref", max_model_len=1024))
    assert model.tokenizer is not None
    ids = tuple(model.tokenizer.encode(SAMPLE))
    return model, ids[:LENGTH], turns_of_text(model, BlasBackend(), ids[LENGTH : LENGTH + 512])


def read(reach: float, rank: float, share: float = 0.99, turned: bool = True) -> tuple[F32, Fetched]:
    model, ids, turns = bench()
    parts = [t[:, :, : num_components(rank, t.shape[1])].copy() for t in turns]
    if not turned:
        parts = [np.broadcast_to(np.eye(*t.shape[1:], dtype=np.float32), t.shape) for t in parts]
    reading = Reading(tokens=TokenReads(share=share, recent=8, reach=reach, rank=rank), turns=parts)
    scorer, attention = counting_scorer(model, reading, FIRST)
    return scorer.logits(ids), attention.fetched


def test_B18_a_fifth_of_keys_and_values_holds_nine_tenths_of_what_attention_would_choose() -> None:
    model, ids, _ = bench()
    logits, f = read(3.75, 0.8)
    assert f.all == (len(model.spec.layers) - 1) * 3 * sum(range(FIRST + 1, LENGTH + 1)), "of three kv heads"
    assert 0.05 < f.share < 0.2
    assert f.recall >= 0.9
    want = ProgramScorer(model, BlasBackend()).logits(ids)
    next_ids = np.array(ids[FIRST + 1 :])

    def nats(x: F32) -> float:
        x = x[FIRST:-1]
        at = x[np.arange(len(next_ids)), next_ids] - x.max(axis=1)
        return float((np.log(np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1)) - at).mean())

    assert 0 < abs(nats(logits) - nats(want)) < 0.05
    bounded = read(3.75, 0.8, share=0.1)[1]
    assert 0.05 < bounded.share < min(0.105, f.share), "the budget is the most"


def test_B18_turned_keys_say_more_in_few_components_than_they_do_as_they_are() -> None:
    """The skewing: at equal components more is found with less fetched."""
    turned, plain = read(3.5, 0.3, share=0.15)[1], read(3.5, 0.3, share=0.15, turned=False)[1]
    assert turned.share <= plain.share
    assert turned.recall > plain.recall + 0.01


def test_B18_the_tool_writes_a_profile_that_the_engine_takes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("rehearsal_turns", ROOT / "tools" / "rehearsal_turns.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    file = tmp_path / "turns.npz"
    tool.write("nano", str(file), SAMPLE, 64)
    model, _, turns = bench()
    options = f'{{"rank": 0.5, "profile": "{file}"}}'
    config = from_kwargs(model="nano", kv_selector="infinigen", kv_budget="20%", kv_selector_config=options).selection
    assert config is not None
    got = turns_of(config, model.spec, lambda: fingerprint(model.weights))
    assert got is not None
    assert [t.shape for t in got] == [(*t.shape[:2], t.shape[2] // 2) for t in turns]
    for t in got:
        np.testing.assert_allclose(np.matmul(t.swapaxes(1, 2), t), np.tile(np.eye(t.shape[2]), (3, 1, 1)), atol=1e-5)
    assert pytest.approx(1, abs=1e-5) == np.linalg.norm(got[0][0, :, 0])
