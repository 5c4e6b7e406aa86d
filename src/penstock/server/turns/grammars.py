"""Structured output: compiling grammars before requests are taken on.

A grammar is tried in a process of its own (`text.grammar.worker`) with limits of time, memory and stack. One that
breaks a limit is a client's error, and its worker is killed and replaced. Verdicts, bad ones too, are remembered.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.base.errors import InputError, RefusedError
from penstock.base.hashing import digest
from penstock.core.sampling import SamplingParams, StructuredOutputs
from penstock.text.grammar.compile import Vocabulary, vocabulary_of
from penstock.text.grammar.source import Compiled, portable
from penstock.text.grammar.worker import Job, Start, Verdict

if TYPE_CHECKING:
    from penstock.server.call import Call
    from penstock.server.context import Server

COMMAND = (sys.executable, "-P", "-m", "penstock.text.grammar.worker")
MEMORY_BYTES = 512 << 20
START_TIMEOUT_S = 60.0
MAX_WORKERS = 2
MAX_WAITING = 64
MAX_VERDICT_BYTES = 16 << 20
_DECODE = msgspec.msgpack.Decoder(Verdict).decode


async def install(server: Server) -> None:
    """Add this part to a server that is being built; its engine is ready."""
    service = server.service
    tokenizer, limits = service.tokenizer, service.limits
    if tokenizer is None or tokenizer.table is None:
        return  # the validator refuses
    vocabulary = partial(vocabulary_of, tokenizer, limits.vocab_size, limits.eos_token_ids)
    pool = GrammarPool(vocabulary, server.config.grammar_timeout)
    # Most servers never see a grammar, and a large vocabulary's table takes 100 MB, here and in the rank.
    if server.warm_grammars:
        pool.warm()
    server.parts["grammars"] = pool
    server.closers.append(pool.close)
    service.prepare.append(pool.prepare)


class _Worker:
    """One child and its socket. Belongs to one job at a time."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.process = process
        self._sock = sock
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    async def start(cls, vocabulary: Callable[[], Vocabulary], memory_bytes: int) -> _Worker:
        """Returns when it is ready. Raises RefusedError if it does not come up."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            process = subprocess.Popen(
                COMMAND, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment()
            )
        except OSError as error:
            ours.close()
            raise _not_now(f"the grammar compiler could not be started: {error}") from None
        finally:
            theirs.close()
        worker = cls(process, ours)
        try:
            tokens = await asyncio.to_thread(vocabulary)  # while the interpreter starts
            await asyncio.wait_for(worker.ask(Start(tokens, memory_bytes)), START_TIMEOUT_S)
        except BaseException as error:
            await worker.kill()
            if isinstance(error, OSError | EOFError | TimeoutError):
                raise _not_now("the grammar compiler did not start") from None
            raise
        return worker

    async def ask(self, question: Start | Job) -> Verdict:
        """Raises OSError or EOFError if the child is gone."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._sock)
        data = msgspec.msgpack.encode(question)
        self._writer.write(len(data).to_bytes(4, "little") + data)
        await self._writer.drain()
        size = int.from_bytes(await self._reader.readexactly(4), "little")
        return _DECODE(await self._reader.readexactly(size))

    async def kill(self) -> None:
        self.process.kill()
        if self._writer is not None:
            self._writer.close()
        else:
            self._sock.close()
        await asyncio.to_thread(self.process.wait)


