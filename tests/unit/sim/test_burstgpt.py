"""K18: BurstGPT's columns, and the generator in its place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.base.errors import InputError
from penstock.sim.arrivals import fit_gamma
from penstock.sim.synthetic import synthetic
from penstock.sim.traces import TraceOptions, open_trace
from penstock.sim.workload import TimedRequest

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
ROWS = (
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,230,1317,Conversation log\n"
    "118,GPT-4,417,0,417,API log\n"  # it failed
    "185.5,GPT-4,1360,647,2007,API log\n"
    "1106,ChatGPT,0,0,0,Conversation log\n"
)
LATER = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,a1,2.5,ChatGPT,472,18,490,Conversation log\n"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "BurstGPT_1.csv"
    path.write_text(text)
    return path


def test_K18_the_columns_are_read_and_failures_left_out(tmp_path: Path) -> None:
    workload = open_trace(write(tmp_path, HEADER + ROWS))
    expected = [
        TimedRequest(0.0, 472, 18, tenant="ChatGPT"), TimedRequest(40.0, 1087, 230, tenant="ChatGPT"),
        TimedRequest(180.5, 1360, 647, tenant="GPT-4"),
    ]  # fmt: skip
    assert list(workload) == expected
    assert list(workload) == expected  # every reading begins anew
    assert workload.num_requests == 5
    assert list(open_trace(write(tmp_path, LATER))) == expected[:1]
    assert list(open_trace(write(tmp_path, "\ufeff" + HEADER + ROWS))) == expected
    assert list(open_trace(write(tmp_path, HEADER), format="burstgpt")) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("x,ChatGPT,4,4,8,l\n", ":7: Timestamp is 'x', not a number"),
        ("1107,ChatGPT,four,4,8,l\n", ":7: Request tokens is 'four', not a number"),
        ("1107,ChatGPT,4,-4,8,l\n", ":7: Response tokens is '-4', not a whole number from 0"),
        ("1107,ChatGPT,4\n", ":7: has 3 columns, not 6"),
        ("3,ChatGPT,4,4,8,l\n", ":7: arrived before the line above it"),
    ],
)
def test_K18_a_broken_line_is_one_sentence_with_file_and_line(tmp_path: Path, row: str, said: str) -> None:
    path = write(tmp_path, HEADER + ROWS + row)
    with pytest.raises(InputError, match="mend the line") as caught:
        list(open_trace(path))
    assert str(caught.value).startswith(f"{path}{said}")
    workload = open_trace(path, TraceOptions(skip_broken=True))
    assert len(list(workload)) == 3
    assert workload.broken.count == 1


def test_a_file_without_a_column_is_told_which(tmp_path: Path) -> None:
    path = write(tmp_path, "Timestamp,Model,Request tokens\n")
    with pytest.raises(InputError, match=r":1: the header lacks Response tokens, Total tokens, Log Type"):
        list(open_trace(path, format="burstgpt"))


def test_K18_the_generator_has_the_burstiness_and_the_lengths_of_the_model() -> None:
    requests = list(synthetic("synthetic:burstgpt?rate=4&requests=20000", 5))
    rate, cv = fit_gamma(r.arrival_s for r in requests)
    assert rate == pytest.approx(4, rel=0.05)
    assert cv == pytest.approx(2**0.5, rel=0.05)
    gaps = np.diff([r.arrival_s for r in requests])
    gamma = np.random.default_rng(0).gamma(0.5, 0.5, 200_000)  # shape 0.5, mean 1/4
    for q in (0.25, 0.5, 0.75, 0.95):
        assert np.quantile(gaps, q) == pytest.approx(float(np.quantile(gamma, q)), rel=0.08)
    lengths = np.arange(1, 1024)
    chances = lengths**-1.1 / (lengths**-1.1).sum()
    for values in ([r.num_prompt for r in requests], [r.num_output for r in requests]):
        assert 1 == min(values) < max(values) <= 1023
        for k in (1, 10, 100):
            assert np.mean(np.array(values) <= k) == pytest.approx(chances[:k].sum(), abs=0.015)
    other = list(synthetic("synthetic:burstgpt?rate=4&cv=3&requests=20000&prompt=50&output_zipf=0&output=7", 5))
    assert fit_gamma(r.arrival_s for r in other)[1] == pytest.approx(3, rel=0.1)
    assert max(r.num_prompt for r in other) == 50
    assert {r.num_output for r in other} == {7}
    assert list(synthetic("synthetic:burstgpt?rate=4&requests=50", 5)) == requests[:50]


def test_K18_the_generator_is_fitted_to_a_trace_by_its_rate_and_variation(tmp_path: Path) -> None:
    """From a file to a fit to made-up arrivals of the same burstiness."""
    rng = np.random.default_rng(8)
    times = np.cumsum(rng.gamma(0.2, 5.0 / 2, 5000))  # rate 2, cv sqrt(5)
    path = write(tmp_path, HEADER + "".join(f"{t:.6f},ChatGPT,10,5,15,API log\n" for t in times))
    rate, cv = fit_gamma(r.arrival_s for r in open_trace(path))
    assert (rate, cv) == (pytest.approx(2, rel=0.1), pytest.approx(5**0.5, rel=0.1))
    again = fit_gamma(r.arrival_s for r in synthetic(f"synthetic:burstgpt?rate={rate}&cv={cv}&requests=20000", 1))
    assert again == (pytest.approx(rate, rel=0.1), pytest.approx(cv, rel=0.1))
    with pytest.raises(InputError, match="three different times"):
        fit_gamma([1.0, 1.0, 1.0])


@pytest.mark.parametrize("wrong", ["prompt_zipf=-1", "prompt_cv=1", "prompt=9999999", "rate=0", "burst=3"])
def test_a_senseless_number_is_named(wrong: str) -> None:
    with pytest.raises(InputError, match=wrong.partition("=")[0]):
        synthetic(f"synthetic:burstgpt?rate=1&{wrong}" if "rate" not in wrong else f"synthetic:burstgpt?{wrong}", 0)
