"""How a process begins that belongs to another one: an engine's to its server, a rank's to its engine."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys

EXIT_BROKEN = 70
"""Exit status of a process whose step raised an exception: its traceback is on stderr."""
_PR_SET_PDEATHSIG = 1


def begin(*, with_thread: bool = True) -> None:
    """Leave signals to the parent, and stacks behind after a crash.

    `with_thread`: on Linux the kernel kills this process when the parent's thread that started it ends, whatever it is
    doing then. It is to end by itself, too, when the other end of its socket is closed.
    """
    # Signals to the whole group (Ctrl-C, a service manager) are the parent's affair.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if with_thread and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.enable()
