"""What `deploy/` says of Penstock is true: its metrics exist, its flags and settings are taken, its ports agree."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.main import build_parser
from penstock.cli.run import with_default_model
from penstock.config.load import SERVER_SETTINGS, serve_from_args
from penstock.server.distribution import TOKEN_S, TTFT_S
from tests.api.watch import small

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CONTAINER, UNIT = DEPLOY / "Containerfile", DEPLOY / "systemd" / "penstock.service"
BOARD, ALERTS = DEPLOY / "grafana" / "penstock.json", DEPLOY / "prometheus" / "alerts.yml"
NOT_OURS = {"up"}
"""What Prometheus itself says of a target."""


def expressions() -> Iterator[str]:
    board = json.loads(BOARD.read_text("utf-8"))
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))  # a row has none
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield re.sub(r"label_values\((.+), (\w+)\)", r"sum by (\2) (\1{})", variable["query"])
    for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def metrics_in(expression: str) -> set[str]:
    """Names of metrics in PromQL: words that no function or grammar is, outside of labels."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(by|without) \([^)]*\)", " ", expression)
    functions = set(re.findall(r"([a-z_]+)\s*\(", bare))
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - functions - {"or", "and", "unless"}


@pytest.fixture(scope="module")
def families() -> dict[str, set[str]]:
    """Every name that /metrics has or will have, and the labels of its samples, where there are samples."""
    found: dict[str, set[str]] = {}
    with small(speculative_config={"method": "ngram", "num_speculative_tokens": 2}) as server:
        body = {
            "model": "nano",
            "prompt": "one two one two one two",
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        assert httpx.post(server.url + "/v1/completions", json=body, timeout=60).status_code == 200
        answer = httpx.get(server.url + "/metrics", timeout=60).text
    for family in text_string_to_metric_families(answer):
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        found |= {family.name + end: set() for end in ends}
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_of_the_dashboard_and_the_alerts_exists(families: dict[str, set[str]]) -> None:
    used = {name for expression in expressions() for name in metrics_in(expression)} - NOT_OURS
    assert len(used) > 30
    # An engine in the server's own process has no numbers of a process.
    assert {n for n in used if not n.startswith("penstock_engine_process_")} <= set(families)
    assert {n.removeprefix("penstock_engine_") for n in used if n.startswith("penstock_engine_process_")} <= set(
        families
    )


def dashboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboard_tool", DEPLOY.parent / "tools" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_what_its_tool_writes_and_shows_what_it_promises() -> None:
    tool = dashboard()
    assert BOARD.read_text("utf-8") == tool.board(), "run python tools/dashboard.py"
    titles = {panel["title"] for panel in json.loads(BOARD.read_text("utf-8"))["panels"]}
    assert {
        "Where a request's time goes", "Latency = TTFT + TPOT x tokens", "Within the limits", "Waiting in the queue",
        "KV blocks", "Power", "Energy per generated token", "Requests by tenant",
    } <= titles  # fmt: skip


def test_a_panel_of_a_metric_that_no_code_makes_is_left_out() -> None:
    tool = dashboard()
    gone, there = tool.Panel("x", tool.quantiles("gone_seconds")), tool.Panel("y", tool.quantiles(tool.TTFT))
    assert not tool.made(gone, "time_to_first_token_seconds")
    assert tool.made(there, "time_to_first_token_seconds")


def test_limits_of_the_dashboard_are_bounds_of_the_histograms() -> None:
    tool = dashboard()
    assert set(map(float, tool.TTFT_LIMITS)) <= set(TTFT_S)
    assert set(map(float, tool.TPOT_LIMITS)) <= set(TOKEN_S)
    assert all(str(float(bound)) == bound for bound in (*tool.TTFT_LIMITS, *tool.TPOT_LIMITS))


def test_their_labels_exist(families: dict[str, set[str]]) -> None:
    for expression in expressions():
        (name,) = metrics_in(expression) if len(metrics_in(expression)) == 1 else ("",)
        if not families.get(name):
            continue
        grouped = {label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
        filtered = set(re.findall(r"[{,]\s*(\w+)=", expression))
        assert (grouped | filtered) - {"instance", "job"} <= families[name], expression


def test_the_test_would_see_a_name_that_is_gone() -> None:
    found = metrics_in(
        'histogram_quantile(0.95, sum by (le) (rate(penstock:gone_bucket{a="b"}[5m]))) > 5 or up{job="x"} == 0'
    )
    assert found == {"penstock:gone_bucket", "up"}


def commands() -> dict[str, list[str]]:
    """Where `penstock` is started, and with which words."""
    lines = CONTAINER.read_text("utf-8").splitlines()
    (image,) = (json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD "))
    (unit,) = re.findall(r"^ExecStart=\S+/penstock (.*)$", UNIT.read_text("utf-8"), re.MULTILINE)
    compose = services()["penstock"]["command"]
    (container,) = stateful()["template"]["spec"]["containers"]
    return {
        "image": image,
        "unit": shlex.split(unit.replace("/etc/penstock/", f"{DEPLOY}/systemd/")),
        "compose": [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in compose],
        "kubernetes": [word.replace("/etc/penstock/", f"{DEPLOY}/kubernetes/") for word in container["args"]],
    }


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    return found


def stateful() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / "statefulset.yaml").read_text("utf-8"))["spec"]
    return found


@pytest.mark.parametrize("where", ["image", "unit", "compose", "kubernetes"])
def test_a_command_is_one_that_penstock_takes_and_probes_are_on_port_9000(where: str) -> None:
    args = with_default_model(build_parser().parse_args(commands()[where]))
    config = serve_from_args(args).server
    assert (config.port, config.probe_port) == (8000, 9000)
    if where != "unit":
        assert config.host == "0.0.0.0"


def test_health_is_asked_where_it_is_told() -> None:
    assert "http://127.0.0.1:9000/ready" in CONTAINER.read_text("utf-8")
    assert "penstock:9000" in (DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8")
    (container,) = stateful()["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000, "probes": 9000}
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: (probe["path"], probe["port"]) for kind, probe in probes.items()} == {
        "startup": ("/ready", "probes"), "readiness": ("/ready", "probes"), "liveness": ("/health", "probes"),
    }  # fmt: skip


def test_nobody_runs_as_root_or_writes_to_the_root() -> None:
    assert "USER 10001:10001" in CONTAINER.read_text("utf-8")
    assert all(s["read_only"] and s["cap_drop"] == ["ALL"] for s in services().values())
    pod = stateful()["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    security = pod["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    unit = UNIT.read_text("utf-8")
    for line in ("DynamicUser=yes", "ProtectSystem=strict", "NoNewPrivileges=yes", "CapabilityBoundingSet="):
        assert line in unit.splitlines()


def test_there_is_time_for_running_requests_to_end() -> None:
    limit = float(SERVER_SETTINGS["shutdown_timeout"].default)
    assert stateful()["template"]["spec"]["terminationGracePeriodSeconds"] > limit
    assert int(services()["penstock"]["stop_grace_period"].removesuffix("s")) > limit
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert int(seconds) > limit
