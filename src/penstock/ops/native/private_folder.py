"""A folder that nobody but this user can change, and files in it that appear whole or not at all.

Everything is done through the descriptor of the folder, so what was checked is what is used, whatever happens to names
meanwhile.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.tmp")
_ABANDONED_S = 3600.0  # a temporary file that was not written to for so long belongs to a process that is gone
_WRITE_BYTES = 64 << 20  # one write call moves less than 2 GiB in any case
_log = logging.getLogger(__name__)


def _trouble(info: os.stat_result) -> str | None:
    """Why what `info` describes cannot be trusted."""
    if info.st_uid != os.geteuid():
        return f"belongs to user {info.st_uid}"
    if info.st_mode & 0o022:
        return f"can be written by others (mode {stat.S_IMODE(info.st_mode):o})"
    return None


class PrivateFolder:
    """Open with `PrivateFolder.open`; close after use (it is a context manager)."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    def open(cls, path: Path, *, create: bool) -> PrivateFolder | None:
        """None, and a warning, if it cannot be used; None without one if it is not there and `create` is off."""
        if not hasattr(os, "O_DIRECTORY"):  # Windows, where no folder is known to be nobody else's
            return None
        try:
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if create:
                _log.warning("the cache folder %s cannot be made", path)
            return None
        except (OSError, ValueError) as error:
            _log.warning("the cache folder %s cannot be used: %s", path, _reason(error))
            return None
        if trouble := _trouble(os.fstat(fd)):
            _log.warning("the cache folder %s is not used: it %s", path, trouble)
            os.close(fd)
            return None
        return cls(path, fd)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open_file(self, name: str) -> int | None:
        """A descriptor to read a file by; None if it is not there; None, and a warning, if it cannot be trusted."""
        try:
            # NONBLOCK: a pipe of this name must not make us wait; on regular files it means nothing.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s cannot be read: %s", self.path / name, _reason(error))
            return None
        info = os.fstat(fd)
        trouble = _trouble(info) if stat.S_ISREG(info.st_mode) else "is not a regular file"
        if trouble is None:
            return fd
        _log.warning("%s is not used: it %s", self.path / name, trouble)
        os.close(fd)
        return None

    def write(self, name: str, parts: Iterable[memoryview | bytes], head: Callable[[], bytes] | None = None) -> None:
        """A file of these parts, mode 0600: on the disk before it has its name. `head` says, behind the last part, what
        its first bytes are. Raises OSError, and leaves nothing."""
        temporary = f".{name}.{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            try:
                for part in parts:
                    _write_all(fd, part)
                if head is not None:
                    os.lseek(fd, 0, os.SEEK_SET)
                    _write_all(fd, head())
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self.remove(temporary)
            raise
        os.fsync(self._fd)

    def remove(self, name: str) -> None:
        """Nothing happens if it is not there or may not be removed."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self.path / name, _reason(error))

    def files(self, suffix: str) -> list[tuple[str, os.stat_result]]:
        """Regular files of this suffix, those used longest ago first. Removes what dead processes left half-written."""
        found = []
        for name in os.listdir(self._fd):
            try:
                info = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if _TEMPORARY.fullmatch(name) and info.st_mtime < time.time() - _ABANDONED_S:
                self.remove(name)
            elif name.endswith(suffix) and stat.S_ISREG(info.st_mode):
                found.append((name, info))
        return sorted(found, key=lambda item: (item[1].st_mtime_ns, item[0]))

    def free_bytes(self) -> int:
        """What the disk has left for this user."""
        info = os.fstatvfs(self._fd)
        return info.f_bavail * info.f_frsize


def _write_all(fd: int, part: memoryview | bytes) -> None:
    view = memoryview(part)
    while view.nbytes:
        view = view[os.write(fd, view[:_WRITE_BYTES]) :]


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
