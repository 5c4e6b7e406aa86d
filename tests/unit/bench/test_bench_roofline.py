"""`penstock bench roofline`: what a step is, what it is compared with, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.backends import BACKENDS
from penstock.bench import bandwidth, roofline
from penstock.bench import peak as peak_module
from penstock.bench.bandwidth import ReadProbe
from penstock.bench.peak import blas_peak, register_peak
from penstock.cli.main import main
from penstock.cli.roofline import html_page
from penstock.core.matrix_format import parse_scheme
from penstock.core.step_shape import EMPTY
from penstock.launch.bundled import bundled_model
from penstock.launch.llm import LLM
from penstock.ops.native.abi import Act, Format
from penstock.ops.native.library import libraries
from penstock.plan.cost import RooflineTimer
from penstock.plan.devices import Device
from penstock.plan.weights import hold_weights
from penstock.sim.specs import find_spec

MODEL = [str(bundled_model("nano")), "--ops", "blas", "--max-model-len", "128", "--num-gpu-blocks-override", "32"]
SMALL = ["--tokens", "3", "--repeats", "2", "--probe-mib", "4"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(bundled_model("nano")), ops="blas", max_model_len=160, num_gpu_blocks_override=64, max_num_seqs=4,
               max_num_batched_tokens=32)  # fmt: skip


def test_the_command_writes_table_json_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"--json": tmp_path / "r.json", "--html": tmp_path / "r.html"}
    points = ["--contexts", "16,200", "--sequences", "2", "--prompts", "8"]
    asked = [x for flag, path in files.items() for x in (flag, str(path))]
    assert main(["bench", "roofline", *MODEL, *points, *SMALL, *asked]) == 0
    found = json.loads(files["--json"].read_text())
    assert [(p["kind"], p["x"]) for p in found["points"]] == [("decode", 16), ("batch", 2), ("prefill", 8)]
    for p in found["points"]:
        assert p["low_s"] <= p["seconds"] <= p["high_s"]
        assert p["ratio"] == pytest.approx(p["seconds"] / p["model_s"])
        assert p["flagged"] == (p["ratio"] > 1.15)
        assert p["limit"] in ("memory", "compute")
    assert found["left_out"] == ["decode 200: 203 tokens are more than max_model_len 128"]
    page = files["--html"].read_text()
    assert page.count("<svg viewBox") == 3 + 6, "three charts and two keys each"
    assert "<script" not in page
    assert "http" not in page
    said = capsys.readouterr().out
    assert "Time per token against context" in said
    assert "left out: decode 200" in said


def test_points_that_are_no_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "roofline", *MODEL, "--contexts", "1k"]) != 0
    assert "--contexts" in capsys.readouterr().err


def test_a_round_over_the_streams_is_one_step(llm: LLM) -> None:
    """So what is measured is the time of a step with all sequences, and the shape is that step's."""
    with ReadProbe(4 << 20, 1) as probe:
        bench = roofline._Bench(llm, tokens=6, repeats=1, probe=probe)
        before = llm.engine.core.stats.num_steps
        took_s, shape = bench._decode(3, 20)
        steps = llm.engine.core.stats.num_steps - before
    assert took_s > 0
    assert (shape.num_tokens, shape.num_rows, shape.num_logits) == (3, 3, 3)
    # Three prompts begin in a step each, then five rounds; some more to hear of the aborts.
    assert 8 <= steps <= 8 + 3
    assert shape.num_context == pytest.approx(3 * 24, abs=9)
    assert not llm.engine.core.has_work


def test_the_steps_of_a_prompt_add_up(llm: LLM) -> None:
    with ReadProbe(4 << 20, 1) as probe:
        bench = roofline._Bench(llm, tokens=2, repeats=1, probe=probe)
        shapes = bench._prefill_shapes(70)
    assert [s.num_tokens for s in shapes] == [32, 32, 6]
    assert [s.num_logits for s in shapes] == [0, 0, 1]
    assert sum(s.num_pairs for s in shapes) == 70 * 71 // 2


