"""deploy/ray: the Ray Serve application serves and dies with its replica; the manifest's words are ours."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.main import build_parser
from penstock.config.load import serve_from_args
from tests.api.conftest import bundled

RAY = Path(__file__).resolve().parents[2] / "deploy" / "ray"
APPLICATION = """
import os, signal, sys, time
import ray
ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
from ray import serve
import serve_app
serve.run(serve_app.app)
from openai import NotFoundError, OpenAI
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="x")
asked = {"model": "nano", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
whole = client.completions.create(**asked).choices[0].text
pieces = [piece.choices[0].text for piece in client.completions.create(**asked, stream=True)]
assert len(pieces) > 2 and "".join(pieces) == whole, (pieces, whole)
try:
    client.completions.create(**asked | {"model": "nope"})
except NotFoundError as error:
    assert "is not served here" in str(error)
servers = lambda: [int(p) for p in os.listdir("/proc") if p.isdigit() and server(p)]
def server(pid):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split(chr(0))
    except OSError:
        return False
    return words[1:4] == ["-m", "penstock.cli.main", "serve"] and sys.argv[1] in words
(one,) = servers()
replica = int(open(f"/proc/{one}/stat").read().rpartition(")")[2].split()[1])
os.kill(replica, signal.SIGKILL)
until = time.monotonic() + 60
while one in servers() or not servers():
    assert time.monotonic() < until, "the server outlives its replica, or none comes again"
    time.sleep(0.1)
client = client.with_options(max_retries=20)
assert client.completions.create(**asked).choices[0].text == whole
serve.shutdown()
ray.shutdown()
print("all of it")
"""


def has_serve() -> bool:
    return find_spec("ray") is not None and find_spec("aiohttp_cors") is not None


@pytest.mark.skipif(not has_serve(), reason="pip install 'ray[serve]'")
def test_L13_the_ray_serve_application_serves_and_its_server_dies_with_a_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = str(bundled())
    for name, value in {"MODEL": model, "ARGS": "--threads 1 --max-model-len 256", "CPUS": "1"}.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    monkeypatch.setenv("PYTHONPATH", str(RAY), prepend=os.pathsep)  # replicas import it, too
    run = subprocess.run(
        [sys.executable, "-c", APPLICATION, model], capture_output=True, text=True, timeout=240, check=False
    )
    assert "all of it" in run.stdout, run.stderr


def test_the_manifest_of_kuberay_has_our_words_and_room_for_its_ranks() -> None:
    spec: dict[str, Any] = yaml.safe_load((RAY / "raycluster.yaml").read_text("utf-8"))["spec"]
    head = spec["headGroupSpec"]["template"]["spec"]
    ray, server = head["containers"]
    config = serve_from_args(build_parser().parse_args(server["args"])).engine.execution
    assert config.distributed_executor_backend == "ray"
    assert config.nnodes == 1 + sum(group["replicas"] for group in spec["workerGroupSpecs"])
    pods = [ray, *(group["template"]["spec"]["containers"][0] for group in spec["workerGroupSpecs"])]
    ranks = config.tensor_parallel_size // config.nnodes
    assert all(int(pod["resources"]["limits"]["cpu"]) >= ranks * (config.threads or 0) > 0 for pod in pods)
    assert len({pod["image"] for pod in (*pods, server)}) == 1, "only hosts of one build are taken"
    mounts = [{mount["mountPath"] for mount in pod["volumeMounts"]} for pod in (ray, server)]
    assert "/tmp/ray" in mounts[0] & mounts[1], "the driver finds the raylet by its sockets"
