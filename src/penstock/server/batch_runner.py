"""Batches, as work of low priority: only slots that nobody else wants. Their state is on disk; a restart goes on."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.base.errors import EngineError, InputError, RefusedError
from penstock.server.batch_job import Job
from penstock.server.batch_lines import ENDPOINTS, LineReader, Results, read_lines
from penstock.server.context import ANYONE, Server, Tenant
from penstock.server.file_store import FileStore, write_by_rename
from penstock.server.inner import Answer, post
from penstock.server.schema.batches import BatchObject, BatchRequest, RequestCounts

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = logging.getLogger("penstock.server")
BATCH_PRIORITY = 1_000_000
"""Smaller goes first; requests that say nothing have 0."""
MAX_RUNNING = 4
MAX_UNFINISHED = 64
"""Per tenant."""
MAX_KEPT = 1000
"""Per tenant; of finished batches the oldest are forgotten (their files stay)."""
_ID = re.compile(r"batch_[0-9a-f]{24}")
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_FINAL = ("completed", "failed", "expired", "cancelled")


class Record(msgspec.Struct, kw_only=True):
    """A batch on disk. `served`: name of the model that it was made for; no other server goes on with it.

    `output_id` and `error_id` are chosen at the beginning, so that finishing twice makes the same files.
    """

    tenant: str
    served: str
    output_id: str
    error_id: str
    batch: BatchObject


class LowGate:
    """Lets a line in only while the engine has slots left that nobody waits for."""

    def __init__(self, server: Server) -> None:
        self._server = server
        info = server.client.info
        self._slots = info.max_num_seqs if info is not None and info.max_num_seqs else 8
        # A quarter of the slots stays free, so that whoever comes now starts at the next step.
        self.most = max(1, self._slots * 3 // 4)
        self._num = 0
        self._changed = asyncio.Event()

    def gone(self) -> bool:
        return self._server.client.state in ("failed", "stopped")

    def is_quiet(self) -> bool:
        client = self._server.client
        return (
            client.state == "ready"
            and not self._server.service.draining
            and client.snapshot.num_waiting == 0
            and client.num_live < self._slots
        )

    async def enter(self) -> None:
        while self._num >= self.most or not self.is_quiet():
            if self.gone():
                raise EngineError("the engine is gone")
            self._changed.clear()
            # What others do makes no event here; a look 20 times a second costs nothing.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.05)
        self._num += 1

    def leave(self) -> None:
        self._num -= 1
        self._changed.set()


@dataclass
class _Active:
    record: Record
    tenant: Tenant
    task: asyncio.Task[None] | None = None
    results: Results | None = None


class BatchRunner:
    """All batches of a server. Methods belong to the event loop's thread."""

    def __init__(self, server: Server, store: FileStore, wall_s: Callable[[], float] = time.time) -> None:
        self._server, self._store, self._wall_s = server, store, wall_s
        self._loop = asyncio.get_running_loop()
        self._app: ASGIApp | None = None
        self._active: dict[str, _Active] = {}
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._gate = LowGate(server)
        self._resuming: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, app: ASGIApp) -> None:
        """The application exists: go on with what an earlier server left. May be called from any thread."""
        self._app = app
        if self._store.max_bytes:
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._resuming = asyncio.create_task(self._resume(), name="batches-resume")

    async def _resume(self) -> None:
        for record in await asyncio.to_thread(self._unfinished):
            tenant = self._tenant(record.tenant)
            if tenant is not None:
                log.info("batch %s goes on", record.batch.id)
                self._launch(_Active(record, tenant))

    def _unfinished(self) -> list[Record]:
        found = [self._read(path) for path in sorted(self._store.root.glob("*/batch_*.json"))]
        names = (self._server.model_name, *self._server.aliases)
        open_ones = [r for r in found if r is not None and r.batch.status not in _FINAL and r.served in names]
        return sorted(open_ones, key=lambda r: r.batch.created_at)

    def _tenant(self, name: str) -> Tenant | None:
        """Whoever has that name now; None if nobody has."""
        keys = self._server.parts.get("keys")
        known: list[Tenant] = [] if keys is None else keys.tenants
        if name == ANYONE.name and (keys is None or not keys.has_users):
            return ANYONE
        return next((tenant for tenant in known if tenant.name == name), None)

    async def close(self) -> None:
        """Stop where we are; another server can go on from here."""
        tasks = [a.task for a in self._active.values() if a.task is not None]
        tasks += [self._resuming] if self._resuming is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what the routes ask for ---------------------------------------------------------------------------------

    def reads(self, file_id: str) -> bool:
        open_ones = (a.record.batch for a in self._active.values() if a.record.batch.status not in _FINAL)
        return any(batch.input_file_id == file_id for batch in open_ones)

    async def create(self, tenant: Tenant, wanted: BatchRequest) -> BatchObject:
        """Raises InputError, RefusedError."""
        window_s = _check(wanted)
        try:
            await asyncio.to_thread(self._store.get, tenant, wanted.input_file_id)
        except RefusedError as error:
            raise RefusedError(str(error), status=404, param="input_file_id") from None
        if sum(a.tenant.name == tenant.name for a in self._active.values()) >= MAX_UNFINISHED:
            raise RefusedError(
                f"{MAX_UNFINISHED} batches are waiting or running already", status=429, retry_after_s=60.0
            )
        now = int(self._wall_s())
        batch = BatchObject(
            id="batch_" + secrets.token_hex(12),
            endpoint=wanted.endpoint,
            model=self._server.model_name,
            input_file_id=wanted.input_file_id,
            completion_window=wanted.completion_window,
            status="validating",
            created_at=now,
            expires_at=now + window_s,
            request_counts=RequestCounts(),
            metadata=wanted.metadata,
        )
        record = Record(
            tenant=tenant.name,
            served=self._server.model_name,
            output_id=self._store.new_id(),
            error_id=self._store.new_id(),
            batch=batch,
        )
        await asyncio.to_thread(self._forget_oldest, tenant)
        active = _Active(record, tenant)
        await self._save(active)
        self._launch(active)
        return batch

    async def get(self, tenant: Tenant, batch_id: str) -> BatchObject:
        """Raises RefusedError (404)."""
        active = self._active.get(batch_id)
        if active is not None and active.tenant.name == tenant.name:
            return self._shown(active)
        path = self._store.folder(tenant) / f"{batch_id}.json"
        record = await asyncio.to_thread(self._read, path) if _ID.fullmatch(batch_id) else None
        if record is None:
            raise RefusedError(f"there is no batch {batch_id[:64]!r}", status=404, param="batch_id")
        return record.batch

    async def list(self, tenant: Tenant) -> list[BatchObject]:
        """Newest first."""
        paths = await asyncio.to_thread(lambda: list(self._store.folder(tenant).glob("batch_*.json")))
        found = [await self.get(tenant, path.stem) for path in paths]
        return sorted(found, key=lambda b: (-b.created_at, b.id))

    async def cancel(self, tenant: Tenant, batch_id: str) -> BatchObject:
        """Lines in flight are given up at once. A batch that has ended stays as it is. Raises RefusedError (404)."""
        batch = await self.get(tenant, batch_id)
        active = self._active.get(batch_id)
        if active is None or active.task is None or batch.status in (*_FINAL, "finalizing", "cancelling"):
            return batch
        self._enter(active, "cancelling")
        await self._save(active)
        active.task.cancel()
        return self._shown(active)

    def _shown(self, active: _Active) -> BatchObject:
        batch, results = active.record.batch, active.results
        if results is not None:
            counts = batch.request_counts
            counts.completed, counts.failed = results.completed, results.failed
            counts.total = max(counts.total, results.completed + results.failed)
        return batch

    # -- one batch -----------------------------------------------------------------------------------------------

    def _launch(self, active: _Active) -> None:
        batch_id = active.record.batch.id
        self._active[batch_id] = active
        active.task = asyncio.create_task(self._work(active), name=batch_id)

    async def _work(self, active: _Active) -> None:
        batch = active.record.batch
        try:
            with self._lock(active) as ours:
                if not ours:
                    return  # another server of this folder runs it
                try:
                    if batch.status != "cancelling":
                        async with self._slots:
                            await self._run(active)
                except asyncio.CancelledError:
                    if batch.status != "cancelling":
                        raise
                    active.task and active.task.uncancel()
                if batch.status == "cancelling":
                    await self._finish(active, "cancelled")
        except EngineError as error:
            log.warning("batch %s stops here: %s; the next server goes on with it", batch.id, error)
        except Exception as error:
            log.exception("batch %s failed", batch.id)
            self._enter(active, "failed")
            told = f"the server cannot go on with it: {type(error).__name__}"
            batch.errors = {"object": "list", "data": [{"code": "server_error", "message": told}]}
            with contextlib.suppress(OSError):
                await self._save(active)
        finally:
            if active.results is not None:
                with contextlib.suppress(OSError):
                    active.results.close()
            self._active.pop(batch.id, None)

    async def _run(self, active: _Active) -> None:
        batch, server = active.record.batch, self._server
        source = self._store.path(active.tenant, batch.input_file_id)
        longest = server.config.max_body_bytes
        if batch.status in ("validating", "in_progress"):
            batch.request_counts.total = await asyncio.to_thread(lambda: sum(1 for _ in read_lines(source, longest)))
            if batch.status == "validating":
                self._enter(active, "in_progress")
                await self._save(active)
            results = active.results = Results(*self._paths(active))
            await asyncio.to_thread(results.open)
            job = Job(
                LineReader(source, batch.endpoint, longest, server.model_name), results, self._asker(active.tenant),
                self._gate, batch.id, expires_in_s=max(0.0, (batch.expires_at or 0) - self._wall_s()),
            )  # fmt: skip
            await job.run()
            if job.expired:
                batch.expired_at = int(self._wall_s())
            self._enter(active, "finalizing")
            self._shown(active)
            await self._save(active)
        await self._finish(active, "expired" if batch.expired_at is not None else "completed")

    async def _finish(self, active: _Active, status: str) -> None:
        """Turn what was written into files. Doing it again after a crash changes nothing."""
        record, batch = active.record, active.record.batch
        self._shown(active)
        if active.results is not None:
            await asyncio.to_thread(active.results.close)
        for path, file_id, name in zip(
            self._paths(active), (record.output_id, record.error_id), ("output", "error"), strict=True
        ):
            made = path.with_name(file_id)
            if path.exists() and path.stat().st_size == 0:
                path.unlink()
            if path.exists() or made.exists():
                filename = f"{batch.id}_{name}.jsonl"
                await asyncio.to_thread(self._store.adopt, active.tenant, path, file_id, filename, "batch_output")
                setattr(batch, f"{name}_file_id", file_id)
        self._enter(active, status)
        await self._save(active)

    def _asker(self, tenant: Tenant) -> Callable[[str, bytes, str], asyncio.Future[Answer] | asyncio.Task[Answer]]:
        app = self._app
        assert app is not None

        def ask(path: str, body: bytes, request_id: str) -> asyncio.Task[Answer]:
            return asyncio.ensure_future(post(app, path, body, tenant, request_id, BATCH_PRIORITY))

        return ask

    # -- disk ----------------------------------------------------------------------------------------------------

    def _enter(self, active: _Active, status: str) -> None:
        active.record.batch.status = status
        setattr(active.record.batch, f"{status}_at", int(self._wall_s()))

    def _paths(self, active: _Active) -> tuple[Path, Path]:
        base = self._store.folder(active.tenant) / active.record.batch.id
        return base.with_suffix(".out"), base.with_suffix(".err")

    async def _save(self, active: _Active) -> None:
        folder = self._store.make_folder(active.tenant)
        path = folder / f"{active.record.batch.id}.json"
        await asyncio.to_thread(write_by_rename, path, msgspec.json.encode(active.record))

    @staticmethod
    def _read(path: Path) -> Record | None:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError):
            return None

    def _forget_oldest(self, tenant: Tenant) -> None:
        paths = sorted(self._store.folder(tenant).glob("batch_*.json"), key=lambda p: p.stat().st_mtime)
        for path in paths[: max(0, len(paths) - MAX_KEPT + 1)]:
            record = self._read(path)
            if record is not None and record.batch.status in _FINAL:
                path.unlink(missing_ok=True)

    @contextmanager
    def _lock(self, active: _Active) -> Iterator[bool]:
        """Whether this batch is ours to run: several servers may share a folder."""
        path = self._store.folder(active.tenant) / f"{active.record.batch.id}.lock"
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
            if active.record.batch.status in _FINAL:
                path.unlink(missing_ok=True)
        finally:
            os.close(number)


def _check(wanted: BatchRequest) -> int:
    """The completion window in seconds. Raises InputError."""
    if wanted.endpoint not in ENDPOINTS:
        raise InputError(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    match = _WINDOW.fullmatch(wanted.completion_window)
    if match is None:
        raise InputError("completion_window must be a time such as 24h", param="completion_window")
    metadata = wanted.metadata or {}
    if len(metadata) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in metadata.items()):
        raise InputError("metadata may have 16 entries, keys of 64 and values of 512 characters", param="metadata")
    return int(match[1]) * _SECONDS[match[2]]


async def install(server: Server) -> None:
    """Add this part to a server that is being built; its engine is ready."""
    runner = BatchRunner(server, server.parts["files"])
    server.parts["batches"] = runner
    server.closers.append(runner.close)
