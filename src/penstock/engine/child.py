"""How a process begins that belongs to another one: an engine's to its server, a rank's to its engine."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from penstock.base.log import setup

EXIT_BROKEN = 70
"""Exit status of a process whose step raised an exception: its traceback is on stderr."""
_PR_SET_PDEATHSIG = 1
_LOG_BYTES = 4 << 20
"""A log file that is larger is set aside before a process appends to it, in place of the one that was before."""


def begin(*, with_thread: bool = True) -> None:
    """Leave signals to the parent, and stacks behind after a crash; log lines go to stderr.

    `with_thread`: on Linux the kernel kills this process when the parent's thread that started it ends, whatever it is
    doing then. It is to end by itself, too, when the other end of its socket is closed.
    """
    # Signals to the whole group (Ctrl-C, a service manager) are the parent's affair.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if with_thread and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
    setup(default="info")


def open_log(path: str | None) -> TextIO:
    """Where stacks and tracebacks of this process go from now on: to the end of a file that only its user can read, or
    to standard error if none is named or it cannot be written."""
    if path is None:
        return sys.stderr
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.path.exists(path) and os.path.getsize(path) > _LOG_BYTES:
            os.replace(path, path + ".1")
        log = open(path, "a", 1, "utf-8", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115  kept
    except OSError as error:
        sys.stderr.write(f"penstock: {path} cannot be written ({error.strerror}): stacks go to standard error\n")
        return sys.stderr
    faulthandler.enable(log)
    return log
