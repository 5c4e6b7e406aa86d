"""Penstock as a Ray Serve application: each replica is `penstock serve` in a process of its own.

    PENSTOCK_MODEL=qwen2.5:0.5b serve run serve_app:app        (in this folder)

PENSTOCK_ARGS has further words of the command line, PENSTOCK_REPLICAS a number (default 1), PENSTOCK_CPUS the
processors of a replica (default 2). Ray places replicas, starts them again and shares requests out; it does not know
what their prefix caches hold. `penstock serve --data-parallel-size` does, on one machine. Needs ray[serve].
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from penstock.launch.ray_host import tied

READY_S = 600.0
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "upgrade", "te", "trailer"}


def _kept(headers: object) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP]  # type: ignore[attr-defined]


@serve.deployment(
    num_replicas=int(os.environ.get("PENSTOCK_REPLICAS", "1")),
    ray_actor_options={"num_cpus": float(os.environ.get("PENSTOCK_CPUS", "2"))},
    max_ongoing_requests=256, health_check_period_s=5, graceful_shutdown_timeout_s=120,
)  # fmt: skip
class Penstock:
    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        words = shlex.split(os.environ.get("PENSTOCK_ARGS", ""))
        model = [os.environ["PENSTOCK_MODEL"]] if "PENSTOCK_MODEL" in os.environ else []
        self._process = subprocess.Popen(
            tied([sys.executable, "-m", "penstock.cli.main", "serve", *model, "--port", str(port), *words]),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._client = httpx.AsyncClient(base_url=self._url, timeout=None)
        self._until_ready()

    def _until_ready(self) -> None:
        until_s = time.monotonic() + READY_S
        while time.monotonic() < until_s:
            if self._process.poll() is not None:
                raise RuntimeError(f"penstock serve ended with {self._process.returncode}: its log says why")
            try:
                if httpx.get(self._url + "/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"penstock serve was not ready within {READY_S:g} s")

    def check_health(self) -> None:
        """The server starts its engine again by itself; a server that is gone is the replica's end."""
        if self._process.poll() is not None:
            raise RuntimeError(f"penstock serve ended with {self._process.returncode}")

    async def __call__(self, request: Request) -> StreamingResponse:
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        asked = self._client.build_request(
            request.method, url, headers=_kept(request.headers), content=await request.body()
        )
        answer = await self._client.send(asked, stream=True)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()  # a client that leaves ends its request

        return StreamingResponse(pieces(), answer.status_code, headers=dict(_kept(answer.headers)))

    def __del__(self) -> None:
        self._process.terminate()


app = Penstock.bind()
