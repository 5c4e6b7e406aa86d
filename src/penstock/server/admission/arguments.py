"""Keys on the command line: whoever lists this machine's processes reads them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

from penstock.config import SERVER_SETTINGS

log = logging.getLogger("penstock.server")
FLAGS = (b"--api-key", b"--admin-api-key")


def hide_keys() -> None:
    """Overwrite keys among this process's arguments (Linux), and say that they could be seen until now."""
    try:
        seen = Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return
    places = key_places(seen)
    if not places:
        return
    hidden = _overwrite(seen, places)
    log.warning(
        "keys on the command line can be read by every user of this machine%s: give them as %s and %s in the "
        "environment, or in --api-keys-file", " while the server starts" if hidden else "",
        SERVER_SETTINGS["api_key"].variable, SERVER_SETTINGS["admin_api_key"].variable,
    )  # fmt: skip


def key_places(arguments: bytes) -> list[tuple[int, int]]:
    """(start, end) of each key in arguments that end with NUL."""
    found, at, before = [], 0, b""
    for argument in arguments.split(b"\0"):
        flag, _, value = argument.partition(b"=")
        end = at + len(argument)
        if before in FLAGS:
            found.append((at, end))
        elif flag in FLAGS and value:
            found.append((end - len(value), end))
        at, before = end + 1, argument
    return found


def _overwrite(seen: bytes, places: Sequence[tuple[int, int]]) -> bool:
    """Write stars where /proc/PID/cmdline, which reads `seen`, is read from. Whether that was possible."""
    try:
        # The fields behind the name in brackets begin with the third; arguments lie from field 48 to field 49.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[48 - 3]), int(fields[49 - 3])
    except (OSError, ValueError, IndexError):
        return False
    if not start or len(seen) != end - start or ctypes.string_at(start, end - start) != seen:
        return False
    for first, last in places:
        ctypes.memset(start + first, ord("*"), last - first)
    return True