def test_the_model_is_fed_with_what_was_measured(llm: LLM) -> None:
    with ReadProbe(4 << 20, 1) as probe:
        bench = roofline._Bench(llm, tokens=2, repeats=1, probe=probe)
        point = bench.point("decode", 30)
        timer: RooflineTimer = bench._timer(point.read_bytes_per_s)
        slow = bench._timer(point.read_bytes_per_s / 100)
    _, shape = bench._decode(1, 30)
    assert point.model_s == pytest.approx(timer.step_s(shape), rel=1e-6)
    assert slow.step_s(shape) > 50 * timer.step_s(shape), "decoding is bound by memory"
    assert timer.overhead_s == 0
    assert bench.problem("batch", 5) == "more than max_num_seqs 4"
    assert bench.problem("prefill", 159) is None
    assert "max_model_len" in str(bench.problem("prefill", 160))


def test_the_peak_is_that_of_the_products_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = blas_peak(64)
    assert (plain.per_s > 0, plain.method) == (True, "numpy, float32")
    for_numpy = roofline.peaks("ref", "float32", "none")
    assert {peak.method for peak in for_numpy} == {"numpy, float32"}
    if libraries():
        products, attention = roofline.peaks("native", "float32", "int8-w8a8")
        assert "8 bits" in products.method
        assert "float32" in attention.method
        single = register_peak(Format.F32, Act.F32, 1)
        assert single is not None
        assert 1e8 < single.per_s < 1e13
        assert register_peak(Format.F32, Act.I8) is None, "there is no such product"
    monkeypatch.setattr(peak_module, "best_library", lambda: None)
    assert register_peak(Format.F32, Act.F32) is None
    assert roofline.peaks("native", "float32", "int8-w8a8")[0].method == "numpy, float32"


def test_quantised_weights_are_fewer_bytes_and_have_a_rate_of_their_own() -> None:
    spec = find_spec("llama-3.2-1b")

    def bytes_each(quantization: str) -> float | None:
        scheme = parse_scheme(quantization)
        return hold_weights(spec, "bfloat16", scheme, {}, traits=BACKENDS.traits("native"), exact=True).bytes_each(spec)

    rates = {"bfloat16": 1e11, "products": 4e11}
    device = Device(name="d", flops_per_s=rates, read_bytes_per_s=1e10, host_copy_bytes_per_s=1e10, step_overhead_s=0)
    plain = RooflineTimer(spec, device, dtype="bfloat16")
    packed = RooflineTimer(spec, device, dtype="bfloat16", products="products", matrix_size=bytes_each("int4-w4a8:128"))
    one, many = EMPTY.plus(10, 1, 1), EMPTY.plus(0, 4096, 1)
    assert plain.step_s(one) / packed.step_s(one) == pytest.approx(2 / (0.5 + 2 / 128), rel=0.02)
    layers, _, attention = plain.phases(many)
    fast_layers, _, same = packed.phases(many)
    assert layers.seconds == pytest.approx(4 * fast_layers.seconds)
    assert attention == same
    assert bytes_each("none") is None
    assert (bytes_each("int8-wo"), bytes_each("int4-wo:32")) == (1.0, 0.5625)


def test_gaps_are_flagged_from_fifteen_per_cent_on() -> None:
    def point(seconds: float) -> roofline.Point:
        return roofline.Point("decode", 1, seconds, seconds, seconds, 1.0, "memory", 1.0, 1e9)

    assert not point(1.149).is_flagged
    assert point(1.151).is_flagged
    about = {
        "model": "<m>", "family": "f", "parameters": 1, "dtype": "float32", "read_bytes_per_s": 1e9, "read_low": 1e9,
        "read_high": 1e9, "read_by": "numpy", "threads": 1, "flops_per_s": 1e9, "flops_by": "numpy", "repeats": 1,
    }  # fmt: skip
    page = html_page(roofline.Roofline(about, [point(1.0), point(2.0)], ["decode 9: <too long>"]))
    assert page.count('class="flag"') == 1
    assert "&lt;too long&gt;" in page
    assert "<m>" not in page


def test_memory_is_read_with_and_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with ReadProbe(8 << 20, 2) as probe:
        found = probe.measure(3)
        assert probe._data.ctypes.data % (2 << 20) == 0, "the part that is read begins at a huge page"
    assert 0 < found.low <= found.median <= found.high
    assert found.method == ("native" if libraries() else "numpy")
    monkeypatch.setattr(bandwidth, "best_library", lambda: None)
    with ReadProbe(8 << 20, 2) as probe:
        assert np.all(probe._data == 1)
        found = probe.measure(2)
    assert (found.method, found.threads) == ("numpy", 2)
    assert found.median > 0
