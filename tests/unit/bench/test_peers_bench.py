"""The comparison with other engines, on made up ones: turns, resuming, failures, arithmetic, correctness."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.peers import engines, measure, report, results, rows, workloads
from benchmarks.peers import run as bench
from benchmarks.peers.engines import Place, Spec, make_groups
from rich.console import Console

from tests.pages import Page

A, B = Spec("fake", "bf16"), Spec("fake", "int8")
QUIET = Console(file=io.StringIO())


# -- what is asked -----------------------------------------------------------------------------------------------


def test_workloads_are_the_same_everywhere_and_differ_by_repeat() -> None:
    w3 = workloads.workload("W3", 0).requests
    assert (sum(len(p) for p, _ in w3), sum(n for _, n in w3)) == (8852, 2157)
    assert workloads.workload("W3", 0) == workloads.workload("W3", 0)
    again = workloads.workload("W3", 1).requests
    assert [(len(p), n) for p, n in again] == [(len(p), n) for p, n in w3]
    assert all(a != b for (a, _), (b, _) in zip(w3, again, strict=True))
    w4 = workloads.workload("W4", 0)
    prefixes = {tuple(p[:512]) for p, _ in [*w4.before, *w4.requests]}
    assert len(prefixes) == 1
    assert len({tuple(p) for p, _ in [*w4.before, *w4.requests]}) == 17
    ((prompt, new),) = workloads.workload("W1", 2).requests
    assert (len(prompt), new) == (128, 128)
    assert all(max(p) < 300 for p, _ in workloads.workload("W3", 0, highest=300).requests)


def test_engines_take_turns_and_the_first_turn_goes_round() -> None:
    group = [A, B, Spec("penstock", "bf16")]
    turns = [bench.order(group, n) for n in range(3)]
    assert [t[0] for t in turns] == group
    assert all(set(t) == set(group) for t in turns)
    found = list(bench.cells(group, "m", ["W1", "W3"], {"W1": 2, "W3": 1}))
    assert [(c.workload, c.repeat) for c in found] == [("W1", 0)] * 3 + [("W1", 1)] * 3 + [("W3", 0)] * 3
    assert len({c.key for c in found}) == 9


def test_groups_hold_the_anchor_and_ours_and_fit_into_memory() -> None:
    names = ["penstock:bf16", "penstock:int8", "vllm:bf16", "openvino:bf16", "llamacpp:bf16", "vllm:int8",
             "openvino:int8", "llamacpp:q8_0"]  # fmt: skip
    specs = [Spec.parse(n) for n in names]
    anchor = Spec.parse("openvino:bf16")
    sizes = dict.fromkeys(specs, 1)
    groups = make_groups(specs, anchor=anchor, sizes=sizes, memory_bytes=100)
    assert all(anchor in g and len(g) <= 4 for g in groups)
    assert {s for g in groups for s in g} == set(specs)
    for group in groups:
        for bits in {s.bits for s in group if s != anchor}:
            assert any(s.engine == "penstock" and s.bits == bits for s in group)
    small = make_groups(specs, anchor=anchor, sizes=sizes, memory_bytes=3)
    assert all(len(g) <= 3 for g in small)
    assert {s for g in small for s in g} == set(specs)
    assert make_groups(specs[:1], anchor=None, sizes=sizes, memory_bytes=1) == [specs[:1]]
    only = make_groups(specs[:2], anchor=specs[0], sizes=sizes, memory_bytes=100)
    assert only == [[specs[0], specs[1]]], "a group that is part of another one says nothing new"


def test_a_spec_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no engine"):
        Spec.parse("nobody:bf16")
    with pytest.raises(ValueError, match="measured at"):
        Spec.parse("vllm:q4_0")


def test_what_is_not_installed_is_a_sentence(tmp_path: Path) -> None:
    place = Place(tmp_path)
    for name in ("vllm:bf16", "openvino:int8", "onnxruntime:int4"):
        assert "not installed" in str(engines.problem(Spec.parse(name), "m", place))
    assert "missing" in str(engines.problem(Spec.parse("penstock:bf16"), "no-such-model", place))
    assert engines.problem(A, "m", place) is None


# -- what is made of time stamps ---------------------------------------------------------------------------------


def test_figures_of_time_stamps() -> None:
    stream = [(0.5, 1), (0.6, 2), (0.9, 4), (1.0, 5)]  # 0.3 s brought two tokens
    assert measure.ttft_s(stream) == 0.5
    assert measure.decode_tps(stream) == pytest.approx(4 / 0.5)
    assert measure.itl_s(stream) == pytest.approx(np.median([0.1, 0.15, 0.15, 0.1]))
    assert measure.decode_tps([(0.5, 1)]) is None
    found = measure.figures([([1] * 10, 5), ([1] * 30, 1)], [stream, [(2.0, 1)]], 2.0)
    assert found["output_tps"] == 3.0
    assert found["total_tps"] == 23.0
    assert found["ttft_s"] == 1.25
    assert found["prefill_tps"] == 20.0
    assert found["decode_tps"] == pytest.approx(8.0)
    with pytest.raises(ValueError, match="request 0 got 5 tokens, not 6"):
        measure.figures([([1], 6)], [stream], 1.0)
    with pytest.raises(ValueError, match="got 0 tokens"):
        measure.figures([([1], 6)], [[]], 1.0)


def test_tokens_of_several_count_while_all_decode() -> None:
    early, late = [(1.0, 1), (5.0, 9)], [(2.0, 1), (3.0, 2), (4.0, 7), (6.0, 8)]
    # From 2 to 5 s: six of the first, whose tokens come evenly, and 6.5 of the second.
    assert measure.together_tps([early, late]) == pytest.approx((6 + 6.5) / 3)
    assert measure.together_tps([[(1.0, 1), (2.0, 5)], [(3.0, 1), (4.0, 5)]]) is None


# -- the runner --------------------------------------------------------------------------------------------------


def settings(folder: Path, **options: Any) -> bench.Settings:
    given = {"fake:bf16": {"name": "A"}, "fake:int8": {"name": "B"}}
    for spec, more in options.pop("by_spec", {}).items():
        given[spec] |= more
    log = {"fake": {"log": str(folder / "log")}}
    return bench.Settings(Place(folder), 1, cell_s=options.pop("cell_s", 20.0), start_s=20.0, options=given | log,
                          **options)  # fmt: skip


def go(folder: Path, s: bench.Settings, works: tuple[str, ...] = ("W0",), repeats: int = 2) -> int:
    with results.opened(folder / "out.jsonl") as out:
        num = dict.fromkeys(works, repeats)
        return bench.run([[A, B]], ["m"], works, num, s, out, QUIET, probe_bytes=4 << 20)


def log_of(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def alive(folder: Path) -> list[int]:
    """Engines that were started and still run."""
    found = []
    for pid in (folder / "log.pids").read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
            found.append(int(pid))
    return found


def cells_of(folder: Path) -> dict[str, Any]:
    return results.latest(results.read(folder / "out.jsonl"), "cell")


def test_measurements_are_interleaved_after_a_warm_up_of_each(tmp_path: Path) -> None:
    assert go(tmp_path, settings(tmp_path)) == 0
    runs = [line.split()[0] for line in log_of(tmp_path) if "run" in line]
    assert "".join(runs) == "AA" + "BB" + "B" + "A", "a warm-up before each first cell, then the turns"
    found = cells_of(tmp_path)
    assert [(c["precision"], c["repeat"]) for c in found.values()] == [
        ("bf16", 0),
        ("int8", 0),
        ("int8", 1),
        ("bf16", 1),
    ]
    for cell in found.values():
        assert cell["probe_before"] > 0 < cell["probe_after"]
        assert cell["figures"]["wall_s"] > 0
        assert [len(ids) for ids in cell["tokens"]] == [8, 8]


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    assert go(tmp_path, settings(tmp_path), repeats=1) == 0
    file = tmp_path / "out.jsonl"
    first = file.read_bytes()
    file.write_bytes(first + b'{"kind": "cell", "key": "torn')
    (tmp_path / "log").unlink()
    assert go(tmp_path, settings(tmp_path), repeats=2) == 0
    runs = [line.split()[0] for line in log_of(tmp_path) if "run" in line]
    assert "".join(runs) == "BB" + "AA", "only the second repeat, each after a warm-up"
    assert file.read_bytes().startswith(first)
    assert b"torn" not in file.read_bytes()
    assert len(cells_of(tmp_path)) == 4
    (tmp_path / "log").unlink()
    assert go(tmp_path, settings(tmp_path), repeats=2) == 0
    assert not (tmp_path / "log").exists(), "nothing was left, so nothing was started"


@pytest.mark.parametrize("freeze_idle", [False, True], ids=["running", "frozen"])
def test_sigkill_in_the_middle_leaves_a_file_that_can_be_continued(tmp_path: Path, freeze_idle: bool) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit.bench.test_peers_bench import *\n"
        "p = Path(sys.argv[1]); s = settings(p, by_spec={'fake:int8': {'hang': 2}})\n"
        f"s.freeze_idle = {freeze_idle}; go(p, s)"
    )
    root = Path(__file__).parents[3]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env, cwd=root) as child:
        file = tmp_path / "out.jsonl"
        for _ in range(600):
            if file.exists() and b'"figures"' in file.read_bytes() and "B run" in (tmp_path / "log").read_text():
                break
            assert child.poll() is None
            time.sleep(0.05)
        child.kill()
        child.wait()
    for _ in range(200):
        if not alive(tmp_path):
            break
        time.sleep(0.05)
    assert not alive(tmp_path), "engines do not outlive the run, not even one that is busy"
    assert len(cells_of(tmp_path)) == 1
    assert go(tmp_path, settings(tmp_path)) == 0
    assert len(cells_of(tmp_path)) == 4


def test_failures_are_results_and_can_be_retried(tmp_path: Path) -> None:
    broken = {"fake:int8": {"fail": 2}}
    assert go(tmp_path, settings(tmp_path, by_spec=broken)) == 2
    errors = [c for c in cells_of(tmp_path).values() if "error" in c]
    assert {c["precision"] for c in errors} == {"int8"}
    assert "made to fail" in errors[0]["error"]
    (tmp_path / "log").unlink()
    assert go(tmp_path, settings(tmp_path)) == 0
    assert not (tmp_path / "log").exists(), "failures are not retried unless asked"
    assert go(tmp_path, settings(tmp_path, retry_failed=True)) == 0
    assert not [c for c in cells_of(tmp_path).values() if "error" in c]


def test_an_engine_that_dies_is_started_again(tmp_path: Path) -> None:
    assert go(tmp_path, settings(tmp_path, by_spec={"fake:int8": {"die": 2}})) == 2
    assert log_of(tmp_path).count("B start") == 2
    assert log_of(tmp_path).count("A start") == 1
    assert all("status 9" in c["error"] for c in cells_of(tmp_path).values() if c["precision"] == "int8")


def test_an_engine_that_hangs_is_killed(tmp_path: Path) -> None:
    assert go(tmp_path, settings(tmp_path, by_spec={"fake:int8": {"hang": 2}}, cell_s=0.4), repeats=1) == 1
    (error,) = [c["error"] for c in cells_of(tmp_path).values() if "error" in c]
    assert error == "no answer to 'run' within 0.4 s"
    assert not alive(tmp_path)


def test_an_engine_that_does_not_start_says_why_and_is_not_tried_for_ever(tmp_path: Path) -> None:
    assert go(tmp_path, settings(tmp_path, by_spec={"fake:int8": {"refuse": "no licence"}}), repeats=4) == 4
    assert log_of(tmp_path).count("B start") == bench.MOST_STARTS
    errors = [c["error"] for c in cells_of(tmp_path).values() if "error" in c]
    assert all("no licence" in e for e in errors)
    assert sum(c["precision"] == "bf16" and "error" not in c for c in cells_of(tmp_path).values()) == 4


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with results.opened(file) as first:
        with pytest.raises(BlockingIOError), results.opened(file):
            pass
        first.add({"kind": "note", "key": "x"})
    assert [e["key"] for e in results.read(file)] == ["x"]


def test_idle_engines_can_be_frozen(tmp_path: Path) -> None:
    assert go(tmp_path, settings(tmp_path, freeze_idle=True)) == 0
    assert len(cells_of(tmp_path)) == 4


# -- the report --------------------------------------------------------------------------------------------------


def cell(engine: str, repeat: int, tps: float, probe: float = 50e9, **more: Any) -> dict[str, Any]:
    precision = more.pop("precision", "bf16")
    return {
        "kind": "cell", "key": f"g|{engine}:{precision}|m|W1|{repeat}", "group": "g", "engine": engine,
        "precision": precision, "model": "m", "workload": "W1", "repeat": repeat, "weight_bytes": 10**9, "version": "1",
        "probe": "native", "probe_before": probe - 1e9, "probe_after": probe + 1e9, "tokens": [],
        "figures": {"decode_tps": tps, "ttft_s": 1 / tps, "itl_s": 1 / tps},
    } | more  # fmt: skip


def made_up() -> list[dict[str, Any]]:
    ours = [cell("penstock", n, t) for n, t in enumerate((30.0, 60.0, 40.0, 44.0, 20.0))]
    slow = [cell("llamacpp", n, t / 2) for n, t in enumerate((30.0, 60.0, 40.0, 44.0, 20.0))]
    fast_but_wrong = [cell("vllm", n, 100.0) for n in range(5)]
    other = [cell("openvino", n, 90.0, precision="int8") for n in range(5)]
    check = {"kind": "check", "key": "c", "engine": "vllm", "precision": "bf16", "model": "m", "ok": False}
    return [*ours, *slow, *fast_but_wrong, *other, check]


def test_the_report_counts_right() -> None:
    found = rows.rows(made_up())
    ours = next(r for r in found if r.engine == "penstock")
    assert ours.median("decode_tps") == 40.0
    assert ours.limit_share() == pytest.approx(40.0 * 1e9 / 50e9)
    r = rows.ratio(ours, found, "decode_tps")
    assert r is not None
    assert r.peer == "llamacpp:bf16", "neither one whose tokens are wrong nor another precision"
    # Both moved together from repeat to repeat: as pairs they differ by 2 each time, so the interval is narrow.
    assert (r.value, r.pairs) == (pytest.approx(2.0), 5)
    assert r.low == pytest.approx(2.0)
    assert r.high == pytest.approx(2.0)
    less = rows.ratio(ours, found, "ttft_s")
    assert less is not None
    assert less.value == pytest.approx(2.0), "half the time is twice as fast"
    assert all(rows.ratio(x, found, "decode_tps") is None for x in found if x is not ours)


def test_the_bootstrap_shows_noise_and_asks_for_three_pairs() -> None:
    rng = np.random.default_rng(0)
    ours = {n: 10 * x for n, x in enumerate(rng.uniform(0.8, 1.2, 9))}
    theirs = {n: 10 * x for n, x in enumerate(rng.uniform(0.8, 1.2, 9))}
    r = rows.compare(ours, theirs, "p", rate=True)
    assert r.low is not None
    assert r.high is not None
    assert r.low < r.value < r.high
    assert r.low < 1 < r.high
    assert rows.compare(ours, theirs, "p", rate=True) == r
    few = rows.compare({0: 2.0, 1: 2.0}, {0: 1.0, 1: 1.0}, "p", rate=True)
    assert (few.value, few.low) == (2.0, None)


def test_the_latest_line_of_a_cell_counts_and_failures_are_told() -> None:
    entries = [cell("penstock", 0, 1.0), cell("penstock", 0, 5.0)]
    entries.append({k: v for k, v in cell("penstock", 1, 1.0).items() if k != "figures"} | {"error": "no answer"})
    (row,) = rows.rows(entries)
    assert row.of("decode_tps") == [5.0]
    assert row.errors == ["no answer"]
    assert "1, 1 failed" in report.cells(rows.summary([row])[0])


def test_no_share_of_the_limit_without_a_true_probe() -> None:
    (row,) = rows.rows([cell("penstock", 0, 1.0, probe=5e9) | {"probe": "numpy"}])
    assert row.limit_share() is None


def test_the_report_as_page_markdown_and_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    entries = [*made_up(), {"kind": "note", "key": "m", "machine": bench.machine()}]
    entries[3]["version"] = "2"
    file.write_text("".join(json.dumps(e) + "\n" for e in entries))
    out = {name: tmp_path / name for name in ("r.html", "r.md", "base.json")}
    flags = ["--html", str(out["r.html"]), "--markdown", str(out["r.md"]), "--freeze", str(out["base.json"])]
    assert report.main([str(file), *flags]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Several versions in one file: penstock" in said
    page = out["r.html"].read_text()
    Page(page)
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<rect") == 4
    text = out["r.md"].read_text()
    assert "| penstock:bf16 | 40.0 (20.0 - 60.0) |" in text
    assert "2.00 [2.00, 2.00] llamacpp:bf16" in text
    assert "WRONG" in text
    frozen = json.loads(out["base.json"].read_text())
    assert {r["engine"] for r in frozen["rows"]} == {"llamacpp", "vllm", "openvino"}
    assert frozen["machine"]["cores"] >= 1
    changed = [r | {"figures": {"decode_tps": r["figures"]["decode_tps"] | {"median": 10.0}}} for r in frozen["rows"]]
    lines = report.against(rows.summary(rows.rows(entries)), frozen | {"rows": changed})
    assert ("llamacpp:bf16", "2.00") in [(line[0], line[-1]) for line in lines]
    with pytest.raises(ValueError, match="format"):
        report.against([], {"format": 0, "rows": []})


# -- correctness -------------------------------------------------------------------------------------------------
