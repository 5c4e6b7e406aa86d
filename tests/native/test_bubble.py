"""H03: how long stages wait for each other, against the formula; and that one step is not quicker than its stages."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from penstock.ops.native.abi import Kind
from penstock.ops.native.program import NativeProgram
from tests.native.running import pytestmark_native
from tests.native.test_model import weights_as
from tests.native.test_stages import Staged

pytestmark = pytestmark_native
WORK_S = 0.04
"""Of a stage with one part: slept, so that it does not matter how many cores there are."""


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part lasts as long on every stage, between what it takes from the stage before and what it gives."""
    run = NativeProgram.run

    def lasting(self: NativeProgram, args: Any, first: int = 0, last: int | None = None) -> None:
        ops = self._keep[0]
        if first > 0:
            return run(self, args, first, last)
        taken = next(i for i, op in enumerate(ops) if op.kind != Kind.RECEIVE)
        if taken:
            run(self, args, 0, taken)
        time.sleep(WORK_S)
        return run(self, args, taken, last)

    monkeypatch.setattr(NativeProgram, "run", lasting)


def waits_of(staged: Staged) -> list[float]:
    """Seconds that each stage has waited so far: for rows, for a slot, and for hidden states at the end."""
    everyone = staged.comms[0].exchange
    found = [everyone.waited_s(rank) for rank in range(len(staged.ranks))]
    for cut, channel in enumerate(staged.channels):
        found[cut] += channel.sent.waited_s
        found[cut + 1] += channel.received.waited_s
    return found


@pytest.mark.parametrize(("stages", "parts"), [(2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (4, 8)])
def test_H03_the_share_of_waiting_is_what_the_formula_says(stages: int, parts: int, slow: None) -> None:
    """S stages and M parts: (S - 1) / (M + S - 1) of all time is waited, whatever a part costs."""
    spec, weights = weights_as(FOUR, "float32")
    staged = Staged(spec, weights, stages, parts=parts)
    ids = [3 + i * 7 % 50 for i in range(32)]
    staged.run({"warm": (ids, [31])})
    found: list[tuple[float, list[float]]] = []
    for seq in "abc":  # a machine that is busy makes some of them longer
        before, began = waits_of(staged), time.perf_counter()
        staged.run({seq: (ids, [31])})
        seconds = time.perf_counter() - began
        found.append((seconds, [b - a for a, b in zip(before, waits_of(staged), strict=True)]))
    seconds, waited = min(found)
    share, formula = sum(waited) / (stages * seconds), (stages - 1) / (parts + stages - 1)
    assert share == pytest.approx(formula, abs=0.05), (waited, seconds)
    assert seconds >= (parts + stages - 1) * WORK_S


@pytest.mark.parametrize("stages", [2, 4])
def test_H03_one_token_takes_as_long_as_all_stages_together(stages: int, slow: None) -> None:
    """Stages bring more steps at a time, never a quicker one."""
    spec, weights = weights_as(FOUR, "float32")
    staged = Staged(spec, weights, stages, parts=8)
    staged.run({"a": ([5, 6, 7], [2])})
    began = time.perf_counter()
    (logits, *_) = staged.run({"a": ([8], [0])})
    assert time.perf_counter() - began >= stages * WORK_S
    assert np.isfinite(logits["a"]).all()


FOUR = "slots"
"""Of four layers."""
