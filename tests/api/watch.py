"""What the tests of metrics, logs and the page share: a small server, and waiting for requests to end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import serve_from_kwargs
from penstock.core.output import RequestOutput
from penstock.server.live import LiveServer
from tests.api.conftest import bundled

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def small(**settings: Any) -> LiveServer:
    """The bundled model with its engine in a thread: what it does can be looked at from outside."""
    common = {"port": 0, "ops": "blas", "max_model_len": 512, "num_gpu_blocks_override": 256, "engine_in_process": True}
    return LiveServer(serve_from_kwargs(model=bundled(), **(common | settings)))


def on_loop(live: LiveServer, f: Callable[[], Any]) -> Any:
    """Call `f` in the server's event loop."""
    done = threading.Event()
    found: list[Any] = []

    def run() -> None:
        found.append(f())
        done.set()

    assert live.loop is not None
    live.loop.call_soon_threadsafe(run)
    assert done.wait(30)
    return found[0]


class Endings:
    """Waits for requests to end, however they do."""

    def __init__(self, live: LiveServer) -> None:
        self._more = threading.Semaphore(0)
        self.outputs: list[RequestOutput] = []
        assert live.server is not None
        client = live.server.client

        def listener(stream: Any, output: RequestOutput) -> None:
            self.outputs.append(output)
            self._more.release()

        on_loop(live, lambda: client.on_finish.append(listener))

    def wait(self) -> RequestOutput:
        assert self._more.acquire(timeout=30), "no request has ended"
        return self.outputs[-1]


def scrape(url: str, **headers: str) -> dict[str, float]:
    """name{label=value,...} without the labels that all have -> value."""
    answer = httpx.get(url + "/metrics", headers=headers, timeout=30)
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What has changed."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}
