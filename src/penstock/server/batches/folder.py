"""Batches on disk, shared by servers: what each is, whose it is, and what somebody wants of it.

A batch belongs to the server that holds the lock of its lock file. The kernel lets go of it when that process dies,
however it dies, and not before: a server that is merely stopped keeps its batches. Nothing depends on clocks. A lock
file is there as long as its batch has not ended, so the names of lock files are all that a look needs to read.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.server.batches.disk import write_by_rename
from penstock.server.batches.files import FileStore, whole_bytes
from penstock.server.call import Tenant
from penstock.server.schema.batches import BatchObject

log = logging.getLogger("penstock.server")
FINAL = ("completed", "failed", "expired", "cancelled")
MAX_KEPT = 1000
"""Per tenant; of finished batches the oldest are forgotten (their files stay)."""
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


class Record(msgspec.Struct, kw_only=True):
    """A batch on disk. `served`: name of the model that it was made for; no other server goes on with it.

    `output_id` and `error_id` are chosen at the beginning: answers go into these files from the first on.
    """

    tenant: str
    served: str
    output_id: str
    error_id: str
    batch: BatchObject


@dataclass
class Claim:
    """A batch that is ours: `number` is the descriptor that holds its lock, until `BatchFolder.release`."""

    record: Record
    path: Path
    number: int


class BatchFolder:
    """Methods block on the disk. All may raise OSError."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._listed: dict[Path, tuple[int, list[Path]]] = {}
        self._warned = False

    # -- what a batch is -----------------------------------------------------------------------------------------

    def path(self, tenant: Tenant, batch_id: str) -> Path:
        return self._store.folder(tenant) / f"{batch_id}.json"

    def paths(self, tenant: Tenant, record: Record) -> tuple[Path, Path]:
        """Where its answers and its errors go."""
        folder = self._store.folder(tenant)
        return folder / record.output_id, folder / record.error_id

    def read(self, path: Path) -> Record | None:
        """None if there is none. Somebody may have asked for its end that its owner has not seen yet, and its owner may
        have died before it told of its first answers."""
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        if record.batch.status in ("validating", "in_progress") and self.is_cancelled(path):
            record.batch.status = "cancelling"
        if record.batch.status not in FINAL:
            for name, file_id in (("output", record.output_id), ("error", record.error_id)):
                setattr(record.batch, f"{name}_file_id", file_id if whole_bytes(path.with_name(file_id)) else None)
        return record

    def save(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_by_rename(path, data)

    def forget_oldest(self, tenant: Tenant) -> None:
        paths = sorted(self._store.folder(tenant).glob("batch_*.json"), key=lambda p: p.stat().st_mtime)
        for path in paths[: max(0, len(paths) - MAX_KEPT + 1)]:
            record = self.read(path)
            if record is not None and record.batch.status in FINAL:
                path.unlink(missing_ok=True)

    def unfinished(self, tenant: Tenant) -> Iterator[Record]:
        """Those of any server."""
        for lock in self._store.folder(tenant).glob("batch_*.lock"):
            record = self.read(lock.with_suffix(".json"))
            if record is not None and record.batch.status not in FINAL:
                yield record

    def in_use(self, tenant: Tenant, file_id: str) -> str | None:
        """Why a file cannot be deleted yet; None if it can."""
        for record in self.unfinished(tenant):
            if file_id == record.batch.input_file_id:
                return f"a batch is still reading {file_id}; cancel it, or wait for its end"
            if file_id in (record.output_id, record.error_id):
                return f"a batch is still writing {file_id}; cancel it, or wait for its end"
        return None

    # -- whose it is ---------------------------------------------------------------------------------------------

    def claim(self, path: Path) -> int | None:
        """A descriptor that holds the lock of the batch described at `path`; None if another server has it."""
        lock = path.with_suffix(".lock")
        number = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)  # not inherited: the engine must not hold it
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(number).st_ino == lock.stat().st_ino:
                return number
        except (BlockingIOError, FileNotFoundError):
            pass  # or its owner removed it between our two steps
        except BaseException:
            os.close(number)
            raise
        os.close(number)
        return None

    def release(self, path: Path, number: int, ended: bool) -> None:
        """Another server may have it; nobody needs to, if it has `ended`."""
        try:
            if ended:
                path.with_suffix(".cancel").unlink(missing_ok=True)
                path.with_suffix(".lock").unlink(missing_ok=True)
        finally:
            os.close(number)

    def look(self, known: set[str], can_run: Callable[[Record], bool], *, every: bool = False) -> list[Claim]:
        """Claim what has no owner and that we can go on with. `every`: look at each batch, not at lock files only."""
        claims = []
        for path in self._every() if every else self._locked():
            if path.stem not in known:
                try:
                    claim = self._look_at(path, can_run)
                except OSError as error:
                    if not self._warned:
                        log.warning("a batch cannot be looked at: %s", error.strerror or error)
                    self._warned = True
                    continue
                if claim is not None:
                    claims.append(claim)
        return sorted(claims, key=lambda claim: claim.record.batch.created_at)

    def _look_at(self, path: Path, can_run: Callable[[Record], bool]) -> Claim | None:
        record = self.read(path)
        if record is not None and not self._wants(record, path, can_run):
            return None
        if record is None and not path.with_suffix(".lock").exists():
            return None
        number = self.claim(path)
        if number is None:
            return None
        try:
            record = self.read(path)  # again: its owner may have gone on until a moment ago
            if record is not None and self._wants(record, path, can_run, ended=False):
                return Claim(record, path, number)
        except BaseException:
            os.close(number)
            raise
        self.release(path, number, ended=record is None or record.batch.status in FINAL)
        return None

    @staticmethod
    def _wants(record: Record, path: Path, can_run: Callable[[Record], bool], *, ended: bool = True) -> bool:
        """Also one that has ended (if `ended`) whose lock file is left over, and one with answers as they were kept
        before there were growing files, which a full disk could leave behind."""
        if record.batch.status in FINAL:
            left = record.batch.output_file_id is None and path.with_suffix(".out").exists()
            return left or (ended and path.with_suffix(".lock").exists())
        return record.batch.status == "cancelling" or can_run(record)

    def _every(self) -> list[Path]:
        return sorted(path for path in self._store.root.glob("*/batch_*.json") if BATCH_ID.fullmatch(path.stem))

    def _locked(self) -> list[Path]:
        """A folder whose names have not changed since the last look is not read again."""
        found: list[Path] = []
        for folder in self._store.root.glob("*/"):
            changed_ns = folder.stat().st_mtime_ns
            seen, names = self._listed.get(folder, (0, []))
            if seen != changed_ns:
                names = [path.with_suffix(".json") for path in folder.glob("batch_*.lock")]
                # A change in the same tick of the file system's clock as the one before would go unseen.
                self._listed[folder] = (changed_ns if seen == -changed_ns else -changed_ns, names)
            found += names
        return found

    # -- what somebody wants of it -------------------------------------------------------------------------------

    def ask_for_end(self, path: Path) -> None:
        """Whoever owns it, or comes to own it, ends it soon."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path.with_suffix(".cancel"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        record = self.read(path)
        if record is None or record.batch.status in FINAL:
            path.with_suffix(".cancel").unlink(missing_ok=True)  # it ended before anybody saw that

    @staticmethod
    def is_cancelled(path: Path) -> bool:
        return path.with_suffix(".cancel").exists()

    # -- answers -------------------------------------------------------------------------------------------------

    def prepare(self, tenant: Tenant, record: Record) -> None:
        """Let its files be read from the first answer on. Answers as an earlier version kept them are taken over."""
        for path, name, before in zip(self.paths(tenant, record), ("output", "error"), (".out", ".err"), strict=True):
            self._store.publish(tenant, path.name, f"{record.batch.id}_{name}.jsonl")
            old = self.path(tenant, record.batch.id).with_suffix(before)
            if old.exists() and not (path.exists() and path.stat().st_size):
                os.replace(old, path)
