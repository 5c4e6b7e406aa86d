"""What packed weights are made of, as one hash: the key they are kept under.

Files are hashed whole (SHA-256), once: the hash is remembered by device, inode, size and both times of the file. The
time of the last change of the inode cannot be set back by a program, so a file that was exchanged under an old date is
hashed again. A file that changed in the last seconds is not remembered: the next change could carry the same times.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.base.cache import cache_folder
from penstock.base.errors import ModelError
from penstock.formats.files import file_size, quoted, unreadable
from penstock.ops.native.abi import ABI
from penstock.ops.native.packed_format import VERSION
from penstock.ops.native.private_folder import PrivateFolder

MEMORY_NAME = "hashes.json"
_MOST_REMEMBERED = 1000
_MOST_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000
_log = logging.getLogger(__name__)


def content_key(paths: Iterable[Path], scheme: str, extra: str = "", *, folder: Path | None = None) -> str:
    """The key, 64 hexadecimal digits, of weights out of these files packed as `scheme`.

    `extra`: whatever else decides the packed bytes (the model's shape, how its matrices are put together). `folder`:
    where hashes of files are remembered, by default the cache folder; if it cannot be used they are computed anew.
    The order of `paths` does not matter, nor do their names. Raises ModelError for a file that cannot be read.
    """
    hashes = sorted(FileHashes(cache_folder("weights") if folder is None else folder).of(list(paths)))
    parts = [f"penstock packed weights {VERSION}.{ABI}", scheme, extra, *hashes]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class FileHashes:
    """SHA-256 of files, remembered in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, paths: list[Path]) -> list[str]:
        """In hex, one per file. Raises ModelError for one that cannot be read."""
        known = self._load()
        num_known = len(known)
        hashes = [self._one(path, known) for path in paths]
        if len(known) > num_known:
            self._save(known)
        return hashes

    def _one(self, path: Path, known: dict[str, str]) -> str:
        file_size(path)  # a regular file, or an error in a sentence; opening a pipe would wait
        try:
            with path.open("rb") as file:
                before = os.fstat(file.fileno())
                found = known.get(_identity(before))
                if found is not None:
                    return found
                computed = hashlib.file_digest(file, "sha256").hexdigest()
                after = os.fstat(file.fileno())
        except OSError as error:
            raise unreadable(path, error) from error
        if _identity(before) != _identity(after):
            raise ModelError(f"{quoted(path)} changed while it was read")
        if time.time_ns() - max(after.st_mtime_ns, after.st_ctime_ns) > _SETTLED_NS:
            known[_identity(after)] = computed
        return computed

    def _load(self) -> dict[str, str]:
        folder = PrivateFolder.open(self._folder, create=False)
        if folder is None:
            return {}
        with folder:
            fd = folder.open_file(MEMORY_NAME)
        if fd is None:
            return {}
        try:
            with open(fd, "rb") as file:
                known = msgspec.json.decode(file.read(_MOST_BYTES), type=dict[str, str])
        except (OSError, msgspec.MsgspecError) as error:
            _log.warning("%s is not used: %s", self._folder / MEMORY_NAME, error)
            return {}
        return {name: value for name, value in known.items() if len(value) == 64}

    def _save(self, known: dict[str, str]) -> None:
        """What another process adds at the same time may be lost, and is then computed again."""
        newest = dict(list(known.items())[-_MOST_REMEMBERED:])
        folder = PrivateFolder.open(self._folder, create=True)
        if folder is None:
            return
        with folder:
            try:
                folder.write(MEMORY_NAME, [msgspec.json.encode(newest)])
            except OSError as error:
                _log.warning("hashes of weight files are not kept: %s: %s", self._folder, error.strerror or error)


def _identity(info: os.stat_result) -> str:
    return f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"
