"""The secret that engines and a server of blocks share: a file of one line, or of two.

The first line proves who may speak. From the second, or without one from the first, come names and MACs of blocks: a
server whose file has the first line alone, where engines have two, can neither make a block that they would use nor
tell whether a text was asked for.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from penstock.base.errors import ConfigError
from penstock.formats.files import quoted

LEAST_CHARACTERS = 32
FIELD = "kv_offload_secret_file"


class Secrets(NamedTuple):
    """`connection`: between engines and the server; `blocks`: of engines. 32 bytes each."""

    connection: bytes
    blocks: bytes


def read_secrets(path: Path, field: str = FIELD) -> Secrets:
    """Raises ConfigError, of setting `field`, for a file that is not there, that others can read, or that says too
    little."""
    try:
        info = path.stat()
        text = path.read_text("ascii")
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{field}: {quoted(path)} cannot be read: {said}", field=field) from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    problem = ""
    if info.st_mode & 0o077:
        problem = f"can be read by others (mode {stat.S_IMODE(info.st_mode):o}); chmod 600 it"
    elif not 1 <= len(lines) <= 2 or any(len(line) < LEAST_CHARACTERS for line in lines):
        problem = f"has to have one line, or two, of {LEAST_CHARACTERS} characters or more (openssl rand -hex 32)"
    if problem:
        raise ConfigError(f"{field}: {quoted(path)} {problem}", field=field)
    return Secrets(_key(lines[0], b"connection"), _key(lines[-1], b"blocks"))


def make_secret(path: Path) -> bool:
    """Draw one, if the file is not there. Returns whether it was made. Raises ConfigError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"{quoted(path)} cannot be made: {error.strerror}", field="") from error
    with open(fd, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
    return True


def _key(line: str, use: bytes) -> bytes:
    return hmac.digest(line.encode(), b"penstock blocks: " + use, "sha256")
