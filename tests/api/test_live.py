"""A server in this process that cannot stop says where it is."""

from __future__ import annotations

import threading

import pytest

from penstock.config import serve_from_kwargs
from penstock.server import live
from tests.api.conftest import bundled


def test_a_server_that_does_not_stop_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STOP_S", 0.2)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go_on.wait(60)

    server = live.LiveServer(serve_from_kwargs(model=bundled(), port=0, ops="ref", max_model_len=64))
    server.__enter__()
    assert server.server is not None
    server.server.closers.append(hold)
    assert server._uvicorn is not None
    server._uvicorn.should_exit = True
    assert held.wait(60)
    with pytest.raises(RuntimeError, match=r"not stopped within 0.2 s:[\s\S]*in hold"):
        server.__exit__(None, None, None)
    go_on.set()
    server._thread.join()
