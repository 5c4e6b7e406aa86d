"""Single cases of the simulator: the models it knows by name, and what its charts show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.report.chart import WIDTH, Chart, Line
from penstock.report.numbers import seconds
from penstock.sim.charts import _by_arrival, _cdf
from penstock.sim.metrics import Distribution
from penstock.sim.specs import SPECS
from penstock.sim.studies.swap import worst
from penstock.sim.traces import open_trace
from tests.unit.sim.test_sim_report import result
from tests.unit.sim.test_sim_traces import ALIBABA


@pytest.mark.parametrize(
    ("name", "num_params"),
    [("llama-3.2-1b", 1_235_814_400), ("llama-3.2-3b", 3_212_749_824), ("llama-3.1-8b", 8_030_261_248),
     ("llama-3.1-70b", 70_553_706_496)],
)  # fmt: skip
def test_a_model_known_by_name_is_the_published_one(name: str, num_params: int) -> None:
    """The counts of parameters of the published checkpoints, and the ids of their tokenizer."""
    spec = SPECS[name]
    assert spec.num_params == num_params
    assert (spec.vocab_size, spec.bos_token_id, spec.eos_token_ids) == (128_256, 128_000, (128_001,))


@pytest.mark.parametrize(("value", "text"), [(1e-3, "1 ms"), (1.0, "1 s"), (120, "2 min"), (7199, "120 min")])
def test_a_duration_at_a_limit_has_the_larger_unit(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize("labelled", [True, False])
def test_dots_of_a_distribution_are_at_the_percentiles_that_they_name(labelled: bool) -> None:
    """Of 1 to 1,000: the median and the 99th percentile always, the 90th where there is room for labels."""
    values = np.arange(1.0, 1001.0)
    dots = _cdf(Distribution.of(values), "x", 0, labelled).dots
    want = [(500.0, 0.5), (900.0, 0.9), (990.0, 0.99)] if labelled else [(500.0, 0.5), (990.0, 0.99)]
    assert [dot[:2] for dot in dots] == want
    assert [dot[2].partition(" ")[0] for dot in dots] == (["p50", "p90", "p99"] if labelled else ["", ""])


def test_stretches_of_arrival_end_with_the_last_request() -> None:
    run = result("x", 10)
    arrival = np.array([*range(9), 1000.0])
    waits = np.array([1.0] * 9 + [7.0])
    shown = _by_arrival(replace(run, requests=replace(run.requests, arrival_s=arrival, first_token_s=arrival + waits)),
                        50, 0, "p50")  # fmt: skip
    assert (list(shown.xs), list(shown.ys)) == ([250.0, 750.0], [1.0, 7.0])


def test_equal_ratios_are_equally_far_on_a_logarithmic_axis() -> None:
    chart = Chart("t", seconds, seconds, log_x=True, lines=[Line("a", [1.0, 1000.0], [0.0, 1.0], 0)])
    x = chart._x_scale(1.0, 1000.0)
    assert x(1000.0) - x(100.0) == pytest.approx(x(10.0) - x(1.0))
    assert (x(0.1), x(1.0)) == (x(1.0), chart._x_scale(0.5, 9.0)(0.5)), "what is too small stands at the left edge"
    assert x(1000.0) < WIDTH


@pytest.mark.parametrize("content", ["", ALIBABA.splitlines()[0] + "\n", ALIBABA])
def test_a_trace_tells_how_many_requests_it_has(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    workload = open_trace(path, format="alibaba")
    assert workload.num_requests == len(list(workload))


def test_the_finding_on_swapping_is_of_the_worst_link() -> None:
    spans = {"auto": [2.0, 3.0, 4.0], "recompute": [2.0, 2.0, 9.0], "swap": [8.0, 4.0, 4.0]}
    assert worst(spans) == 1.5
