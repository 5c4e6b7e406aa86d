"""Uploaded files on disk: one folder per tenant, content beside a small description, everything written by rename.

The disk is the truth: other servers may share the folder, and a restart loses nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.base.errors import InputError, RefusedError
from penstock.base.hashing import digest
from penstock.server.batches import disk
from penstock.server.call import Tenant
from penstock.server.context import Server
from penstock.server.schema.files import FileObject

MAX_FILES = 10_000
"""Per tenant."""
_ID = re.compile(r"file-[0-9a-f]{24}")
_UPLOAD = disk.TEMPORARY
_COUNTED = (_UPLOAD, "file-", "batch_")
GROWING = "uploaded"
"""Status of a file that a batch still writes to."""
_COUNT_S = 1.0  # how long a count of what other servers write is good for
_LEFT_S = 60.0  # what no server has touched for so long, and none holds, is left over
_TAIL_BYTES = 1 << 16


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "penstock" / "files"


def clean_name(name: str | None) -> str:
    """A file name as it may be shown and sent back; never used as a path."""
    last = re.split(r"[/\\]", name or "")[-1]
    printable = "".join(c for c in last if c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF).strip()
    return printable[:255] if printable not in ("", ".", "..") else "upload"


class _Usage:
    """What a tenant's files take: `counted` on the disk, since other servers may write there too, and our own since."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counted = 0
        self.since = 0
        self.at_s = float("-inf")


class FileStore:
    """Methods block on the disk: call them from a thread if they may be long. `max_bytes` is per tenant: the contents
    of all its files, outputs of batches and unfinished uploads among them, whichever server of the folder wrote them.
    """

    def __init__(self, root: Path, max_bytes: int, wall_s: Callable[[], float] = time.time) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.wall_s = wall_s
        self._used: dict[Path, _Usage] = {}

    def folder(self, tenant: Tenant) -> Path:
        """Where a tenant's files are. Names of tenants are not file names."""
        return self.root / digest(b"files", tenant.name.encode()).hex()[:32]

    def make_folder(self, tenant: Tenant) -> Path:
        folder = self.folder(tenant)
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def new_id(self) -> str:
        return "file-" + secrets.token_hex(12)

    # -- reading -------------------------------------------------------------------------------------------------

    def get(self, tenant: Tenant, file_id: str) -> FileObject:
        """Raises RefusedError (404)."""
        found = self._read(self.folder(tenant) / f"{file_id}.json") if _ID.fullmatch(file_id) else None
        if found is None:
            raise RefusedError(f"there is no file {file_id[:64]!r}", status=404, param="file_id")
        return found

    def path(self, tenant: Tenant, file_id: str) -> Path:
        """Where its content is. Raises RefusedError (404)."""
        self.get(tenant, file_id)
        return self.folder(tenant) / file_id

    def list(self, tenant: Tenant) -> list[FileObject]:
        """Newest first."""
        try:
            names = os.listdir(self.folder(tenant))
        except FileNotFoundError:
            return []
        ids = (name.removesuffix(".json") for name in names if name.endswith(".json"))
        found = [self._read(self.folder(tenant) / f"{i}.json") for i in ids if _ID.fullmatch(i)]
        shown = (f for f in found if f is not None and (f.bytes or f.status != GROWING))
        return sorted(shown, key=lambda f: (-f.created_at, f.id))

    @staticmethod
    def _read(path: Path) -> FileObject | None:
        """None if there is none. Raises OSError if that cannot be said."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=FileObject)
            if found.status == GROWING:
                found.bytes = whole_bytes(path.with_suffix(""))
            return found
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    # -- writing -------------------------------------------------------------------------------------------------

    def begin(self, tenant: Tenant) -> Upload:
        """Raises RefusedError if the tenant has too many files or this server keeps none, OSError."""
        if self.max_bytes == 0:
            raise RefusedError("this server keeps no files (max_files_bytes is 0)", status=501)
        self.check_number(tenant)
        return Upload(self, tenant, self.make_folder(tenant))

    def check_number(self, tenant: Tenant) -> None:
        """Raises RefusedError (413) if the tenant has as many files as it may have."""
        if sum(name.startswith("file-") for name in os.listdir(self.make_folder(tenant))) // 2 >= MAX_FILES:
            raise RefusedError(f"there are {MAX_FILES} files already; delete some", status=413, code="too_many_files")

    def append(self, folder: Path, number: int, data: bytes) -> None:
        """Write at the end of an open file of a tenant's folder, all of it or nothing.

        Raises RefusedError (413) if the tenant's bytes are used up (`file_too_large` if they never sufficed), OSError.
        Exact among the writers of one server; each further server may be one such piece over it.
        """
        if len(data) > self.max_bytes:
            raise RefusedError(
                f"{len(data)} bytes at once are more than all your files may take ({self.max_bytes})",
                status=413, code="file_too_large", param="file",
            )  # fmt: skip
        usage = self._used.setdefault(folder, _Usage())
        with usage.lock:
            # The nearer the limit, the more often: sixteen writers together cannot pass it between two counts.
            near = (usage.since + len(data)) * 16 > self.max_bytes - usage.counted
            if near or time.monotonic() > usage.at_s + _COUNT_S:
                self._count(usage, folder)
            if usage.counted + usage.since + len(data) > self.max_bytes:
                raise self._full()
            disk.append(number, data)
            usage.since += len(data)

    def check_room(self, folder: Path) -> None:
        """Raises RefusedError (413) if the tenant's files take more than they may."""
        usage = self._used.setdefault(folder, _Usage())
        with usage.lock:
            self._count(usage, folder)
            if usage.counted > self.max_bytes:
                raise self._full()

    def _full(self) -> RefusedError:
        return RefusedError(
            f"your files would take more than {self.max_bytes} bytes; delete some, or upload less",
            status=413, code="files_full", param="file",
        )  # fmt: skip

    @staticmethod
    def _count(usage: _Usage, folder: Path) -> None:
        total = 0
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(_COUNTED) and not entry.name.endswith((".json", ".lock", ".cancel")):
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat().st_size
        usage.counted, usage.since, usage.at_s = total, 0, time.monotonic()

    def publish(self, tenant: Tenant, file_id: str, filename: str) -> None:
        """Let a file of a batch's answers be read while it grows. It may be there already."""
        path = self.make_folder(tenant) / f"{file_id}.json"
        if not path.exists():
            self.describe(path, FileObject(
                id=file_id, bytes=0, created_at=int(self.wall_s()), filename=filename, purpose="batch_output",
                status=GROWING,
            ))  # fmt: skip

    def finish(self, tenant: Tenant, file_id: str) -> bool:
        """A published file is complete; False, and it is gone, if nothing was written. Again: changes nothing."""
        content = self.folder(tenant) / file_id
        described = self._read(content.with_suffix(".json"))
        if described is None or not described.bytes:
            content.with_suffix(".json").unlink(missing_ok=True)
            content.unlink(missing_ok=True)
            return False
        if described.status == GROWING:
            described.status = "processed"
            self.describe(content.with_suffix(".json"), described)
        return True

    @staticmethod
    def describe(path: Path, described: FileObject) -> None:
        """Write a description. Raises OSError, and leaves what was there."""
        disk.write_by_rename(path, msgspec.json.encode(described))

    def delete(self, tenant: Tenant, file_id: str, in_use: Callable[[], str | None] = lambda: None) -> None:
        """Raises RefusedError: 404; 409 with the sentence of `in_use`, which says what still needs it."""
        self.get(tenant, file_id)
        folder = self.folder(tenant)
        path, taken = folder / f"{file_id}.json", folder / f"{_UPLOAD}{secrets.token_hex(12)}"
        if (reason := in_use()) is None:
            # A batch that begins meanwhile, in whatever server, saves itself and then looks for this file; we take it
            # away and then look for batches. So one of the two sees the other.
            os.replace(path, taken)
            if (reason := in_use()) is None:
                (folder / file_id).unlink(missing_ok=True)
                taken.unlink(missing_ok=True)
                if (usage := self._used.get(folder)) is not None:
                    usage.at_s = float("-inf")
                return
            os.replace(taken, path)
        raise RefusedError(reason, status=409, param="file_id")

    def sweep(self) -> None:
        """Remove what uploads left behind whose server died, and contents that lost their descriptions."""
        for folder in self.root.glob("*/"):
            names = set(os.listdir(folder))
            for name in names:
                orphan = _ID.fullmatch(name) is not None and f"{name}.json" not in names
                if name.startswith(_UPLOAD) or orphan:
                    with contextlib.suppress(OSError):
                        self._sweep_one(folder / name)

    def _sweep_one(self, path: Path) -> None:
        if abs(self.wall_s() - path.stat().st_mtime) < _LEFT_S:
            return  # between two steps, or an upload of a server that takes no locks
        number = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while it is being written
            path.unlink(missing_ok=True)
        finally:
            os.close(number)


