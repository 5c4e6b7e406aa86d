"""Hosts with ranks or engines on this machine, for tests: `penstock serve --headless` as a process, over loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.engine.processes import is_gone


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Host:
    """A process that has ranks for the lead at `port`; what it says goes to the end of a file."""

    def __init__(self, model: str, port: int, log: Path, *, ranks: int = 2, hosts: int = 2, host: int = 1) -> None:
        self._log = log
        self._words = [
            sys.executable, "-m", "penstock.cli.main", "serve", model, "--headless", "--tensor-parallel-size",
            str(ranks), "--nnodes", str(hosts), "--node-rank", str(host), "--master-port", str(port), "--threads", "1",
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str, **environment: str) -> Host:
        with self._log.open("ab") as file:
            self.process = subprocess.Popen(
                [*self._words, *more], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**os.environ, **environment},
            )  # fmt: skip
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def ranks(self) -> list[int]:
        """Its children, whichever of its threads started them."""
        found: list[int] = []
        for file in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, file.read_text().split())
        return found

    def said(self) -> str:
        return self._log.read_text()

    def until_says(self, words: str, within_s: float = 60.0) -> str:
        until_s = time.monotonic() + within_s
        while words not in self.said():
            assert time.monotonic() < until_s, f"{words!r} isn't in {self.said()!r}"
            time.sleep(0.02)
        return self.said()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class EngineHost(Host):
    """A process that has `num` engines, from number `first` on, for the server at `port`."""

    def __init__(self, model: str, port: int, log: Path, *, size: int = 2, first: int = 1, num: int = 1) -> None:
        super().__init__(model, port, log)
        self._words = [
            sys.executable, "-m", "penstock.cli.main", "serve", model, "--headless", "--data-parallel-size", str(size),
            "--data-parallel-size-local", str(num), "--data-parallel-start-rank", str(first),
            "--data-parallel-rpc-port", str(port), "--threads", "1",
        ]  # fmt: skip


@contextmanager
def beside(*hosts: Host) -> Iterator[None]:
    """While they run. Their ranks are gone behind it."""
    try:
        yield
    finally:
        ranks = [pid for host in hosts if host.process is not None for pid in host.ranks]
        for host in hosts:
            host.kill()
        until_s = time.monotonic() + 10
        while not all(is_gone(pid) or zombie(pid) for pid in ranks):
            assert time.monotonic() < until_s, "a rank outlives its host"
            time.sleep(0.02)


def zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
