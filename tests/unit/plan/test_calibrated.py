"""Step times as a curve: found again, never falling, kept in a file, and refused where they do not belong."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from penstock.base.errors import ConfigError
from penstock.core.machine import Machine
from penstock.core.step_shape import StepShape
from penstock.plan.calibrated import (
    KNOTS,
    CalibratedTimer,
    Calibration,
    StepCurve,
    check_spec,
    errors_of,
    fit,
    is_calibration,
    load,
    save,
)
from penstock.plan.measured import MeasuredTimer
from penstock.sim.specs import find_spec
from tests.unit.plan.test_plan_measured import shapes

CURVE = StepCurve(
    base_s=2e-3, token_s=(1e-3, 0.0, 1e-4, 1e-4, 2e-4, 2e-4, 5e-5, 5e-5, 5e-5, 9e-5), row_s=1e-5, context_s=2e-7,
    pair_s=1e-9, head_s=1e-3, logit_s=5e-5,
)  # fmt: skip


def test_a_curve_that_bends_is_found_again_where_six_costs_are_not_enough() -> None:
    truth = CalibratedTimer(CURVE, 1e9)
    samples = [(s, truth.step_s(s)) for s in shapes(1, 400)]
    found = CalibratedTimer(fit(samples), 1e9)
    unseen = [(s, truth.step_s(s)) for s in shapes(2, 200)]
    assert errors_of(found, unseen).p90 < 0.01
    assert MeasuredTimer.from_samples(samples, copy_bytes_per_s=1e9).median_error(unseen) > 0.03


def test_each_stretch_has_its_own_cost() -> None:
    timer = CalibratedTimer(CURVE, 1e9)
    assert timer.step_s(StepShape(1)) == pytest.approx(2e-3 + 1e-3)
    assert timer.step_s(StepShape(2)) == pytest.approx(3e-3)
    assert timer.step_s(StepShape(3)) == pytest.approx(3.1e-3)
    assert timer.step_s(StepShape(8)) == pytest.approx(3e-3 + 6e-4)
    assert timer.step_s(StepShape(9)) == pytest.approx(3.6e-3 + 2e-4)
    before = timer.step_s(StepShape(256))
    assert timer.step_s(StepShape(1000)) == pytest.approx(before + 744 * 9e-5), (
        "beyond the last stretch its cost goes on"
    )
    assert timer.step_s(StepShape(1, 1, 1, 1, 1)) - timer.step_s(StepShape(1, 1, 1, 1)) == pytest.approx(1.05e-3)


def test_noise_does_not_shift_the_sum() -> None:
    """Queues grow by sums: what is fitted to relative errors of measurements would be too small."""
    truth, rng = CalibratedTimer(CURVE, 1e9), random.Random(3)
    samples = [(s, truth.step_s(s) * rng.choice([0.7, 1.0, 1.3])) for s in shapes(3, 1200)]
    assert abs(errors_of(CalibratedTimer(fit(samples), 1e9), samples).total) < 0.02


def test_a_longer_step_is_never_predicted_to_be_shorter() -> None:
    rng = random.Random(4)
    samples = [(s, rng.uniform(1e-3, 1e-2)) for s in shapes(4, 300)]
    timer = CalibratedTimer(fit(samples), 1e9)
    for t in range(1, 3000, 7):
        assert timer.step_s(StepShape(t + 1, 1, 1, 1, 1)) >= timer.step_s(StepShape(t, 1, 1, 1, 1))


def calibration() -> Calibration:
    timer = CalibratedTimer(CURVE, 1e9)
    return Calibration(
        model="small", spec=find_spec("llama-3.2-1b"), settings={"max_num_seqs": 8, "ops": "native"},
        machine=Machine(num_cores=2, memory_bytes=1 << 34, available_bytes=1 << 34), kv_bytes=1 << 29, curve=CURVE,
        copy_bytes_per_s=1e9, num_samples=400, errors=errors_of(timer, [(StepShape(1), 1.0)]), version="0",
    )  # fmt: skip


def test_a_file_gives_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    save(calibration(), path)
    assert load(path) == calibration()
    assert is_calibration(str(path))
    assert not is_calibration(str(tmp_path / "none.json"))
    assert len(calibration().settings_hash) == 32


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"curve": 3}')
    with pytest.raises(ConfigError, match="holds no step times"):
        load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        save(calibration(), tmp_path / "no" / "steps.json")
    with pytest.raises(ConfigError, match="measured on small, and this model has another shape"):
        check_spec(calibration(), find_spec("llama-3.1-8b"), "steps.json")
    for broken in (
        {"row_s": -1.0},
        {"token_s": (float("nan"),)},
        {"token_s": ()},
        {"token_s": (0.0,) * (len(KNOTS) + 1)},
    ):
        with pytest.raises(ConfigError, match="damaged"):
            CalibratedTimer(msgspec.structs.replace(CURVE, **broken), 1e9)
    with pytest.raises(ConfigError, match="too few"):
        fit([(StepShape(1), 1.0)] * 63)
