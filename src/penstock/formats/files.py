"""Reading small files that strangers wrote: regular files only, never more than asked for, one-sentence errors."""

from __future__ import annotations

import stat
from pathlib import Path

from penstock.base.errors import ModelError


def quoted(value: object, limit: int = 200) -> str:
    """`value` as it may stand in a one-line message: quoted, control characters escaped, cut after `limit`."""
    text = str(value)
    return repr(text) if len(text) <= limit else repr(text[:limit]) + "..."


def unreadable(path: Path, error: Exception) -> ModelError:
    """The ModelError for an operating system's refusal."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return ModelError(f"cannot read {quoted(path)}: {reason}")


def file_size(path: Path) -> int:
    """Size in bytes of a regular file; links are followed.

    Raises ModelError if there is none (opening a pipe or a device that calls itself a model could block for ever).
    """
    try:
        info = path.stat()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(info.st_mode):
        raise ModelError(f"{quoted(path)} is not a regular file")
    return info.st_size


def read_exactly(path: Path, offset: int, num_bytes: int) -> bytes:
    """`num_bytes` bytes from `offset`. Raises ModelError if the file is shorter; check sizes before asking."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(num_bytes)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if len(data) != num_bytes:
        raise ModelError(f"{quoted(path)} ends after {offset + len(data)} bytes, {offset + num_bytes} were expected")
    return data


def read_whole(path: Path, limit_bytes: int) -> bytes:
    """The whole file. Raises ModelError if it is not a regular file or longer than `limit_bytes`."""
    size = file_size(path)
    if size > limit_bytes:
        raise ModelError(f"{quoted(path)} has {size} bytes; at most {limit_bytes} are read from a file of this kind")
    return read_exactly(path, 0, size)


def read_text(path: Path, limit_bytes: int) -> str:
    """The whole file as UTF-8. Raises ModelError as `read_whole`, and when it is not UTF-8."""
    return decode(read_whole(path, limit_bytes), quoted(path))


def decode(data: bytes, what: str) -> str:
    """UTF-8 bytes as text; `what` names them in the ModelError raised when they are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{what} is not UTF-8 text (byte {error.start})") from error
