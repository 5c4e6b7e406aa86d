"""An engine in a process of its own, behind JSON lines, that can be killed with all it has started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ENGINES, HERE, Place, Spec, environment

STOP_S = 20.0


class EngineError(Exception):
    """The engine failed, took too long or is gone. `is_gone`: it has to be started again."""

    def __init__(self, message: str, *, is_gone: bool) -> None:
        super().__init__(message)
        self.is_gone = is_gone


class EngineProcess:
    """Starts at once, as the leader of its own process group, so that no child outlives `kill`."""

    def __init__(self, spec: Spec, place: Place, threads: int, log: Path) -> None:
        engine = ENGINES[spec.engine]
        log.parent.mkdir(parents=True, exist_ok=True)
        self.spec, self.log = spec, log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(place.python(spec.engine)), str(HERE / "adapters" / engine.adapter)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env={**environment(), "OMP_NUM_THREADS": str(threads), **engine.env},
            )  # fmt: skip
        # Adapters end with this process, for their input does; but one that is frozen hears nothing. So somebody
        # outside the group waits for the end of this process, however it comes, and ends the group.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", f"read _; kill -KILL -{self._process.pid}"],
            stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, timeout_s: float, **asked: Any) -> dict[str, Any]:
        """One operation. Raises EngineError; after a timeout the engine is killed, for it may still be busy."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise EngineError(f"no answer to {asked['op']!r} within {timeout_s:g} s", is_gone=True) from None
        except (BrokenPipeError, ValueError):
            line = None
        if line is None:
            self.kill()
            status = self._process.returncode
            raise EngineError(f"the process ended with status {status}; see {self.log.name}", is_gone=True)
        answer: dict[str, Any] = json.loads(line)
        if not answer.pop("ok"):
            raise EngineError(answer["error"], is_gone=False)
        return answer

    def freeze(self, frozen: bool) -> None:
        """Stop or continue the process and its children, so that an idle engine cannot take time."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def stop(self) -> int:
        """End it in order; returns its peak memory in bytes (0 if it could not say)."""
        try:
            return int(self.ask(STOP_S, op="stop").get("peak_bytes", 0))
        except EngineError:
            return 0
        finally:
            self.kill()

    def kill(self) -> None:
        """The whole group: first asked, then made to. Nothing is left behind."""
        for number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
            if not _group_is_alive(self.pid):
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
                os.killpg(self.pid, signal.SIGCONT)  # a frozen one would not hear
            until = time.monotonic() + patience_s
            while time.monotonic() < until and _group_is_alive(self.pid):
                self._process.poll()  # reaps it: a zombie still counts as alive
                time.sleep(0.02)
        self._guard.kill()  # before its input ends: the group's number may be somebody else's by then
        self._guard.wait()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._reader.join(2.0)
        for pipe in (self._process.stdin, self._process.stdout, self._guard.stdin):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


def _group_is_alive(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def started(
    spec: Spec, place: Place, model: str, threads: int, options: dict[str, Any], *, timeout_s: float, logs: Path
) -> tuple[EngineProcess, dict[str, Any]]:
    """(the engine, ready; what it says of itself). Raises EngineError, with nothing left running."""
    name = f"{spec.engine}.{spec.precision}.{Path(model).name}.log"
    process = EngineProcess(spec, place, threads, logs / name)
    try:
        told = process.ask(
            timeout_s, op="start", model=str(place.model(model)), precision=spec.precision, threads=threads,
            options=options,
        )  # fmt: skip
    except BaseException:
        process.kill()
        raise
    return process, told


def names(group: Sequence[Spec]) -> str:
    """A group's name, whatever its order."""
    return "+".join(sorted(map(str, group)))
