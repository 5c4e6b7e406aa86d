"""Uploaded files on disk: one folder per tenant, content beside a small description, everything written by rename.

The disk is the truth: nothing is remembered but how many bytes each tenant has, so a restart loses nothing.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from penstock.base.errors import InputError, RefusedError
from penstock.base.hashing import digest
from penstock.server.context import Server, Tenant
from penstock.server.schema.files import FileObject

MAX_FILES = 10_000
"""Per tenant."""
_ID = re.compile(r"file-[0-9a-f]{24}")
_UPLOAD = "upload-"


def default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "penstock" / "files"


def clean_name(name: str | None) -> str:
    """A file name as it may be shown and sent back; never used as a path."""
    last = re.split(r"[/\\]", name or "")[-1]
    printable = "".join(c for c in last if c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF).strip()
    return printable[:255] if printable not in ("", ".", "..") else "upload"


class FileStore:
    """Methods block on the disk: call them from a thread if they may be long. `max_bytes` is per tenant."""

    def __init__(self, root: Path, max_bytes: int, wall_s: Callable[[], float] = time.time) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self.wall_s = wall_s
        self._used: dict[Path, int] = {}

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
        return sorted((f for f in found if f is not None), key=lambda f: (-f.created_at, f.id))

    @staticmethod
    def _read(path: Path) -> FileObject | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=FileObject)
        except (OSError, msgspec.MsgspecError):
            return None

    # -- writing -------------------------------------------------------------------------------------------------

    def begin(self, tenant: Tenant) -> Upload:
        """Raises RefusedError if the tenant has too many files or this server keeps none."""
        if self.max_bytes == 0:
            raise RefusedError("this server keeps no files (max_files_bytes is 0)", status=501)
        folder = self.make_folder(tenant)
        names = os.listdir(folder)
        if sum(name.endswith(".json") for name in names) >= MAX_FILES:
            raise RefusedError(f"there are {MAX_FILES} files already; delete some", status=413, code="too_many_files")
        if not any(name.startswith(_UPLOAD) for name in names):
            with os.scandir(folder) as entries:
                self._used[folder] = sum(entry.stat().st_size for entry in entries)
        return Upload(self, tenant, folder)

    def reserve(self, folder: Path, num_bytes: int) -> None:
        """Raises RefusedError (413) if the tenant has no room for that many bytes more."""
        used = self._used.get(folder, 0) + num_bytes
        if used > self.max_bytes:
            raise RefusedError(
                f"your files would take more than {self.max_bytes} bytes; delete some, or upload less",
                status=413, code="files_full", param="file",
            )  # fmt: skip
        self._used[folder] = used

    def release(self, folder: Path, num_bytes: int) -> None:
        self._used[folder] = max(0, self._used.get(folder, 0) - num_bytes)

    def adopt(self, tenant: Tenant, content: Path, file_id: str, filename: str, purpose: str) -> FileObject:
        """Make a file of what lies at `content` in the tenant's folder. Doing it again changes nothing."""
        folder = self.folder(tenant)
        if content.exists():
            os.replace(content, folder / file_id)
        size = (folder / file_id).stat().st_size
        described = FileObject(
            id=file_id, bytes=size, created_at=int(self.wall_s()), filename=filename, purpose=purpose
        )
        write_by_rename(folder / f"{file_id}.json", msgspec.json.encode(described))
        return described

    def delete(self, tenant: Tenant, file_id: str) -> None:
        """Raises RefusedError (404)."""
        described = self.get(tenant, file_id)
        folder = self.folder(tenant)
        (folder / f"{file_id}.json").unlink(missing_ok=True)
        (folder / file_id).unlink(missing_ok=True)
        self.release(folder, described.bytes)

    def sweep(self) -> None:
        """Remove what uploads left behind that never ended; once, before any begins."""
        for left in self.root.glob(f"*/{_UPLOAD}*"):
            # Another server may share this folder: only what has not grown for an hour is surely dead.
            if self.wall_s() - left.stat().st_mtime > 3600:
                left.unlink(missing_ok=True)


class Upload:
    """A file that is being written. End it with `commit`; `discard` afterwards does nothing."""

    def __init__(self, store: FileStore, tenant: Tenant, folder: Path) -> None:
        self._store = store
        self._tenant = tenant
        self._folder = folder
        self._path = folder / (_UPLOAD + secrets.token_hex(12))
        self._file: IO[bytes] | None = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Raises RefusedError (413) if the tenant's bytes are used up, OSError."""
        assert self._file is not None
        self._store.reserve(self._folder, len(data))
        self.num_bytes += len(data)
        self._file.write(data)

    def commit(self, filename: str | None, purpose: str) -> FileObject:
        """Raises InputError for an empty file."""
        assert self._file is not None
        if self.num_bytes == 0:
            raise InputError("the file is empty", param="file")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        return self._store.adopt(self._tenant, self._path, self._store.new_id(), clean_name(filename), purpose)

    def discard(self) -> None:
        if self._file is None:
            return
        self._file.close()
        self._file = None
        self._path.unlink(missing_ok=True)
        self._store.release(self._folder, self.num_bytes)


def write_by_rename(path: Path, data: bytes) -> None:
    """The file is either as it was or complete, whatever happens in between."""
    temporary = path.with_name(f"{_UPLOAD}{secrets.token_hex(12)}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


async def install(server: Server) -> None:
    """Add this part to a server that is being built; its engine is ready."""
    root = Path(server.config.files_dir) if server.config.files_dir else default_folder()
    store = FileStore(root, server.config.max_files_bytes)
    if store.max_bytes:
        store.sweep()
    server.parts["files"] = store
