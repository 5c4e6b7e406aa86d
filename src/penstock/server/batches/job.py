"""One batch file on its way through the application: as many lines at once as may be, each answer written at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import msgspec

from penstock.base.errors import EngineError, RefusedError
from penstock.server.batches.disk import through
from penstock.server.batches.lines import BatchLine, LineError, LineReader, Results
from penstock.server.transport.inner import Answer

Ask = Callable[[str, bytes, str], Awaitable[Answer]]
"""(path, body, request id) -> the application's answer."""

_GROUP = 256  # lines that are read and checked at a time
_RETRY_S = (0.25, 5.0)  # first and longest wait when the server says "not now"


class LineGate(Protocol):
    """Lets lines in. `enter` waits until one more may run; raises EngineError if none ever will."""

    async def enter(self) -> None: ...
    def leave(self) -> None: ...
    def gone(self) -> bool:
        """Whether the engine is gone for good, so that its last answers say nothing about their requests."""
        ...


class OpenGate:
    """At most `most` at once, whatever else happens."""

    def __init__(self, most: int, gone: Callable[[], bool] = lambda: False) -> None:
        self._room = asyncio.Semaphore(most)
        self._gone = gone

    async def enter(self) -> None:
        await self._room.acquire()
        if self._gone():
            raise EngineError("the engine is gone")

    def leave(self) -> None:
        self._room.release()

    def gone(self) -> bool:
        return self._gone()


class Job:
    """`on_done` is called after each line that was answered now (not for those of an earlier run).

    `on_stuck` is called with the error each time that an answer cannot be written, and with None once all could be.
    The answers wait meanwhile, and nothing more is begun; without it, such an error ends the job.
    """

    def __init__(
        self, lines: LineReader, results: Results, ask: Ask, gate: LineGate, name: str,
        *, expires_in_s: float | None = None, on_done: Callable[[BatchLine], None] | None = None,
        on_stuck: Callable[[OSError | RefusedError | None], None] | None = None,
    ) -> None:  # fmt: skip
        self._lines, self._results, self._ask, self._gate, self._name = lines, results, ask, gate, name
        self._on_done = on_done or (lambda line: None)
        self._on_stuck = on_stuck
        self._num_stuck = 0
        self._free = asyncio.Event()
        self._free.set()
        self._expires_in_s = expires_in_s
        self._deadline: float | None = None
        self.num_seen = 0
        self.num_unwritten = 0
        """Lines without an answer or an error: there was no room to the end of the time."""
        self.expired = False

    async def run(self) -> None:
        """Returns when every line has its answer, or the time is over. Cancelling leaves what can be resumed.

        Raises OSError (the disk), EngineError (the engine is gone; nothing is lost).
        """
        loop = asyncio.get_running_loop()
        self._deadline = None if self._expires_in_s is None else loop.time() + self._expires_in_s
        lines = iter(self._lines)
        try:
            async with asyncio.TaskGroup() as group:
                while chunk := await asyncio.to_thread(_some, lines):
                    for line in chunk:
                        self.num_seen += 1
                        if not self._results.has(line):
                            await self._start(line, group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _start(self, line: BatchLine, group: asyncio.TaskGroup) -> None:
        if line.error is None and not self._is_late():
            try:
                async with asyncio.timeout_at(self._deadline):
                    await self._free.wait()
                    await self._gate.enter()
            except TimeoutError:
                self.expired = True
            else:
                group.create_task(self._run(line))
                return
        await self._write(line, None, line.error or _EXPIRED)

    def _is_late(self) -> bool:
        late = self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline
        self.expired = self.expired or late
        return late

    async def _run(self, line: BatchLine) -> None:
        try:
            answer: Answer | None = None
            try:
                async with asyncio.timeout_at(self._deadline):
                    answer = await self._answer(line)
            except TimeoutError:
                self.expired = True
            if answer is not None and answer.status >= 500 and self._gate.gone():
                raise EngineError("the engine is gone")
            response, error = (None, _EXPIRED) if answer is None else (_response(answer), _error(answer))
            trouble = await self._try(line, response, error)
        finally:
            self._gate.leave()
        if trouble is not None:
            await self._write_later(line, response, error, trouble)

    async def _answer(self, line: BatchLine) -> Answer:
        """Asks until the server takes it: a line of a batch has time."""
        wait_s, longest_s = _RETRY_S
        for attempt in itertools.count():
            answer = await self._ask(line.url, line.body, f"{self._name}-{line.number}-{attempt}")
            if answer.status not in (429, 503) or self._gate.gone():
                return answer
            await asyncio.sleep(min(longest_s, answer.retry_after_s or wait_s))
            wait_s = min(longest_s, 2 * wait_s)
        raise AssertionError

    async def _write(self, line: BatchLine, response: dict[str, object] | None, error: LineError | None) -> None:
        trouble = await self._try(line, response, error)
        if trouble is not None:
            await self._write_later(line, response, error, trouble)

    async def _try(
        self, line: BatchLine, response: dict[str, object] | None, error: LineError | None
    ) -> OSError | RefusedError | None:
        """Write one answer. Returns what kept it from being written, if that may pass."""
        if self.num_unwritten:
            self.num_unwritten += 1  # late, and no room: there was none a moment ago
            return None
        try:
            await through(self._results.add, line, response, error)
        except (OSError, RefusedError) as trouble:
            if self._on_stuck is None:
                raise
            return trouble
        self._on_done(line)
        return None

    async def _write_later(
        self,
        line: BatchLine,
        response: dict[str, object] | None,
        error: LineError | None,
        trouble: OSError | RefusedError,
    ) -> None:
        """Try again until it is written, or the time is over. Nothing new is begun meanwhile."""
        assert self._on_stuck is not None
        wait_s, longest_s = _RETRY_S
        self._num_stuck += 1
        self._free.clear()
        try:
            again: OSError | RefusedError | None = trouble
            while again is not None:
                if isinstance(again, RefusedError) and again.code == "file_too_large":
                    response, error = None, LineError("answer_too_large", f"line {line.number}: the answer: {again}")
                else:
                    self._on_stuck(again)
                    if self._is_late():
                        self.num_unwritten += 1
                        return
                    await asyncio.sleep(wait_s)
                    wait_s = min(longest_s, 2 * wait_s)
                again = await self._try(line, response, error)
        finally:
            self._num_stuck -= 1
            if not self._num_stuck:
                self._free.set()
                self._on_stuck(None)


_EXPIRED = LineError("batch_expired", "the completion window was over before this line was answered")


def _some(lines: Iterator[BatchLine]) -> list[BatchLine]:
    return list(itertools.islice(lines, _GROUP))


def _response(answer: Answer) -> dict[str, object]:
    try:
        body: object = msgspec.Raw(msgspec.json.encode(msgspec.json.decode(answer.body)))
    except (msgspec.MsgspecError, RecursionError):
        body = answer.body.decode("utf-8", "replace")
    return {"status_code": answer.status, "request_id": answer.headers.get("x-request-id", ""), "body": body}


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: str | None = None
    type: str | None = None


class _Told(msgspec.Struct):
    error: _ErrorBody


def _error(answer: Answer) -> LineError | None:
    if answer.status < 400:
        return None
    try:
        told = msgspec.json.decode(answer.body, type=_Told).error
    except (msgspec.MsgspecError, RecursionError):
        told = _ErrorBody()
    return LineError(told.code or told.type or f"http_{answer.status}", told.message or f"status {answer.status}")
