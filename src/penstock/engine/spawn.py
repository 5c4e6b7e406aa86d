"""The beginning of an engine process: a child with one end of a socket pair and a shared page, not greeted yet.

Apart from `engine.process_link`, and with few imports, so that a server can spawn the child before it imports its own.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from penstock.engine.blackbox import BlackBox

COMMAND = (sys.executable, "-P", "-m", "penstock.launch.engine_process")


class Spawned(NamedTuple):
    """It imports what it needs and waits for a greeting; it ends by itself when `sock` is closed."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    box: BlackBox

    def drop(self) -> None:
        """End a child that nobody has greeted. Returns when it is gone."""
        self.sock.close()
        self.process.kill()
        self.process.wait()
        self.box.close()


def spawn(command: Sequence[str] = COMMAND) -> Spawned:
    """Start a child; the numbers of its two descriptors are appended to `command`. It dies with the calling thread.

    Raises OSError if it cannot be started.
    """
    ours, theirs = socket.socketpair()
    try:
        process, box = spawn_on(theirs, command)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Spawned(process, ours, box)


def spawn_on(sock: socket.socket, command: Sequence[str] = COMMAND) -> tuple[subprocess.Popen[bytes], BlackBox]:
    """The same for a child whose end of the connection there is already; it is the caller's to close here."""
    box = BlackBox.create()
    assert box.fd is not None
    # Ctrl-C is the parent's affair from the child's first moment on, before it can say so itself.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [*command, str(sock.fileno()), str(box.fd)],
            stdin=subprocess.DEVNULL,
            pass_fds=(sock.fileno(), box.fd),
        )
    except BaseException:
        box.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process, box
