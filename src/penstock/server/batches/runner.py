"""Batches, as offline work, which runs in what other requests leave (`sched.offline`). Their state is on disk
(`folder`): a restart goes on, and so does any other server of the same folder."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.base.errors import InputError, RefusedError
from penstock.server.batches.disk import through
from penstock.server.batches.files import FileStore
from penstock.server.batches.folder import BATCH_ID, FINAL, BatchFolder, Claim, Record
from penstock.server.batches.lines import ENDPOINTS
from penstock.server.batches.work import BatchWork, EngineGate
from penstock.server.call import ANYONE, Tenant
from penstock.server.context import Server
from penstock.server.schema.batches import BatchObject, BatchRequest, RequestCounts
from penstock.server.transport.inner import Answer, post

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = logging.getLogger("penstock.server")
OFFLINE_SHARE = 0.75
"""The part of its completion window in which a batch is offline work; what is left then is served as all other is."""
MAX_RUNNING = 4
MAX_UNFINISHED = 64
"""Per tenant."""
LOOK_S = 1.0
"""Between two looks for batches without an owner."""
_SWEEP = 60  # looks between two sweeps
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class BatchRunner:
    """All batches of a server. Methods belong to the event loop's thread."""

    def __init__(self, server: Server, store: FileStore, wall_s: Callable[[], float] = time.time) -> None:
        self._server, self._store, self._wall_s = server, store, wall_s
        self._folder = BatchFolder(store)
        self._loop = asyncio.get_running_loop()
        self._app: ASGIApp | None = None
        self._active: dict[str, BatchWork] = {}
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._gate = EngineGate(server)
        self._watching: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, app: ASGIApp) -> None:
        """The application exists: go on with what an earlier server left. May be called from any thread."""
        self._app = app
        if self._store.max_bytes:
            self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._watching = asyncio.create_task(self._watch(), name="batches-watch")

    async def _watch(self) -> None:
        """Take over what no server owns, and tell the others how far ours are."""
        every = True  # at first also those that an earlier version left without a lock file
        for tick in itertools.count():
            try:
                if not self._gate.gone() and not self._server.service.draining:
                    for claim in await through(self._folder.look, set(self._active), self._can_run, every=every):
                        log.info("batch %s goes on", claim.record.batch.id)
                        self._launch(claim, self._tenant(claim.record.tenant) or Tenant(claim.record.tenant))
                    every = False
                for active in list(self._active.values()):
                    with contextlib.suppress(OSError):  # it says itself what it waits for
                        await active.look_after()
                if tick % _SWEEP == 0:
                    await asyncio.to_thread(self._store.sweep)
            except Exception as error:
                log.warning("batches could not be looked after: %s: %s", type(error).__name__, error)
            await asyncio.sleep(LOOK_S)

    def _can_run(self, record: Record) -> bool:
        names = (self._server.model_name, *self._server.aliases)
        return record.served in names and self._tenant(record.tenant) is not None

    def _tenant(self, name: str) -> Tenant | None:
        """Whoever has that name now; None if nobody has."""
        keys = self._server.parts.get("keys")
        known: list[Tenant] = [] if keys is None else keys.tenants
        if name == ANYONE.name and (keys is None or not keys.has_users):
            return ANYONE
        return next((tenant for tenant in known if tenant.name == name), None)

    async def close(self) -> None:
        """Stop where we are; another server can go on from here."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        tasks = [a.task for a in self._active.values() if a.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what the routes ask for ---------------------------------------------------------------------------------

    def in_use(self, tenant: Tenant, file_id: str) -> str | None:
        """Why a file cannot be deleted yet; None if it can. Blocks on the disk; call it from any thread."""
        return self._folder.in_use(tenant, file_id)

    async def create(self, tenant: Tenant, wanted: BatchRequest, num_lines: int = 0) -> BatchObject:
        """`num_lines`: of its input, if that is known. Raises InputError, RefusedError."""
        window_s = _check(wanted)
        try:
            await asyncio.to_thread(self._store.get, tenant, wanted.input_file_id)
        except RefusedError as error:
            raise RefusedError(str(error), status=404, param="input_file_id") from None
        if await asyncio.to_thread(lambda: sum(1 for _ in self._folder.unfinished(tenant))) >= MAX_UNFINISHED:
            raise RefusedError(
                f"{MAX_UNFINISHED} batches are waiting or running already", status=429, retry_after_s=60.0
            )
        await asyncio.to_thread(self._store.check_number, tenant)
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
            request_counts=RequestCounts(total=num_lines),
            metadata=wanted.metadata,
        )
        record = Record(
            tenant=tenant.name,
            served=self._server.model_name,
            output_id=self._store.new_id(),
            error_id=self._store.new_id(),
            batch=batch,
        )
        self._launch(await through(self._begin_batch, tenant, record), tenant)
        return batch

    def _begin_batch(self, tenant: Tenant, record: Record) -> Claim:
        """It is on the disk, and ours. Raises RefusedError, OSError; nothing is left then."""
        self._folder.forget_oldest(tenant)
        path = self._folder.path(tenant, record.batch.id)
        number = None
        try:
            number = self._folder.claim(path)
            if number is None:
                raise BlockingIOError(f"{path} is new, and somebody has it")
            self._folder.save(path, msgspec.json.encode(record))
            self._store.get(tenant, record.batch.input_file_id)  # nobody has deleted it meanwhile
        except BaseException:
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
            if number is not None:
                self._folder.release(path, number, ended=True)
            raise
        return Claim(record, path, number)

    async def get(self, tenant: Tenant, batch_id: str) -> BatchObject:
        """Of another server's batch: as that last told, a second ago. Raises RefusedError (404)."""
        active = self._active.get(batch_id)
        if active is not None and active.tenant.name == tenant.name:
            return active.shown()
        path = self._folder.path(tenant, batch_id)
        record = await asyncio.to_thread(self._folder.read, path) if BATCH_ID.fullmatch(batch_id) else None
        if record is None:
            raise RefusedError(f"there is no batch {batch_id[:64]!r}", status=404, param="batch_id")
        return record.batch

    async def list(self, tenant: Tenant) -> list[BatchObject]:
        """Newest first."""
        paths = await asyncio.to_thread(lambda: list(self._store.folder(tenant).glob("batch_*.json")))
        found = [await self.get(tenant, path.stem) for path in paths]
        return sorted(found, key=lambda b: (-b.created_at, b.id))

    async def cancel(self, tenant: Tenant, batch_id: str) -> BatchObject:
        """Lines in flight are given up at once, by another server within a second. A batch that has ended stays as it
        is. Raises RefusedError (404)."""
        batch = await self.get(tenant, batch_id)
        if batch.status in (*FINAL, "finalizing", "cancelling"):
            return batch
        active = self._active.get(batch_id)
        if active is not None:
            active.end()
        # Also for our own: should we die now, another server knows.
        await through(self._folder.ask_for_end, self._folder.path(tenant, batch_id))
        return await self.get(tenant, batch_id)

    async def delete(self, tenant: Tenant, batch_id: str) -> BatchObject:
        """Forget a batch that has ended, with its files. What it was. Raises RefusedError (404, 409)."""
        batch = await self.get(tenant, batch_id)
        if batch.status not in FINAL or batch_id in self._active:
            raise RefusedError(f"{batch_id[:64]!r} has not ended; cancel it, or wait for its end", status=409)
        await asyncio.to_thread(self._folder.path(tenant, batch_id).unlink, missing_ok=True)
        for file_id in filter(None, (batch.input_file_id, batch.output_file_id, batch.error_file_id)):
            with contextlib.suppress(RefusedError):  # gone already, or another batch needs it
                await asyncio.to_thread(self._store.delete, tenant, file_id, partial(self.in_use, tenant, file_id))
        return batch

    # -- one batch -----------------------------------------------------------------------------------------------

    def _launch(self, claim: Claim, tenant: Tenant) -> None:
        batch_id = claim.record.batch.id
        active = self._active[batch_id] = BatchWork(
            self._server,
            self._store,
            self._folder,
            claim,
            tenant,
            self._asker(tenant, claim.record.batch),
            self._gate,
            self._slots,
        )
        active.task = asyncio.create_task(active.run(), name=batch_id)
        active.task.add_done_callback(partial(self._over, batch_id))

    def _over(self, batch_id: str, task: asyncio.Task[None]) -> None:
        self._active.pop(batch_id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch %s stopped", batch_id, exc_info=error)

    def _asker(
        self, tenant: Tenant, batch: BatchObject
    ) -> Callable[[str, bytes, str], asyncio.Future[Answer] | asyncio.Task[Answer]]:
        app = self._app
        assert app is not None
        offline_until = batch.created_at + OFFLINE_SHARE * ((batch.expires_at or batch.created_at) - batch.created_at)

        def ask(path: str, body: bytes, request_id: str) -> asyncio.Task[Answer]:
            return asyncio.ensure_future(
                post(app, path, body, tenant, request_id, max(0.0, offline_until - self._wall_s()))
            )

        return ask


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
