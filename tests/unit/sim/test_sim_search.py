"""ExeGPT's search: as good as asking about every point, with few questions, and true on the simulator."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.base.errors import ConfigError, InputError
from penstock.plan.devices import find_device
from penstock.sim.search import GAP, Lengths, Schedules, Searchable, TensorTimer, grid, search
from penstock.sim.search_placed import HandoverLink, PlacedSchedules, layouts
from penstock.sim.search_run import SearchTarget, find, latency_of, rate_of, replay
from penstock.sim.specs import find_spec
from penstock.sim.synthetic import synthetic
from penstock.sim.workload import Workload, from_list
from tests.command import penstock

SPEC = find_spec("llama-3.1-8b")
DEVICE = find_device("a100-80g")
DEGREES = (1, 2, 4, 8)
BOTH = ("chunked", "apart")
ROOT = Path(__file__).parents[3]


def load(seed: int, *, prompt: int = 512, output: int = 128, n: int = 200, cv: float = 0.6) -> Workload:
    lengths = f"prompt={prompt}&output={output}&prompt_cv={cv}&output_cv={cv}&requests={n}"
    return synthetic(f"synthetic:poisson?rate=2&{lengths}", seed)


def every(workload: Workload, most_seqs: int = 16) -> list[Schedules]:
    """`most_seqs`: of each device."""
    lengths = Lengths.of(workload)
    return [
        Schedules(
            lengths, TensorTimer(SPEC, DEVICE, d, dtype="bfloat16", kv_dtype=None),
            degree=d, engines=8 // d, most_seqs=most_seqs * d,
        )
        for d in DEGREES
    ]  # fmt: skip


def placed(workload: Workload, degrees: tuple[int, ...] = DEGREES, most_seqs: int = 16) -> list[PlacedSchedules]:
    of = {one.degree: one for one in every(workload, most_seqs)}
    link = HandoverLink(131_072, 25e9, 16)
    return [
        PlacedSchedules(of[pd].shared_by(p), of[td].shared_by(t), link) for p, pd, t, td in layouts(8, degrees)
    ]  # fmt: skip


@pytest.mark.parametrize(("prompt", "output"), [(512, 128), (64, 256)])
@pytest.mark.parametrize("latency_s", [1.5, 3.0, 6.0, 20.0])
def test_A17_the_search_is_within_5_percent_of_every_point(prompt: int, output: int, latency_s: float) -> None:
    workload = load(1, prompt=prompt, output=output)
    compare(every(workload), latency_s, max_chunk=1024, step=64)
    compare(placed(workload, (1, 4)), latency_s, max_chunk=1024, step=128)


def compare(schedules: Sequence[Searchable], latency_s: float, **room: int) -> None:
    found = search(schedules, latency_s, **room)
    best = grid(schedules, latency_s, **room)
    if best.best is None:
        assert found.best is None
        assert found.fastest_s == pytest.approx(best.fastest_s)
        return
    assert found.best is not None
    assert found.best.latency_s <= latency_s
    assert found.best.requests_per_s >= best.best.requests_per_s / (1 + GAP) >= best.best.requests_per_s * 0.95
    assert found.num_evaluated < best.num_evaluated / 4


def test_A17_no_point_of_a_box_is_better_than_its_bound() -> None:
    rng = random.Random(5)
    for of in (*every(load(2)), *placed(load(2))[::5]):
        for schedule in of.schedules:
            for _ in range(40):
                b, c = sorted(rng.sample(range(1, 200), 2)), sorted(rng.sample(range(16, 2048), 2))
                rate, least_s = of.bounds(schedule, (b[0], b[1]), (c[0], c[1]))
                for _ in range(10):
                    point = of.point(schedule, rng.randint(*b), rng.randint(*c))
                    assert point.requests_per_s <= rate * (1 + 1e-9)
                    assert point.latency_s >= least_s * (1 - 1e-9)


def test_A17_layouts_use_all_devices_once() -> None:
    found = list(layouts(4, (1, 2)))
    assert len(found) == len(set(found))
    assert all(p * pd + t * td == 4 and p and t for p, pd, t, td in found)
    assert {(3, 1, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2), (1, 2, 1, 2)} <= set(found)


@pytest.mark.parametrize(("prompt", "output", "latency_s"), [(512, 128, 3.0), (1500, 60, 1.0), (64, 256, 4.0)])
def test_A17_devices_for_prompts_keep_the_latency_when_replayed(prompt: int, output: int, latency_s: float) -> None:
    workload = load(4, prompt=prompt, output=output, n=200)
    target = SearchTarget(SPEC, "llama-3.1-8b", {}, DEVICE, devices=8, degrees=(1, 2, 4), schedules=("placed",))
    found = find(target, workload, latency_s).best
    assert found is not None
    assert found.prompt_engines * found.prompt_degree + found.engines * found.degree == 8
    played = replay(target, found, workload)
    assert len(played.requests) == 200
    assert latency_of(played) <= latency_s
    assert 0.5 * found.requests_per_s <= rate_of(target, found, played) <= 1.2 * found.requests_per_s


@pytest.mark.parametrize(("seed", "latency_s"), [(1, 1.2), (1, 3.0), (2, 3.0), (2, 5.0)])
def test_A17_the_latency_is_met_when_the_found_point_is_replayed(seed: int, latency_s: float) -> None:
    workload = load(seed, n=120)
    target = SearchTarget(SPEC, "llama-3.1-8b", {}, DEVICE, devices=8, degrees=DEGREES, schedules=BOTH)
    found = find(target, workload, latency_s).best
    assert found is not None
    played = replay(target, found, workload)
    assert len(played.requests) == 120
    assert latency_of(played) <= latency_s
    assert played.stats.num_preemptions == 0
    rate = len(played.requests) / played.span_s * (8 // found.degree)
    # A short run has a beginning and an end with fewer sequences than the cost model's, which goes on for ever.
    assert 0.5 * found.requests_per_s <= rate <= 1.2 * found.requests_per_s


def test_a_looser_latency_gives_no_less_and_both_schedules_are_chosen() -> None:
    schedules = every(load(3))
    for one in schedules:
        one.most_seqs = 64
    found = [search(schedules, latency_s, max_chunk=1024).best for latency_s in (1.0, 2.0, 4.0, 8.0, 16.0)]
    rates = [p.requests_per_s for p in found if p is not None]
    assert len(rates) == 5
    assert all(later >= earlier / (1 + GAP) for earlier, later in pairwise(rates))
    assert {p.schedule for p in found if p is not None} == {"chunked", "apart"}
    assert len({p.degree for p in found if p is not None}) > 1, "latency is bought with devices that share the layers"


def test_what_cannot_be_is_said_with_what_can() -> None:
    target = SearchTarget(SPEC, "llama-3.1-8b", {}, DEVICE)
    with pytest.raises(InputError, match=r"no setting answers .* within 0.1 s; the fastest takes"):
        find(target, load(1), 0.1)
    with pytest.raises(ConfigError, match="3 does not divide 4 devices"):
        find(SearchTarget(SPEC, "llama-3.1-8b", {}, DEVICE, devices=4, degrees=(3,)), load(1), 5.0)
    with pytest.raises(ConfigError, match="3 does not divide the 32 attention heads"):
        find(SearchTarget(SPEC, "llama-3.1-8b", {}, DEVICE, devices=3, degrees=(3,)), load(1), 5.0)
    for devices, said in ((1, "at least 2 --devices"), (2, "one on 2 devices")):
        alone = SearchTarget(SPEC, "x", {}, DEVICE, devices=devices, degrees=(devices,), schedules=("placed",))
        with pytest.raises(ConfigError, match=said):
            find(alone, load(1), 5.0)
    with pytest.raises(InputError, match="no requests"):
        Lengths.of(from_list("none", []))


def test_a_measured_machine_is_searched_without_devices_for_prompts_and_asking_for_them_is_refused() -> None:
    steps = str(ROOT / "benchmarks/results/steps-2026-11-27.json")
    trace = "synthetic:poisson?rate=2&prompt=64&output=16&requests=10"
    args = ("sim", "search", "--trace", trace, "--device", steps, "--latency", "20")
    done = penstock(*args)
    assert done.returncode == 0, done.stderr
    assert "for prompts" not in done.stdout
    done = penstock(*args, "--schedules", "placed,apart")
    assert done.returncode == 1
    assert "placed needs several devices, and step times are of one machine" in done.stderr


def test_the_command(tmp_path: Path) -> None:
    trace = "synthetic:poisson?rate=2&prompt=512&output=128&prompt_cv=0.6&output_cv=0.6&requests=60"
    numbers = tmp_path / "x.json"
    args = ("sim", "search", "--trace", trace, "--device", "a100-80g", "--devices", "2", "--degrees", "1,2")
    done = penstock(*args, "--latency", "5", "--json", str(numbers))
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout
    report = json.loads(numbers.read_text())
    assert report["simulated"]["latency_s"] <= 5
    assert report["settings"]["max_num_batched_tokens"] >= report["settings"]["max_num_seqs"]
    for wrong, said in (
        (("--latency", "0.01"), "no setting answers"),
        (("--latency", "5", "--max-num-seqs", "3"), "the search decides it"),
        (("--latency", "5", "--degrees", "x"), "must be whole numbers"),
        (("--latency", "5", "--degrees", "4"), "does not divide"),
        (("--latency", "5", "--schedules", "x"), "is none of chunked, apart, placed"),
    ):
        done = penstock(*args, *wrong)
        assert done.returncode == 1
        assert said in done.stderr
