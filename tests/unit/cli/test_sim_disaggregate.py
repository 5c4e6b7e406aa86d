"""`penstock sim disaggregate`: a table, a verdict, numbers; what is asked wrongly is said in a line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import build_parser
from penstock.config.load import given_by
from tests.command import penstock

TRACE = "synthetic:poisson?rate=16&requests=40&prompt=1500&output=12"
USUAL = ("sim", "disaggregate", "--device", "a100-80g", "--trace", TRACE, "--max-model-len", "8192", "--sim-seed", "1")


def test_H26_the_cheapest_with_roles_and_without(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = penstock(*USUAL, "--devices", "1..3", "--ttft-slo-s", "0.6", "--tpot-slo-s", "0.02", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "times the cost of mixed engines" in done.stdout
    found = json.loads(out.read_text())
    assert found["seed"] == 1
    assert {one["layout"].partition("=")[0] for one in found["found"]} == {"mixed", "prefill"}
    assert all(one["attainment"] >= 0.9 and one["per_hour"] == 2.0 * one["devices"] for one in found["found"])


def test_H27_the_layout_with_most_requests() -> None:
    done = penstock(*USUAL, "--devices", "2", "--ttft-slo-s", "0.6", "--tpot-slo-s", "0.02")
    assert done.returncode == 0, done.stderr
    assert "prefill=1, decode=1" in done.stdout
    assert "times the requests/s of mixed engines on as many devices" in done.stdout


def test_limits_that_nothing_keeps_are_said_and_a_status() -> None:
    done = penstock(*USUAL, "--devices", "1..2", "--ttft-slo-s", "0.001")
    assert done.returncode == 1
    assert "no layout keeps the limits" in done.stdout


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--devices", "200", "--degrees", "1,2", "--mixed-pool"), "layouts, and 1 to 256 can be tried; give fewer"),
        (("--devices", "2", "--degrees", "x"), "--degrees: 'x' is no list of whole numbers from 1 on"),
        (("--devices", "2", "--prices", "l4=3"), "--prices: no engine runs on 'l4'"),
        (("--devices", "2", "--block-s", "-1"), "--block-s must be at least 0"),
        (("--devices", "3..2"), "the smaller number comes first"),
        (("--devices", "2", "--decode-device", "nothing"), "unknown device 'nothing'"),
    ],
)
def test_what_makes_no_sense_is_said(more: tuple[str, ...], says: str) -> None:
    done = penstock(*USUAL, *more)
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize("kind", [[], ["search", "--latency", "1"], ["disaggregate", "--devices", "2"]])
def test_the_device_of_a_simulation_is_no_setting_of_its_engines(kind: list[str]) -> None:
    args = build_parser().parse_args(["sim", *kind, "--device", "a100-80g"])
    assert given_by(args) == {}