class Upload:
    """A file that is being written. End it with `commit`; `discard` afterwards does nothing."""

    def __init__(self, store: FileStore, tenant: Tenant, folder: Path) -> None:
        self._store = store
        self._tenant = tenant
        self._folder = folder
        self._path = folder / (_UPLOAD + secrets.token_hex(12))
        self._number: int | None = disk.create(self._path)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Raises RefusedError (413) if the tenant's bytes are used up, OSError."""
        assert self._number is not None
        self._store.append(self._folder, self._number, data)
        self.num_bytes += len(data)

    def commit(self, filename: str | None, purpose: str) -> FileObject:
        """Raises InputError for an empty file, RefusedError, OSError; `discard` then leaves nothing."""
        assert self._number is not None
        if self.num_bytes == 0:
            raise InputError("the file is empty", param="file")
        os.fsync(self._number)
        self._store.check_room(self._folder)
        described = FileObject(
            id=self._store.new_id(), bytes=self.num_bytes, created_at=int(self._store.wall_s()),
            filename=clean_name(filename), purpose=purpose,
        )  # fmt: skip
        content = self._folder / described.id
        os.replace(self._path, content)
        self._path = content
        self._store.describe(content.with_suffix(".json"), described)
        os.close(self._number)
        self._number = None
        return described

    def discard(self) -> None:
        if self._number is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.with_suffix(".json").unlink(missing_ok=True)
        os.close(self._number)
        self._number = None


def whole_bytes(path: Path) -> int:
    """Bytes of a growing file up to the end of its last whole line; 0 if it is not there."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - _TAIL_BYTES)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
    except FileNotFoundError:
        pass
    return 0


async def install(server: Server) -> None:
    """Add this part to a server that is being built; its engine is ready."""
    root = Path(server.config.files_dir) if server.config.files_dir else default_folder()
    store = FileStore(root, server.config.max_files_bytes)
    if store.max_bytes:
        store.sweep()
    server.parts["files"] = store
