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
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[^\s\]]+)?\]|[^\s:,\[\]/]+):(\d+)")


class DiskStore(NamedTuple):
    """A folder, and what its blocks may take."""

    folder: Path
    limit_bytes: int


class RemoteServer(NamedTuple):
    """A server of blocks (`penstock cache serve`)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class OutsideStores(NamedTuple):
    """At least one of them. `remotes`: blocks go to one of these by their names (`runner.remote_blocks`)."""

    disk: DiskStore | None
    remotes: tuple[RemoteServer, ...]


def offload_of(text: str) -> OutsideStores | None:
    """`disk:PATH`, `disk:PATH,20GiB`, `remote:HOST:PORT` (any number of these), with spaces between; None for "none".

    Raises ConfigError.
    """
    if text == "none":
        return None
    parts = _PART.split(text.strip())
    disks = [_disk(part, text) for part in parts if not part.startswith("remote:")]
    remotes = tuple(_remote(part) for part in parts if part.startswith("remote:"))
    if len(disks) > 1:
        raise _wrong(f"{text!r} names two folders; give one")
    for remote in remotes:
        if remotes.count(remote) > 1:
            raise _wrong(f"{text!r} names the server {remote} twice; name each once")
    return OutsideStores(next(iter(disks), None), remotes)


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
            raise _wrong(f"{size.strip()} is less than 1MiB")
    return DiskStore(Path(path.strip()).expanduser(), limit)


def size_of(text: str) -> int:
    """Bytes of a size such as 20GiB. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no size such as 20GiB", field="")
    return int(float(match[1]) * 2 ** _UNITS[match[2][:1].upper()])


def _remote(part: str) -> RemoteServer:
    address = part.removeprefix("remote:").strip()
    match = _ADDRESS.fullmatch(address)
    if match is not None and 0 < int(match[2]) < 65536:
        return RemoteServer(match[1].removeprefix("[").removesuffix("]"), int(match[2]))
    if match is not None:
        problem = f"{match[2]} is no port; give one from 1 to 65535"
    elif "/" in address:
        problem = "it takes no URL; give remote:HOST:PORT alone"
    elif address.count(":") > 1 and "[" not in address:
        problem = "an IPv6 address stands in brackets; give remote:[::1]:PORT"
    elif (address.startswith("[") and address.endswith("]")) or ":" not in address:
        problem = f"it has no port; give remote:{address or 'HOST'}:PORT, which penstock cache serve says"
    else:
        problem = "it is none of remote:HOST:PORT, remote:[IPv6]:PORT"
    raise _wrong(f"{part!r}: {problem}")


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"kv_offload: {problem}", field="kv_offload")


def _refused(text: str) -> ConfigError:
    return _wrong(
        f"{text!r} is none of the forms that there are: none, disk:FOLDER, disk:FOLDER,20GiB, remote:HOST:PORT, or a "
        "disk and remotes with spaces between"
    )
