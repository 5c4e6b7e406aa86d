"""Two keys on a real server: one floods, the other does not wait behind the flood. The policy itself: tests/engine."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled


@pytest.fixture(scope="module")
def two_keys() -> Iterator[LiveServer]:
    config = serve_from_kwargs(
        model=bundled(), port=0, ops="blas", engine_in_process=True, max_model_len=128, num_gpu_blocks_override=64,
        max_num_seqs=2, api_key="flood,quiet",
    )  # fmt: skip
    with LiveServer(config) as server:
        yield server


def test_a_flood_of_one_key_is_overtaken_by_another(two_keys: LiveServer) -> None:
    """Row 50 in counts: all places are taken and eight requests wait, and yet the other key is answered next."""
    assert two_keys.server is not None
    client = two_keys.server.client
    host, port = two_keys.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}).encode()
    message = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer flood\r\n"
    message += b"Content-Length: %d\r\n\r\n" % len(body) + body
    held = []
    for _ in range(10):
        sock = socket.create_connection((host, int(port)))
        sock.sendall(message)
        held.append(sock)
    assert held[0].recv(4096).startswith(b"HTTP/1.1 200")
    ends = time.monotonic() + 20
    while client.num_live < 10 or client.snapshot.num_running < 2:
        assert time.monotonic() < ends
        time.sleep(0.005)
    answer = httpx.post(
        two_keys.url + "/v1/completions", json={"prompt": "Two", "max_tokens": 2}, timeout=60,
        headers={"authorization": "Bearer quiet"},
    )  # fmt: skip
    assert answer.status_code == 200
    left = client.num_live
    print(f"{left} of 10 requests of the flood were left when the other key had its answer")
    assert left >= 8
    for sock in held:
        sock.close()
