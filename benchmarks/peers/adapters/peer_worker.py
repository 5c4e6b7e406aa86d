"""What all adapters share: JSON lines on standard input and output, in an interpreter that has the engine.

    {"op": "start", "model": folder, "precision": ..., "threads": n, "options": {}}
        -> {"ok": true, "version": ..., "weight_bytes": n, "start_s": s}
    {"op": "run", "requests": [[token ids, new tokens], ...]}
        -> {"ok": true, "wall_s": s, "stamps": [[[s, tokens so far], ...], ...], "tokens": [[ids], ...]}
    {"op": "stop"} -> {"ok": true, "peak_bytes": n}
    a failure -> {"ok": false, "error": ...}

Stamps count from the moment at which all requests of a run are handed over. Whatever an engine prints goes to standard
error. Standard library only.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = tuple[list[int], int]


class Recorder:
    """Collects what one run makes: `token(i, ids)` whenever request `i` has got further tokens."""

    def __init__(self, num: int) -> None:
        self.began_s = time.perf_counter()
        self.stamps: list[list[tuple[float, int]]] = [[] for _ in range(num)]
        self.tokens: list[list[int]] = [[] for _ in range(num)]

    def add(self, number: int, ids: list[int], at_s: float | None = None) -> None:
        """`at_s`: on `time.perf_counter`, if it was another moment than now."""
        if ids:
            self.tokens[number] += [int(i) for i in ids]
            now_s = time.perf_counter() if at_s is None else at_s
            self.stamps[number].append((now_s - self.began_s, len(self.tokens[number])))


class Engine:
    """What an adapter implements."""

    version = "?"
    weight_bytes = 0
    """Bytes of weights as the engine holds them: what one decoded token reads at least."""

    def start(self, model: str, precision: str, threads: int, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def run(self, requests: list[Request], recorder: Recorder) -> None:
        """All of them at once, greedy, without regard to end tokens."""
        raise NotImplementedError

    def stop(self) -> None:
        pass

    def processes(self) -> list[int]:
        """Further processes whose memory counts."""
        return []


def file_bytes(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())


def peak_bytes(pids: list[int]) -> int:
    """Sum of the processes' high-water marks of memory (pages that they share count for each)."""
    kib = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        kib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return kib * 1024


def _lines() -> queue.Queue[str]:
    """What is asked, line by line. When the other end is gone, however busy the engine is, so is this process group."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return lines


def serve(engine: Engine) -> None:
    """Answer until told to stop."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engine's own words must not get between the answers

    def start(asked: dict[str, Any]) -> dict[str, Any]:
        began_s = time.perf_counter()
        engine.start(asked["model"], asked["precision"], asked["threads"], asked.get("options") or {})
        took_s = time.perf_counter() - began_s
        return {"version": engine.version, "weight_bytes": engine.weight_bytes, "start_s": took_s}

    def run(asked: dict[str, Any]) -> dict[str, Any]:
        requests = [(prompt, new) for prompt, new in asked["requests"]]
        recorder = Recorder(len(requests))
        engine.run(requests, recorder)
        wall_s = time.perf_counter() - recorder.began_s
        return {"wall_s": wall_s, "stamps": recorder.stamps, "tokens": recorder.tokens}

    def stop(asked: dict[str, Any]) -> dict[str, Any]:
        peak = peak_bytes([os.getpid(), *engine.processes()])
        engine.stop()
        return {"peak_bytes": peak}

    operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"start": start, "run": run, "stop": stop}
    lines = _lines()
    while True:
        asked = json.loads(lines.get())
        try:
            answer = {"ok": True, **operations[asked["op"]](asked)}
        except Exception as error:
            traceback.print_exc()
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:600]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if asked["op"] == "stop":
            return
