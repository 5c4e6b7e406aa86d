"""Runs `penstock ARGUMENTS` as on a system without what Linux has and without kernels: other_systems.py macos|windows.

What such a Python lacks is taken away before anything of Penstock is imported. That shows that nothing there is needed;
it does not show that the rest of another system works.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import tempfile
from typing import Any

LINUX_ONLY = {
    os: {"sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "memfd_create", "posix_fadvise"},
    mmap: {"MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MAP_NORESERVE", "MAP_POPULATE"},
}
POSIX_ONLY = {
    os: {"geteuid", "getuid", "fork", "killpg", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "sysconf"},
    mmap: {name for name in dir(mmap) if name.startswith(("MAP_", "MADV_", "PROT_"))},
    signal: {"SIGKILL", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "SIGPIPE"},
}
POSIX_MODULES = {"fcntl", "resource", "uvloop", "pwd", "grp", "termios"}


class Without:
    """A finder of modules that does not find those."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, *args: Any) -> Any:
        return None if name in POSIX_MODULES else self.finder.find_spec(name, *args)


def take_away(system: str) -> None:
    lacking = [LINUX_ONLY, *([POSIX_ONLY] if system == "windows" else [])]
    for module, names in (item for group in lacking for item in group.items()):
        for name in names & set(dir(module)):
            delattr(module, name)
    if system == "windows":
        for name in POSIX_MODULES:
            sys.modules.pop(name, None)
        sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
        real = ctypes.CDLL.__init__

        def init(self: ctypes.CDLL, name: Any, *args: Any, **options: Any) -> None:
            if name is None:
                raise TypeError("there is no library of the process itself here")
            real(self, name, *args, **options)

        ctypes.CDLL.__init__ = init  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    take_away(sys.argv[1])
    from pathlib import Path

    from penstock.cli.main import main
    from penstock.ops.native import library

    library.FOLDER = Path(tempfile.mkdtemp())
    sys.exit(main(sys.argv[2:]))
