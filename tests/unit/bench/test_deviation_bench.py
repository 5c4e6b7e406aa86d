"""The arithmetic of how far an engine lies from float32, on made-up logits, and what is read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks.quality.deviation import FIRST, Exact, measure, passages, read_texts, summary

from penstock.eval.compare import divergence
from penstock.eval.perplexity import Window, log_probs
from penstock.families.registry import open_model
from penstock.launch.bundled import bundled_model
from penstock.launch.tokenizer import load_tokenizer

T, V = 12, 3000


def made(seed: int, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((T, V))).astype(np.float32)


def test_figures_are_those_of_whole_tables_of_logarithms() -> None:
    """Logits far from 0, too, where a normaliser that forgets the largest overflows."""
    exact = made(0)
    near = (exact + made(1, 0.05) + 300).astype(np.float32)
    found = Exact(exact).deviation(near)
    window = Window(tuple(range(T + 1)), 1)
    p, q = log_probs(exact), log_probs(near)
    top = np.argsort(-p, axis=1)[:, :5]
    far = [abs(p[t, i] - q[t, i]) for t in range(T) for i in top[t]]
    assert found["kl"] == pytest.approx(divergence(exact, near, window).mean(), abs=1e-6)
    assert found["kl"] > 1e-4
    assert found["top5"] == pytest.approx(np.mean(far), abs=1e-5)
    assert found["same"] == np.mean(p.argmax(axis=1) == q.argmax(axis=1))


def test_of_two_tokens_by_hand() -> None:
    exact = np.log(np.array([[0.5, 0.25, 0.125, 0.0625, 0.0625]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.125, 0.0625, 0.0625]], np.float32))
    found = Exact(exact).deviation(other)
    assert found["kl"] == pytest.approx(0.25 * math.log(2), abs=1e-6)
    assert found["top5"] == pytest.approx(2 * math.log(2) / 5, abs=1e-6)
    assert found["same"] == 0.0


def test_first_tokens_lead_in_and_differences_are_taken_text_by_text() -> None:
    """An engine that is wrong only before the eighth token has no deviation; one that is farther off than llama.cpp by
    the same on every text is so surely, however unlike the texts are."""
    texts = np.arange(6 * T, dtype=np.int32).reshape(6, T)

    def off(ids: list[int], by: float) -> np.ndarray:
        logits = made(ids[0])
        logits[:, 0] += by
        return logits

    def late(ids: list[int]) -> np.ndarray:
        logits = made(ids[0])
        logits[: FIRST - 1] = 0
        return logits

    engines = {
        "late": late,
        "penstock": lambda ids: off(ids, 6.0 + ids[0] / 9),
        "llama.cpp": lambda ids: off(ids, 5.0 + ids[0] / 9),
    }
    found = measure(lambda ids: made(ids[0]), engines, texts, jobs=2)
    assert found["late"]["same"] == [1.0] * 6
    assert np.abs(found["late"]["kl"]).max() < 1e-6
    rows = {row["engine"]: row for row in summary(found)}
    more = rows["penstock"]["kl_minus_llama_cpp"]
    assert more["mean"] == pytest.approx(rows["penstock"]["kl"]["mean"] - rows["llama.cpp"]["kl"]["mean"])
    assert 0 < more["low"] <= more["mean"] <= more["high"]
    assert rows["penstock"]["kl"]["low"] < rows["llama.cpp"]["kl"]["high"]
    assert "kl_minus_llama_cpp" not in rows["llama.cpp"]


def test_texts_come_from_all_files_in_turns_and_none_twice(tmp_path: Path) -> None:
    prose, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    prose.write_text(
        "\n\n".join(f"Once there were {n} boats on the sea, and all of them went home." for n in range(80))
    )
    asked = [{"question": f"How far is {n}? " * 9, "answer": f"It is {n} miles. " * 9} for n in range(5)]
    lines.write_text("\n".join(json.dumps(line) for line in asked))
    assert len(passages(prose)) == 10
    assert all(text.startswith("How far") and "miles" in text for text in passages(lines))
    folder = bundled_model("nano")
    assert folder is not None
    nano = open_model(folder)
    tokenizer = load_tokenizer(nano.tokenizer, nano.spec)
    assert tokenizer is not None
    texts = read_texts([prose, lines], tokenizer, 8, 24)
    assert texts.shape == (8, 24)
    assert ["How far" in tokenizer.decode(ids) for ids in texts.tolist()] == [False, True] * 4
    assert len({tuple(ids) for ids in texts.tolist()}) == 8
    with pytest.raises(SystemExit, match="name more of --texts"):
        read_texts([prose, lines], tokenizer, 16, 24)
