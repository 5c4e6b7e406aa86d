"""Where blocks of KV may go outside this process: the setting `kv_offload`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from penstock.base.errors import ConfigError

DEFAULT_BYTES = 10 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B?)", re.IGNORECASE)
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class DiskStore(NamedTuple):
    """A folder, and what its blocks may take."""

    folder: Path
    limit_bytes: int


def disk_store(text: str) -> DiskStore | None:
    """`disk:PATH` or `disk:PATH,20GiB`; None for "none". Raises ConfigError."""
    if text == "none":
        return None
    kind, _, rest = text.partition(":")
    path, comma, size = rest.rpartition(",")
    if not comma:
        path, size = rest, ""
    match = _SIZE.fullmatch(size.strip()) if size else None
    if kind != "disk" or not path.strip() or (size and match is None):
        raise ConfigError(
            f"kv_offload: {text!r} is none of the forms that there are: none, disk:FOLDER, disk:FOLDER,20GiB",
            field="kv_offload",
        )
    limit = DEFAULT_BYTES
    if match is not None:
        limit = int(float(match[1]) * 2 ** _UNITS[match[2][:1].upper()])
        if limit < 1 << 20:
            raise ConfigError(f"kv_offload: {size.strip()} is less than 1MiB", field="kv_offload")
    return DiskStore(Path(path.strip()).expanduser(), limit)
