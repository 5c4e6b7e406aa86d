"""Running a program that a model wrote, to see whether it passes its tests. It runs with the caller's own rights.

Limits, not a sandbox: a process of its own in an empty folder, without environment, input and output, that is killed
after a time; processor time, memory and the size of files are limited. It can still read what the user can read and
reach the network: whoever does not want that runs the command in a container.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

_MEMORY_BYTES = 1 << 30
# The program must reach its end: leaving early by `sys.exit(0)` or `os._exit(0)` does not give the number that says so.
_DRIVER = """
import resource, sys
seconds, memory, passed = map(int, sys.argv[1:4])
for what, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0),
                   (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (most, most))
del sys.argv[1:]
text = sys.stdin.read()
try:
    exec(compile(text, "answer", "exec"), {"__name__": "__main__"})
except BaseException:
    passed = 1
import os
os._exit(passed)
"""


def passes(program: str, timeout_s: float) -> bool:
    """Whether the program runs to its end without an exception within `timeout_s` seconds."""
    passed = secrets.randbelow(200) + 50
    command = [
        sys.executable,
        "-I",
        "-B",
        "-c",
        _DRIVER,
        str(max(1, round(timeout_s))),
        str(_MEMORY_BYTES),
        str(passed),
    ]
    with tempfile.TemporaryDirectory(prefix="penstock-eval-") as folder:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, env={},
            start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            # What it started goes with it.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode == passed
