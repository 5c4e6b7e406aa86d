"""One batch of ours, from wherever it stands to its end. Nothing that a disk refuses ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from penstock.base.errors import EngineError, RefusedError
from penstock.server.batches.disk import through
from penstock.server.batches.files import FileStore
from penstock.server.batches.folder import FINAL, BatchFolder, Claim
from penstock.server.batches.job import Job
from penstock.server.batches.lines import LineReader, Results, read_lines
from penstock.server.call import Tenant
from penstock.server.context import Server
from penstock.server.errors import trouble
from penstock.server.schema.batches import BatchObject
from penstock.server.transport.inner import Answer

log = logging.getLogger("penstock.server")
Ask = Callable[[str, bytes, str], Awaitable[Answer]]
SLOTS_AHEAD = 4
"""Lines in the engine at once, in its slots."""
_RETRY_S = (0.25, 5.0)  # first and longest wait for a disk


class EngineGate:
    """Lets lines in while the engine takes any, so many at once that it can choose among them which share prefixes."""

    def __init__(self, server: Server) -> None:
        self._server = server
        info = server.client.info
        slots = info.max_num_seqs if info is not None and info.max_num_seqs else 8
        self.most = SLOTS_AHEAD * slots
        self._num = 0
        self._changed = asyncio.Event()

    def gone(self) -> bool:
        return self._server.client.state in ("failed", "stopped")

    def is_open(self) -> bool:
        return self._server.client.state in ("ready", "asleep") and not self._server.service.draining

    async def enter(self) -> None:
        while self._num >= self.most or not self.is_open():
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


class BatchWork:
    """`slots` are the places of running batches; a batch gives its own up while it waits for the disk."""

    def __init__(
        self, server: Server, store: FileStore, folder: BatchFolder, claim: Claim, tenant: Tenant,
        ask: Ask, low: EngineGate, slots: asyncio.Semaphore,
    ) -> None:  # fmt: skip
        self.record, self.tenant = claim.record, tenant
        self.task: asyncio.Task[None] | None = None
        self._server, self._store, self._folder, self._claim = server, store, folder, claim
        self._ask, self._low, self._slots = ask, low, slots
        self._results: Results | None = None
        self._outcome: str | None = None  # the status that it will end with, once that is known
        self._last_errors: dict[str, object] | None = None  # what it will say about itself at its end
        self._has_slot = False
        self._can_interrupt = False
        self._wake = asyncio.Event()
        self._saving = asyncio.Lock()
        self._saved = b""
        self._released = False

    # -- what others ask for -------------------------------------------------------------------------------------

    def end(self) -> None:
        """Cancel it, unless it is about to end."""
        if self.record.batch.status not in ("validating", "in_progress") or self._outcome is not None:
            return
        self._enter("cancelling")
        self._wake.set()
        if self._can_interrupt and self.task is not None:
            self.task.cancel()

    def shown(self) -> BatchObject:
        record, batch, results = self.record, self.record.batch, self._results
        if results is not None:
            counts = batch.request_counts
            counts.completed, counts.failed = results.completed, results.failed
            counts.total = max(counts.total, results.completed + results.failed)
            if batch.status not in FINAL:  # what is answered can be read already
                batch.output_file_id = record.output_id if counts.completed else None
                batch.error_file_id = record.error_id if counts.failed else None
        return batch

    async def look_after(self) -> None:
        """End it if another server was asked to, and tell other servers how far it is. Raises OSError."""
        if await asyncio.to_thread(self._folder.is_cancelled, self._claim.path):
            self.end()
        self.shown()
        if msgspec.json.encode(self.record) != self._saved:
            await self._save()

    # -- the gate of its lines -----------------------------------------------------------------------------------

    async def enter(self) -> None:
        await self._take_slot()
        await self._low.enter()

    def leave(self) -> None:
        self._low.leave()

    def gone(self) -> bool:
        return self._low.gone()

    async def _take_slot(self) -> None:
        if not self._has_slot:
            await self._slots.acquire()
            self._has_slot = True

    def _give_slot(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._slots.release()

    # -- its life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Returns when it has ended, or another server has to go on with it."""
        batch, ended, wait_s = self.record.batch, False, _RETRY_S[0]
        try:
            while not ended:
                try:
                    await self._carry()
                    ended = True
                except OSError as error:
                    log.warning("batch %s waits: %s", batch.id, error.strerror or error)
                    self._let_go()
                    self._stuck(error)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), wait_s)
                    self._wake.clear()
                    wait_s = min(_RETRY_S[1], 2 * wait_s)
        except EngineError as error:
            log.warning("batch %s stops here: %s; another server goes on with it", batch.id, error)
        finally:
            self._let_go()
            async with self._saving:
                self._released = True
            with contextlib.suppress(OSError):
                await through(self._folder.release, self._claim.path, self._claim.number, ended)

    async def _carry(self) -> None:
        """From wherever it stands to its end. Raises OSError where the disk does not let it; it can be called again."""
        batch = self.record.batch
        if self._outcome is None and batch.status in FINAL:
            # An earlier version left its answers where nobody could read them.
            self._outcome, self._last_errors = batch.status, batch.errors
        if self._outcome is None and batch.status == "cancelling":
            self._outcome = "cancelled"
        if self._outcome is None:
            try:
                self._can_interrupt = True
                await self._take_slot()
                self._outcome = await self._run()
            except asyncio.CancelledError:
                if batch.status != "cancelling":
                    raise
                self.task and self.task.uncancel()
                self._outcome = "cancelled"
            except (OSError, EngineError):
                raise
            except Exception as error:
                log.exception("batch %s failed", batch.id)
                told = str(error) if isinstance(error, RefusedError) else type(error).__name__
                self._last_errors = _errors("server_error", f"the server cannot go on with it: {told}")
                self._outcome = "failed"
            finally:
                self._can_interrupt = False
        await self._finish(self._outcome)

    async def _run(self) -> str:
        """The status that it ends with. Every answer is on the disk then."""
        batch, server = self.record.batch, self._server
        if batch.status == "finalizing":
            return "expired" if batch.expired_at is not None else "completed"
        source = await asyncio.to_thread(self._store.path, self.tenant, batch.input_file_id)
        longest = server.config.max_body_bytes
        try:
            batch.request_counts.total = await through(lambda: sum(1 for _ in read_lines(source, longest)))
        except FileNotFoundError:
            raise RefusedError(f"the content of {batch.input_file_id} is gone", status=404) from None
        if batch.status == "validating":
            self._enter("in_progress")
        results = await self._open()
        self._stuck(None)
        job = Job(
            LineReader(source, batch.endpoint, longest, server.model_name), results, self._ask,
            self, batch.id, on_stuck=self._stuck,
            expires_in_s=max(0.0, (batch.expires_at or 0) - self._store.wall_s()),
        )  # fmt: skip
        await job.run()
        if job.expired:
            batch.expired_at = int(self._store.wall_s())
        if job.num_unwritten:
            told = f"{job.num_unwritten} lines have neither answer nor error: there was no room for more"
            self._last_errors = _errors("no_room", told)
        await through(results.sync)
        self._enter("finalizing")
        return "expired" if job.expired else "completed"

    async def _open(self) -> Results:
        folder = self._store.folder(self.tenant)
        await through(self._folder.prepare, self.tenant, self.record)
        results = Results(*self._folder.paths(self.tenant, self.record), partial(self._store.append, folder))
        await through(results.open)
        self._results = results
        await self._save()
        return results

    async def _finish(self, status: str) -> None:
        """Say that its files are complete. Doing it again changes nothing."""
        record, batch = self.record, self.record.batch
        if self._results is None:
            await self._open()  # counts, and takes half a line away
        self.shown()
        await through(self._close_results)
        for file_id, name in ((record.output_id, "output"), (record.error_id, "error")):
            made = await through(self._store.finish, self.tenant, file_id)
            setattr(batch, f"{name}_file_id", file_id if made else None)
        batch.errors = self._last_errors
        before = batch.status
        if before != status:
            self._enter(status)
        try:
            await self._save()
        except BaseException:
            batch.status = before  # it has not ended before that is on the disk
            raise

    def _close_results(self) -> None:
        """Raises OSError; they are closed then all the same."""
        results, self._results = self._results, None
        if results is not None:
            results.close()

    def _let_go(self) -> None:
        """What has to be opened or taken again before it goes on."""
        with contextlib.suppress(OSError):
            self._close_results()
        self._give_slot()

    def _stuck(self, error: OSError | RefusedError | None) -> None:
        """Tell why it waits; None: it goes on."""
        if error is None:
            self.record.batch.errors = None
            return
        self.record.batch.errors = _errors(*_waiting(error))
        self._give_slot()

    def _enter(self, status: str) -> None:
        self.record.batch.status = status
        setattr(self.record.batch, f"{status}_at", int(self._store.wall_s()))

    async def _save(self) -> None:
        """Raises OSError."""
        async with self._saving:
            if not self._released:
                data = msgspec.json.encode(self.record)
                await through(self._folder.save, self._claim.path, data)
                self._saved = data


def _errors(code: str, message: str) -> dict[str, object]:
    return {"object": "list", "data": [{"code": code, "message": message, "param": None, "line": None}]}


def _waiting(error: OSError | RefusedError) -> tuple[str, str]:
    """Why a batch waits, as a code and a sentence."""
    if isinstance(error, RefusedError):
        why = "your files take all the room they may (max_files_bytes); it goes on when some are deleted"
        return "files_full", f"waiting for room: {why}. What is answered can be read; cancelling keeps it"
    told = trouble(error)
    code, why = (told[1], told[2].partition(";")[0]) if told is not None else ("storage_error", "the disk fails")
    return code, f"waiting: {why}; it goes on by itself. What is answered can be read; cancelling keeps it"
