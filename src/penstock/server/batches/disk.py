"""What files and batches do to the disk: whole or not at all, and in words when the disk says no."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
TEMPORARY = "upload-"
"""How names begin of what is not complete yet; `FileStore.sweep` removes what a dead server left of it."""


def create(path: Path) -> int:
    """A descriptor of a new file that only this user can read. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def append(number: int, data: bytes) -> None:
    """Write at the end of a file, all of it or nothing. Raises OSError."""
    before = os.fstat(number).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(number, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(number, before)
        raise


def sync_folder(folder: Path) -> None:
    """What was renamed in it stays so, even if the power fails. Raises OSError."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_by_rename(path: Path, data: bytes) -> None:
    """The file is either as it was or complete, whatever happens in between. Raises OSError, and leaves nothing."""
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(12)}")
    try:
        number = create(temporary)
        try:
            append(number, data)
            os.fsync(number)
        finally:
            os.close(number)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


async def through(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run it in a thread, to its end even if we are cancelled meanwhile: what it writes is then written or was not,
    before a lock is let go."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen
        raise
