"""The measured timer: finds a law it is shown, is never negative, survives a file, and predicts a real engine."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls as scipy_nnls

from penstock.base.errors import ConfigError
from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.protocols import StepTimer
from penstock.core.step_shape import EMPTY, StepShape, shape_of
from penstock.plan.measured import MIN_SAMPLES, MeasuredTimer, Sample, StepLaw, nnls
from tests.engine.harness import Knobs, real_engine, request, run, tiny

LAW = StepLaw(
    base_s=2e-3, token_s=3e-5, row_s=1e-4, context_s=2e-7, pair_s=1e-9, logit_s=5e-5, copy_bytes_per_s=1e9,
    num_samples=0, median_error=0.0,
)  # fmt: skip


def shapes(seed: int, n: int) -> list[StepShape]:
    """Steps as a scheduler makes them: decodes, and sometimes a chunk of a prompt."""
    rng = random.Random(seed)
    out = []
    for _ in range(n):
        shape = EMPTY
        for _ in range(rng.randrange(0, 20)):
            shape = shape.plus(rng.randrange(2000), 1, 1)
        if rng.random() < 0.5 or shape == EMPTY:
            shape = shape.plus(rng.randrange(1000), rng.randrange(1, 500), rng.randrange(2))
        out.append(shape)
    return out


def test_a_law_is_found_again() -> None:
    truth = MeasuredTimer(LAW)
    timer: StepTimer = MeasuredTimer.from_samples([(s, truth.step_s(s)) for s in shapes(1, 200)], copy_bytes_per_s=1e9)
    for shape in shapes(2, 50):
        assert timer.step_s(shape) == pytest.approx(truth.step_s(shape), rel=1e-6)
    assert timer.copy_s(3 * 10**9) == 3.0
    assert timer.name == "measured"


def test_noise_and_interruptions_hardly_move_it() -> None:
    truth, rng = MeasuredTimer(LAW), random.Random(3)
    samples = [
        (s, truth.step_s(s) * rng.uniform(0.9, 1.1) * (50 if rng.random() < 0.03 else 1)) for s in shapes(3, 600)
    ]
    timer = MeasuredTimer.from_samples(samples, copy_bytes_per_s=1e9)
    assert timer.law.num_samples == 600
    assert 0.01 < timer.law.median_error < 0.1
    assert timer.law.median_error == pytest.approx(timer.median_error(samples))
    assert timer.median_error([(s, truth.step_s(s)) for s in shapes(4, 100)]) < 0.1


def test_a_file_gives_back_the_same_timer(tmp_path: Path) -> None:
    timer = MeasuredTimer(LAW)
    timer.save(tmp_path / "law.json")
    assert MeasuredTimer.load(tmp_path / "law.json").law == LAW
    for text, says in (("{}", "missing"), ("x", "not a cost table"), ('{"base_s": "fast"}', "not a cost table")):
        (tmp_path / "law.json").write_text(text)
        with pytest.raises(ConfigError, match=says):
            MeasuredTimer.load(tmp_path / "law.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        MeasuredTimer.load(tmp_path / "absent.json")


def test_laws_that_could_shrink_are_refused(tmp_path: Path) -> None:
    MeasuredTimer(LAW).save(tmp_path / "law.json")
    text = (tmp_path / "law.json").read_text()
    for old, new in (("0.00003", "-0.00003"), ("1000000000.0", "0")):
        assert old in text
        (tmp_path / "law.json").write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match="finite and not negative"):
            MeasuredTimer.load(tmp_path / "law.json")


def test_too_few_steps_are_refused() -> None:
    samples = [(s, 0.1) for s in shapes(5, MIN_SAMPLES - 1)] + [(EMPTY, 0.0)] * 99
    with pytest.raises(ConfigError, match=f"{MIN_SAMPLES - 1} measured steps"):
        MeasuredTimer.from_samples(samples, copy_bytes_per_s=1e9)
    with pytest.raises(ConfigError, match="no measured steps"):
        MeasuredTimer(LAW).median_error([])


def test_equal_steps_still_give_a_law() -> None:
    timer = MeasuredTimer.from_samples([(StepShape(8, 8, 80, 80, 8), 0.5)] * 20, copy_bytes_per_s=1e9)
    assert timer.step_s(StepShape(8, 8, 80, 80, 8)) == pytest.approx(0.5)
    assert timer.law.median_error == pytest.approx(0.0, abs=1e-9)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 30), columns=st.integers(1, 7), negative=st.booleans())
def test_nnls_is_as_good_as_scipy_s(seed: int, rows: int, columns: int, negative: bool) -> None:
    rng = np.random.default_rng(seed)
    a = rng.random((rows, columns)) * 10.0 ** rng.integers(-6, 7, columns) * (rng.random(columns) > 0.1)
    b = rng.standard_normal(rows) if negative else rng.random(rows)
    mine = nnls(a, b)
    assert (mine >= 0).all()
    # Compared by what is minimised: with fewer rows than columns there are many answers.
    lengths = np.linalg.norm(a, axis=0)
    lengths[lengths == 0] = 1
    _, best = scipy_nnls(a / lengths, b)
    assert np.linalg.norm(a @ mine - b) <= best * (1 + 1e-6) + 1e-7


class Spy:
    """An executor that notes the shape and the duration of every step it passes on."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self._open: list[StepShape] = []
        self.depth = inner.depth  # type: ignore[attr-defined]
        self.samples: list[Sample] = []

    def submit(self, output: SchedulerOutput) -> None:
        self._open.append(shape_of(output.scheduled))
        self._inner.submit(output)  # type: ignore[attr-defined]

    def collect(self) -> StepOutput:
        result: StepOutput = self._inner.collect()  # type: ignore[attr-defined]
        self.samples.append((self._open.pop(0), result.duration_s))
        return result

    def close(self) -> None:
        self._inner.close()  # type: ignore[attr-defined]


def measure(seed: int, *, budget: int, longest: int) -> list[Sample]:
    """The steps of a load on the tiny Llama."""
    spec, weights = tiny("llama_gqa")
    core = real_engine(spec, weights, Knobs(budget=budget, num_blocks=128))
    core.executor = spy = Spy(core.executor)
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 60) for _ in range(rng.randrange(1, longest))] for _ in range(40)]
    run(core, [request(prompt, max_tokens=rng.randrange(1, 30)) for prompt in prompts])
    return spy.samples


def test_fitted_on_one_load_it_predicts_another() -> None:
    measure(0, budget=16, longest=20)  # the first steps of a process are slow
    fitted = measure(1, budget=24, longest=60)
    other = measure(2, budget=16, longest=30)
    timer = MeasuredTimer.from_samples(fitted, copy_bytes_per_s=1e9)
    error = timer.median_error(other)
    print(
        f"{len(fitted)} steps fitted with {timer.law.median_error:.1%} median error, {len(other)} others: {error:.1%}"
    )
    assert error < 0.6
