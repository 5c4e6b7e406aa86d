"""A server on `cpu-torch` whose rank is killed, and its engine with it: its streams do not notice."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.config import serve_from_kwargs
from penstock.server.live import LiveServer
from tests.api.conftest import bundled
from tests.api.test_process_server import link_of, pytestmark, stream, until_ready

__all__ = ["pytestmark"]


def test_streams_go_on_with_the_same_tokens(capfd: pytest.CaptureFixture[str]) -> None:
    """Weights, keys and values, decode graphs (mocks) and two steps in flight with promised tokens are made anew in
    another process."""
    config = serve_from_kwargs(
        model=bundled(), port=0, device="cpu-torch", max_model_len=256, num_gpu_blocks_override=256, request_log=False,
        max_restarts_per_minute=20, executor="multiproc", depth=2, threads=1,
        cudagraph_capture_sizes="1,2",
    )  # fmt: skip
    with LiveServer(config) as live, ThreadPoolExecutor(2) as pool:
        link = link_of(live)
        calm = list(pool.map(lambda i: stream(live, i), range(2)))
        wild = [pool.submit(stream, live, i) for i in range(2)]
        assert live.server is not None
        while live.server.client.num_live < 2:
            assert not any(future.done() for future in wild), "some ended before all had begun: make them longer"
            time.sleep(0.005)
        pid = link.pid
        assert pid is not None
        rank = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
        os.kill(rank, signal.SIGKILL)
        assert [future.result() for future in wild] == calm
        until_ready(live)
    assert all(len(text) > 20 for text in calm)
    assert capfd.readouterr().err.count("2 decode graphs for 1, 2 rows") == 2, "each rank was warm before it was ready"
