"""What every StepTimer owes: a schedule built on it must be sensible and replayable."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.protocols import StepTimer
from penstock.core.step_shape import EMPTY, StepShape
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import PRESETS, device_preset
from penstock.plan.measured import MeasuredTimer
from penstock.sim.specs import find_spec

SPEC = find_spec("llama-3.1-8b")


def measured() -> MeasuredTimer:
    shapes = [EMPTY.plus(64 * i, n, 1) for i in range(12) for n in (1, 7, 64, 300)]
    samples = [(s, 1e-3 + 2e-6 * s.num_tokens + 3e-9 * s.num_pairs + 1e-8 * s.num_context) for s in shapes]
    return MeasuredTimer.from_samples(samples, copy_bytes_per_s=1e10)


TIMERS: list[StepTimer] = [
    *(RooflineTimer(SPEC, device_preset(name), dtype="bfloat16") for name in sorted(PRESETS)),
    measured(),
]
sizes = st.integers(0, 100_000)
shapes = st.builds(StepShape, sizes, st.integers(0, 4096), sizes, st.integers(0, 10**9), st.integers(0, 4096))


@pytest.mark.parametrize("timer", TIMERS, ids=lambda t: t.name)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=shapes, more=shapes)
def test_more_work_never_takes_less_time(timer: StepTimer, shape: StepShape, more: StepShape) -> None:
    base = timer.step_s(shape)
    assert 0 <= base < 1e6
    assert timer.step_s(shape) == base, "a timer is frozen: the same shape, the same time"
    for i in range(len(shape)):
        grown = StepShape(*(v + (more[i] if j == i else 0) for j, v in enumerate(shape)))
        assert timer.step_s(grown) >= base


@pytest.mark.parametrize("timer", TIMERS, ids=lambda t: t.name)
def test_copies_take_time_by_their_bytes(timer: StepTimer) -> None:
    times = [timer.copy_s(n) for n in (0, 1, 10**3, 10**6, 10**9)]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] > 0
    assert timer.name


def test_a_saved_law_is_the_same_law(tmp_path: Path) -> None:
    timer = measured()
    timer.save(tmp_path / "law.json")
    again = MeasuredTimer.load(tmp_path / "law.json")
    for shape in (EMPTY, EMPTY.plus(100, 7, 1), EMPTY.plus(0, 512)):
        assert again.step_s(shape) == timer.step_s(shape)
