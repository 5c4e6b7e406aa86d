"""Work on long texts away from the event loop, in steps, so that no text keeps everybody else waiting.

Each tenant has a line of its own. Threads take one step of one line at a time, from the line that has had least for
its weight; within a line, jobs take turns. A job ends between two steps when nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.base.errors import EngineError, InputError
from penstock.base.memory import give_back
from penstock.text.encoding import Steps, run

T = TypeVar("T")

INLINE_CHARS = 4096
"""Shorter texts are encoded at once: a few milliseconds at most, less than a thread is worth."""
SHORT_CHARS = 1 << 17
"""Steps of more characters are long: one thread is always kept free of them."""
MAX_QUEUED_CHARS = 64 << 20


class Dropped(Exception):
    """The work was given up: whoever asked has gone, or the server ends."""


class Crowded(EngineError):
    """Too much waits already."""


@dataclass(eq=False)
class _Line:
    """What one tenant has asked for. `used`: size of all steps so far, by weight."""

    name: str
    weight: float
    used: float
    size: int = 0
    jobs: deque[_Job] = field(default_factory=deque)


@dataclass(eq=False)
class _Job:
    line: _Line
    steps: Steps[Any]
    size: int
    next_size: int
    answer: asyncio.Future[Any]
    asked_s: float
    begun: bool = False
    dropped: bool = False


class Offload:
    """Threads for steps; whoever makes one closes it. Units: sizes in characters, or what else its jobs count.

    The event loop stays free only while the work lets go of the interpreter's lock. At most `max(1, num_threads - 1)`
    long steps are done at a time. Of `max_queued` one line has at most half, and while others have something there, a
    line that wants more than its share gets no more.

    Attributes:
        num_refused: jobs that were not taken because too much was queued.
    """

    def __init__(
        self, num_threads: int = 2, *, inline: int = INLINE_CHARS, short: int = SHORT_CHARS,
        max_queued: int = MAX_QUEUED_CHARS, unit: str = "characters", done: str = "encoded",
        on_begun: Callable[[float], None] = lambda waited_s: None,
    ) -> None:  # fmt: skip
        """`on_begun` is called in the event loop with the seconds that a job has waited for its first step."""
        self._num_threads, self._inline, self._short, self._max_queued = num_threads, inline, short, max_queued
        self._unit, self._done, self._on_begun = unit, done, on_begun
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}
        self._running: set[_Job] = set()
        self._num_long = 0
        self._size = 0
        self._used = 0.0
        self._past: dict[str, float] = {}
        """What lines that have ended had used, while that is more than others have."""
        self._closed = False
        self.num_refused = 0

    @property
    def queued(self) -> int:
        """Size of all jobs that somebody waits for."""
        return self._size

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or are worked on."""
        with self._changed:
            return len(self._running) + sum(len(line.jobs) for line in self._lines.values())

    async def run(self, size: int, steps: Steps[T], *, line: str = "", weight: float = 1.0) -> T:
        """All of `steps`, in threads if `size` is not small. Each step's size is yielded before it is done.

        Cancelling ends it before its next step. Raises: what the steps raise, InputError for a size that could never
        be taken, Crowded if too much is queued, Dropped if this is closed.
        """
        if size <= self._inline:
            return run(steps)
        try:
            next_size = next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result
        answer = asyncio.get_running_loop().create_future()
        with self._changed:
            job = self._take(size, steps, next_size, answer, line, weight)
        try:
            return await answer  # type: ignore[no-any-return]
        finally:
            self._leave(job)

    def drop(self) -> None:
        """End what waits, and what runs before its next step; take nothing more. Its callers get Dropped."""
        with self._changed:
            self._closed = True
            for line in list(self._lines.values()):
                for job in list(line.jobs):
                    self._end(job, error=Dropped())
            for job in self._running:
                job.dropped = True
            self._changed.notify_all()

    def close(self) -> None:
        """As `drop`, and wait for the steps that are being done."""
        self.drop()
        for thread in self._threads:
            thread.join()

    # -- in the event loop's thread ------------------------------------------------------------------------------

    def _take(
        self, size: int, steps: Steps[Any], next_size: int, answer: asyncio.Future[Any], name: str, weight: float
    ) -> _Job:
        if self._closed:
            raise Dropped
        if size > self._max_queued // 2:
            raise InputError(f"a text of {size} {self._unit} is too long; {self._max_queued // 2} are possible")
        line = self._lines.get(name) or _Line(name, weight, max(self._used, self._past.get(name, 0.0)))
        share = weight / (weight + sum(other.weight for other in self._lines.values() if other is not line))
        own = line.size + size
        full = self._size + size > self._max_queued and own > self._max_queued * share
        if full or (line.size and own > self._max_queued // 2):
            self.num_refused += 1
            raise Crowded(f"{self._size} {self._unit} are waiting to be {self._done} already; try again later")
        line.weight = weight
        self._lines[name] = line
        self._past = {n: used for n, used in self._past.items() if used > self._used and n != name}
        job = _Job(line, steps, size, next_size, answer, time.monotonic())
        line.size += size
        self._size += size
        line.jobs.append(job)
        if len(self._threads) < self._num_threads:
            self._threads.append(threading.Thread(target=self._work, name=f"penstock-{self._done}", daemon=True))
            self._threads[-1].start()
        self._changed.notify_all()
        return job

    def _leave(self, job: _Job) -> None:
        """Nobody waits for it any more. Does nothing if it has ended."""
        with self._changed:
            job.dropped = True
            self._release(job)
            if job in job.line.jobs:
                self._end(job)

    # -- with the lock -------------------------------------------------------------------------------------------

    def _end(self, job: _Job, result: Any = None, error: BaseException | None = None) -> None:
        line = job.line
        if job in line.jobs:
            line.jobs.remove(job)
        self._release(job)
        job.steps.close()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            job.answer.get_loop().call_soon_threadsafe(_tell, job.answer, result, error)

    def _release(self, job: _Job) -> None:
        """Its place in the queue is free, though a step of it may still be under way."""
        line, size, job.size = job.line, job.size, 0
        line.size -= size
        self._size -= size
        if size and line.size == 0 and self._lines.get(line.name) is line:
            del self._lines[line.name]
            self._past[line.name] = line.used

    def _pick(self) -> _Job | None:
        """The next job to do a step of, which is taken out of its line."""
        room = self._num_long < max(1, self._num_threads - 1)
        for line in sorted(self._lines.values(), key=lambda line: line.used):
            for job in line.jobs:
                if room or job.next_size <= self._short:
                    line.jobs.remove(job)
                    self._used = max(self._used, line.used)
                    line.used += job.next_size / line.weight
                    return job
        return None

    # -- in the threads ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                while (job := self._pick()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                self._running.add(job)
                long = job.next_size > self._short
                self._num_long += long
            if not job.begun:
                job.begun = True
                self._say_begun(job)
            self._step(job, long)
            del job  # and with it, its result

    def _step(self, job: _Job, long: bool) -> None:
        result: Any = None
        error: BaseException | None = None
        goes_on = False
        if job.dropped:
            error = Dropped()
        else:
            try:
                job.next_size = next(job.steps)
                goes_on = True
            except StopIteration as ended:
                result = ended.value
            except BaseException as raised:
                error = raised
        if long:
            give_back()  # most of a large encoding is free again
        with self._changed:
            self._running.discard(job)
            self._num_long -= long
            if goes_on and not job.dropped:
                job.line.jobs.append(job)
            else:
                self._end(job, result, Dropped() if goes_on else error)
            self._changed.notify_all()

    def _say_begun(self, job: _Job) -> None:
        with contextlib.suppress(RuntimeError):
            job.answer.get_loop().call_soon_threadsafe(self._on_begun, time.monotonic() - job.asked_s)


def _tell(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():  # nobody waits
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
