"""`penstock serve --plugin`: an engine that is begun again has the user's parts, too."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.api.test_running_servers import engine_of
from tests.api.test_serve_command import serving

POLICY = """
import os
from penstock.sched.policy import POLICIES
from penstock.sched.policy.fcfs import Fcfs

class Noted(Fcfs):
    name = "noted"

    def order(self, running, waiting):
        with open(os.environ["NOTES"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        return super().order(running, waiting)

POLICIES.add("noted", f"{__name__}:Noted")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="engines are killed by signals")
def test_it_is_there_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    (tmp_path / "noted.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    with serving("--port", "0", "--plugin", "noted.py", "--scheduling-policy", "noted",
                 environment={"NOTES": str(notes)}) as server, server.client() as client:  # fmt: skip

        def answered() -> httpx.Response:
            body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
            return client.post("/v1/completions", json=body)

        first, pid = answered(), engine_of(server.process.pid)
        assert first.status_code == 200
        assert set(notes.read_text().split()) == {str(pid)}
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while client.get("/ready").status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        while client.get("/ready").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.05)
        second, again = answered(), engine_of(server.process.pid)
        assert again != pid
        assert second.json()["choices"] == first.json()["choices"]
        assert set(notes.read_text().split()) == {str(pid), str(again)}
