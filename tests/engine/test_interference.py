"""H27: prompts and tokens in one step hold each other up, on the real engine (`benchmarks/engine/interference.py`)."""

from __future__ import annotations

from statistics import median

from benchmarks.engine.interference import Bench

from penstock.launch.bundled import bundled_model


def test_H27_a_step_with_a_prompt_beside_is_longer_than_one_of_decodes_alone() -> None:
    """Medians of rounds in turns; every step is known to compute what was asked for and nothing else."""
    path = bundled_model("nano")
    assert path is not None
    bench = Bench(str(path), batch=2, context=16, most=192, rounds=5, threads=1)
    bench.round(192)
    rounds = [bench.round(192) for _ in range(5)]
    alone, beside, prompt = (median(column) for column in zip(*rounds, strict=True))
    assert beside > 1.5 * alone, "who decodes waits for the prompt"
    assert prompt > 1.5 * alone
