"""Locks of whole files between processes: the dead hold none. Where there are none (Windows), everybody has them."""

from __future__ import annotations

from typing import IO

try:
    import fcntl
except ImportError:  # Windows, where servers do not run
    fcntl = None  # type: ignore[assignment]


def lock_file(file: IO[bytes] | int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError if another has it and nobody wants to `wait`."""
    if fcntl is not None:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
