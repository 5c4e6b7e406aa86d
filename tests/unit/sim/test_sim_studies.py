"""The studies, small: each runs, says what its rows claim, and makes a page that stands by itself."""

from __future__ import annotations

import pytest

from penstock.plan.devices import device_preset
from penstock.sim.specs import find_spec
from penstock.sim.studies import STUDIES
from penstock.sim.studies.study import Bench, Study, page
from tests.pages import Page


def study(name: str, scale: float) -> Study:
    done = STUDIES.get(name)(Bench(find_spec("llama-3.1-8b"), device_preset("a100-80g"), scale, 0), lambda line: None)
    assert isinstance(done, Study)
    shown = "".join(Page(page(done)).texts)
    for line in done.findings:
        assert line in shown
    for table in done.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    return done


def test_A05_batching_study_continuous_beats_static_in_virtual_time() -> None:
    data = study("batching", 0.15).data
    assert data["tokens_per_s"]["fcfs"][-1] >= 1.5 * data["tokens_per_s"]["static:size=32"][-1]
    assert data["wasted"]["static:size=32"][-1] > 0.2
    assert data["wasted"]["fcfs"][-1] < 0.02
    assert data["tokens_per_s"]["fcfs"][-1] >= data["tokens_per_s"]["dynamic:timeout_s=0.5,size=32"][-1]


def test_A10_chunks_study_stall_free_halves_the_longest_waits() -> None:
    data = study("chunks", 0.1).data
    assert min(data["prefill-first"]["tbt"]) >= 2 * min(data["fcfs"]["tbt"])
    assert data["fcfs"]["ttft"][0] > min(data["fcfs"]["ttft"]), "the smallest chunk pays in TTFT"


def test_A08_swap_study_auto_is_as_good_as_the_better_mode() -> None:
    done = study("swap", 0.25)
    spans = done.data["makespan_s"]
    assert spans["swap"][0] > 1.5 * spans["recompute"][0], "a slow link"
    assert spans["swap"][-1] < spans["recompute"][-1], "a fast one"
    for auto, swap, recompute in zip(spans["auto"], spans["swap"], spans["recompute"], strict=True):
        assert auto <= 1.05 * min(swap, recompute)
    both = zip(spans["auto"], spans["swap"], spans["recompute"], strict=True)
    worst = max(auto / min(swap, recompute) for auto, swap, recompute in both)
    assert f"never worse than {worst:.2f}x the better" in done.findings[1]


def test_unknown_studies_are_refused() -> None:
    with pytest.raises(ValueError, match="batching"):
        STUDIES.get("magic")


def test_B03_memory_study_paging_holds_more_sequences_in_the_same_memory() -> None:
    data = study("memory", 0.2).data
    at = data["cv"].index(1.0)
    assert data["peak_batch"]["paged"][at] >= 2 * data["peak_batch"]["contiguous"][at]
    assert data["used"]["paged"][at] > 1.5 * data["used"]["contiguous"][at]
    assert data["makespan_s"]["paged"][at] < data["makespan_s"]["contiguous"][at]