class GrammarPool:
    """Verdicts on grammars. All methods belong to the event loop's thread.

    Attributes:
        num_hits, num_misses: answered from memory, or by a worker.
        num_timeouts, num_crashes: workers that were killed for taking too long, or went down.
        compile_s: seconds that workers have taken.
    """

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], timeout_s: float, *, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        """`vocabulary` is called in a thread, for every worker that starts."""
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._slots = asyncio.Semaphore(MAX_WORKERS)
        self._jobs: dict[bytes, asyncio.Task[Verdict]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._known_bytes = 0
        self._closed = False
        self.num_hits = self.num_misses = self.num_timeouts = self.num_crashes = 0
        self.compile_s = 0.0

    def counters(self) -> dict[str, float]:
        """For metrics."""
        return {
            "verdict_hits": self.num_hits, "verdict_misses": self.num_misses, "timeouts": self.num_timeouts,
            "crashes": self.num_crashes, "compile_seconds": self.compile_s,
        }  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Of the workers that are up."""
        return [worker.process.pid for worker in (*self._idle, *self._busy)]

    def warm(self) -> None:
        """Have a worker ready for the next grammar, in the background."""
        if not (self._idle or self._busy or self._closed):
            task = asyncio.get_running_loop().create_task(self._add_worker())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def prepare(self, call: Call) -> None:
        """Replace what a call asks for by what the rank needs. Raises InputError, RefusedError."""
        params = call.params
        asked = params.structured_outputs if isinstance(params, SamplingParams) else None
        if asked is not None and not isinstance(asked, Compiled):
            lead = call.lead
            text = await self.compile(asked, lead="" if lead is None else lead.rules)
            compiled = Compiled(text=text, thought=None if lead is None else lead.thought)
            call.params = msgspec.structs.replace(params, structured_outputs=compiled)

    async def compile(self, asked: StructuredOutputs, param: str = "structured_outputs", *, lead: str = "") -> str:
        """llguidance's form of a grammar that compiles, behind the rules `lead` if there are any.

        Raises InputError, RefusedError if too many wait.
        """
        asked = portable(asked, param)
        try:
            key = digest(param.encode(), lead.encode(), msgspec.msgpack.encode(asked))
        except (RecursionError, TypeError, ValueError) as error:
            raise InputError(f"{param} cannot be read: {str(error)[:100]}", param=param) from None
        known = self._known.get(key)
        if known is not None:
            self.num_hits += 1
            self._known.move_to_end(key)
        else:
            known = await asyncio.shield(self._job(key, Job(asked, param, lead)))
        if known.problem:
            raise InputError(known.problem, param=known.param)
        return known.text

    def _job(self, key: bytes, job: Job) -> asyncio.Task[Verdict]:
        """Equal questions wait for one answer; a client that leaves leaves it to the others."""
        task = self._jobs.get(key)
        if task is None:
            if len(self._jobs) >= MAX_WAITING:
                raise _not_now("too many grammars are being compiled")
            self.num_misses += 1
            task = self._jobs[key] = asyncio.get_running_loop().create_task(self._run(key, job))
            task.add_done_callback(lambda done: self._done(key, done))
        return task

    def _done(self, key: bytes, task: asyncio.Task[Verdict]) -> None:
        self._jobs.pop(key, None)
        if not task.cancelled():
            task.exception()  # nobody may be left to hear of it

    async def _run(self, key: bytes, job: Job) -> Verdict:
        async with self._slots:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._vocabulary, self._memory_bytes)
            self._busy.add(worker)
            loop = asyncio.get_running_loop()
            began, usable = loop.time(), False
            try:
                verdict = await asyncio.wait_for(worker.ask(job), self._timeout_s)
                usable = True
            except TimeoutError:
                self.num_timeouts += 1
                verdict = self._blame(job, f"takes more than {self._timeout_s:g} s to compile")
            except (OSError, EOFError):
                self.num_crashes += 1
                verdict = self._blame(job, "takes too much memory to compile")
            finally:
                self.compile_s += loop.time() - began
                self._busy.discard(worker)
                if usable and not self._closed and not self._idle:
                    self._idle.append(worker)
                else:
                    await worker.kill()
                    self.warm()
        self._remember(key, verdict)
        return verdict

    @staticmethod
    def _blame(job: Job, what: str) -> Verdict:
        return Verdict(problem=f"{job.param} {what}; make it simpler", param=job.param)

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        self._known[key] = verdict
        self._known_bytes += _verdict_bytes(verdict)
        while self._known_bytes > MAX_VERDICT_BYTES:
            _, gone = self._known.popitem(last=False)
            self._known_bytes -= _verdict_bytes(gone)

    async def _add_worker(self) -> None:
        try:
            worker = await _Worker.start(self._vocabulary, self._memory_bytes)
        except RefusedError:
            return  # the next grammar tries again, and says so
        if self._closed or self._idle:
            await worker.kill()
        else:
            self._idle.append(worker)

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._tasks, *self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._idle:
            await self._idle.pop().kill()


def _verdict_bytes(verdict: Verdict) -> int:
    return 512 + len(verdict.text) + len(verdict.problem)


def _environment() -> dict[str, str]:
    """What finding the interpreter's packages takes, and no more."""
    return {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "PYTHONHOME", "HOME", "LANG", "LC_ALL")}


def _not_now(why: str) -> RefusedError:
    return RefusedError(f"{why}; try again", status=503, code="overloaded", retry_after_s=1.0)
