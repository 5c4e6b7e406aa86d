"""Where blocks of KV may go outside this process: the setting `kv_offload`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from penstock.base.errors import ConfigError

DEFAULT_BYTES = 10 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B?)", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_PART = re.compile(r"\s+(?=[a-z]+:)")
_REMOTE = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:,\[\]]+):(\d{1,5})")


class DiskStore(NamedTuple):
    """A folder, and what its blocks may take."""

    folder: Path
    limit_bytes: int


class RemoteServer(NamedTuple):
    """A server of blocks (`penstock cache serve`)."""

    host: str
    port: int


class OutsideStores(NamedTuple):
    """At least one of them."""

    disk: DiskStore | None
    remote: RemoteServer | None


def offload_of(text: str) -> OutsideStores | None:
    """`disk:PATH`, `disk:PATH,20GiB`, `remote:HOST:PORT`, or one of each with a space between; None for "none".

    Raises ConfigError.
    """
    if text == "none":
        return None
    parts = _PART.split(text.strip())
    disks = [_disk(part, text) for part in parts if not part.startswith("remote:")]
    remotes = [_remote(part, text) for part in parts if part.startswith("remote:")]
    if max(len(disks), len(remotes)) > 1:
        raise ConfigError(f"kv_offload: {text!r} names two of a kind; give one disk, one remote", field="kv_offload")
    return OutsideStores(next(iter(disks), None), next(iter(remotes), None))


def _disk(part: str, text: str) -> DiskStore:
    kind, _, rest = part.partition(":")
    path, comma, size = rest.rpartition(",")
    if not comma:
        path, size = rest, ""
    match = _SIZE.fullmatch(size.strip()) if size else None
    if kind != "disk" or not path.strip() or (size and match is None):
        raise _refused(text)
    limit = DEFAULT_BYTES
    if match is not None:
        limit = size_of(size)
        if limit < 1 << 20:
            raise ConfigError(f"kv_offload: {size.strip()} is less than 1MiB", field="kv_offload")
    return DiskStore(Path(path.strip()).expanduser(), limit)


def size_of(text: str) -> int:
    """Bytes of a size such as 20GiB. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no size such as 20GiB", field="")
    return int(float(match[1]) * 2 ** _UNITS[match[2][:1].upper()])


def _remote(part: str, text: str) -> RemoteServer:
    match = _REMOTE.fullmatch(part.removeprefix("remote:").strip())
    if match is None or not 0 < int(match[2]) < 65536:
        raise _refused(text)
    return RemoteServer(match[1].removeprefix("[").removesuffix("]"), int(match[2]))


def _refused(text: str) -> ConfigError:
    return ConfigError(
        f"kv_offload: {text!r} is none of the forms that there are: none, disk:FOLDER, disk:FOLDER,20GiB, "
        "remote:HOST:PORT, or a disk and a remote with a space between",
        field="kv_offload",
    )
