"""A real server on a real socket: the bundled model, the engine as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from penstock.config import serve_from_kwargs
from penstock.launch.bundled import bundled_model
from penstock.server.live import LiveServer


def bundled() -> str:
    path = bundled_model("nano")
    assert path is not None
    return str(path)


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """Shared by tests that leave no traces; tests that need settings of their own start one themselves.

    The reference operations, because texts are compared: with `blas` a near tie falls by what else is in the batch.
    """
    config = serve_from_kwargs(model=bundled(), port=0, ops="ref", max_model_len=512, num_gpu_blocks_override=256)
    with LiveServer(config) as server:
        yield server


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client
