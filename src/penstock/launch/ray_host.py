"""What runs on each further host of a Ray cluster: an actor that starts our process for its ranks, and watches it.

Nothing here needs Ray: the actor is this class, and what it is given and answers is text and whole numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

_DIES_WITH_US = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the actor is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Ray ends an actor by SIGKILL, behind which nothing could clean up (PR_SET_PDEATHSIG stays over execv)."""
_LAST_LINES = 20


def tied(command: Sequence[str]) -> list[str]:
    """A command whose process is killed when the one that starts it ends, however it does (Linux)."""
    return [sys.executable, "-c", _DIES_WITH_US, str(os.getpid()), *command]


class RankHostActor:
    """`run` returns when the process has ended. Two calls may run at once."""

    def __init__(self, words: Sequence[str], secret: str) -> None:
        """`words`: of `penstock serve`, without the secret's file, which is made here."""
        self._words, self._secret = list(words), secret
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> tuple[int, str]:
        """(exit status, what it said last)."""
        with tempfile.TemporaryDirectory(prefix="penstock-ranks-") as folder:
            file = Path(folder) / "secret"
            with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as out:
                out.write(self._secret + "\n")
            command = [sys.executable, "-m", "penstock.cli.main", *self._words, "--ranks-secret-file", str(file)]
            self._process = process = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
            )  # fmt: skip
            last: deque[str] = deque(maxlen=_LAST_LINES)
            assert process.stderr is not None
            for line in process.stderr:  # also Ray's log of this actor has it
                last.append(line.rstrip())
                sys.stderr.write(line)
            return process.wait(), "\n".join(last)

    def pids(self) -> tuple[int, int]:
        """Of this actor, and of its process (0: none yet)."""
        return os.getpid(), 0 if self._process is None else self._process.pid
