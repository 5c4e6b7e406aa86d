"""The rank lives in a process of its own: the engine schedules while it runs, and it can be ended from outside.

Two inherited socket pairs: steps and results in order, and grammars to compile beside them. The process ends with
either; nothing that it has has a name, so nothing is left behind. The only memory that both share is the word where the
rank counts its operations (`engine.blackbox`), so that a long step can be told from a stuck one.
"""

from __future__ import annotations

import itertools
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from penstock.base.errors import ConfigError, EngineError, InputError, PenstockError, RankGoneError
from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.messages import Failed, Loading
from penstock.core.protocols import Executor
from penstock.core.weight_swap import WeightFacts
from penstock.engine import wire
from penstock.engine.blackbox import BlackBox
from penstock.executor.messages import (
    Aside,
    Back,
    Build,
    Built,
    FromRank,
    Prepare,
    Prepared,
    ReadWeights,
    Result,
    RunStep,
    Switch,
    Switched,
    ToRank,
)
from penstock.executor.rank import Progress, RankFactory, RankSpec

COMMAND = (sys.executable, "-P", "-m", "penstock.launch.rank_process")
_PIECE = 1 << 16
_END_S = 2.0
"""A process that was told to end has so long until it is killed."""


class RankProcess(Protocol):
    """Of a `subprocess.Popen` what is needed of a rank's process. `pid` 0: it is on another host."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class StartedRank(NamedTuple):
    """A rank's process, and the other ends of its two sockets."""

    process: RankProcess
    steps: socket.socket
    aside: socket.socket


class MultiprocExecutor(Executor):
    """`command` starts the rank's process; two sockets, the box (or -1) and whether it ends with our thread follow.

    Raises: ConfigError for weights that are in the memory of this process; what keeps the rank from being built, with
    its own class.
    """

    def __init__(
        self, spec: RankSpec, build: RankFactory | None = None, *, depth: int = 1, loading: Progress | None = None,
        box: BlackBox | None = None, command: Sequence[str] = COMMAND, inherits: Sequence[int] = (),
        spawned: StartedRank | None = None,
    ) -> None:  # fmt: skip
        """`inherits`: further descriptors that the rank's process has, under the same numbers. `spawned`: a process
        that has begun already."""
        assert depth >= 1, f"depth {depth}"
        if spec.model is None:
            raise ConfigError(
                "executor: multiproc reads the weights in the rank's own process, and these are arrays in the memory "
                "of this one; use executor inproc, or a model on disk",
                field="executor",
            )
        self.depth = depth
        self._num_inflight = 0
        self._spoils = False
        self._splitter = wire.Splitter()
        self._frames: deque[bytes] = deque()
        self._decode: Callable[[bytes], FromRank] = msgspec.msgpack.Decoder(FromRank).decode
        self._process, self._sock, aside = spawned or _spawn(command, box, inherits)
        self._grammars = _Grammars(aside)
        self._end = weakref.finalize(self, _end, self._process, self._sock, aside)
        try:
            self._build(spec, loading)
        except BaseException:
            self.close()
            raise

    def _build(self, spec: RankSpec, loading: Progress | None) -> None:
        self._send(Build(wire.identity(ToRank, FromRank), spec))
        while not isinstance(message := self._receive(), Built):
            if isinstance(message, Failed):
                raise wire.error_of(message)
            if isinstance(message, Loading) and loading is not None:
                loading(message.done, message.total)
        self.packed_file = message.packed_file

    # -- steps ---------------------------------------------------------------------------------------------------

    def submit(self, output: SchedulerOutput) -> None:
        """Send a step. More than `depth` in flight, or a step after `close`, is our own bug (AssertionError)."""
        assert self._end.alive, "submit after close"
        assert self._num_inflight < self.depth, f"more than {self.depth} steps in flight"
        self._send(RunStep(output, self._spoils))
        self._spoils = False
        self._num_inflight += 1

    def collect(self) -> StepOutput:
        """Wait for the oldest result. Nothing in flight is our own bug (AssertionError)."""
        assert self._num_inflight, "collect without a step in flight"
        message = self._receive()
        self._num_inflight -= 1
        if isinstance(message, Failed):
            raise wire.error_of(message)
        assert isinstance(message, Result), f"a rank answers a step with {message}"
        return message.output

    def fileno(self) -> int:
        """Of the socket that answers come through."""
        return self._sock.fileno()

    @property
    def has_answer(self) -> bool:
        return bool(self._frames)

    def hear(self) -> bool:
        """Read what has come, which may mean to wait for it; whether an answer is there to be collected. Raises what
        broke the rank."""
        if not self._frames:
            self._read()
        return bool(self._frames)

    def back(self, num_slabs: Sequence[int]) -> None:
        self._send(Back(list(num_slabs)))

    def ready_weights(self, path: str) -> WeightFacts:
        reply = self._grammars.ask(partial(ReadWeights, path=path))
        if reply is None:
            raise RankGoneError("the rank's process ended while it read weights")
        if reply.failed is not None:
            raise wire.error_of(reply.failed)
        assert reply.weights is not None, "they were read, or were not"
        return reply.weights

    def switch_weights(self) -> float:
        assert not self._num_inflight, "steps are in flight"
        self._send(Switch())
        message = self._receive()
        if isinstance(message, Failed):
            raise wire.error_of(message)
        assert isinstance(message, Switched), f"a rank answers a switch with {message}"
        return message.seconds

    def spoil(self) -> None:
        self._spoils = True

    def check(self) -> None:
        if self._end.alive and self._process.poll() is not None:
            raise self._gone()

    def close(self) -> None:
        self._num_inflight = 0
        self._end()

    @property
    def processes(self) -> Sequence[int]:
        return (self._process.pid,) if self._process.pid else ()

    # -- grammars ------------------------------------------------------------------------------------------------

    def holds(self, grammar: str) -> bool:
        """Only the rank knows, and it says so at once when it is asked to prepare what it has."""
        return False

    def prepare(self, grammar: str, param: str = "structured_outputs") -> None:
        reply = self._grammars.ask(partial(Prepare, grammar=grammar, param=param))
        if reply is None:
            raise RankGoneError("the rank's process ended while it compiled a grammar")
        if reply.broken:
            raise EngineError(reply.problem)
        if reply.problem:
            raise InputError(reply.problem, param=reply.param, code=reply.code)

    # -- the socket ----------------------------------------------------------------------------------------------

    def _send(self, message: ToRank) -> None:
        data = memoryview(wire.frame(message))
        while data:
            try:
                data = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                # The rank may be waiting as well, for a result to be taken.
                poll = select.poll()
                poll.register(self._sock, select.POLLIN | select.POLLOUT)
                if poll.poll()[0][1] & ~select.POLLOUT:
                    self._read()
            except OSError:
                raise self._gone() from None

    def _receive(self) -> FromRank:
        while not self._frames:
            self._read()
        return self._decode(self._frames.popleft())

    def _read(self) -> None:
        try:
            data = self._sock.recv(_PIECE)
        except OSError:
            data = b""
        if not data:
            raise self._gone()
        self._frames.extend(self._splitter.feed(data))

    def _gone(self) -> PenstockError:
        """The rank has closed its socket: it has ended, or is about to. What it said last is why, if it said it."""
        with suppress(OSError):
            while data := self._sock.recv(_PIECE):
                self._frames.extend(self._splitter.feed(data))
            self._sock.shutdown(socket.SHUT_RDWR)
        for frame in self._frames:
            message = self._decode(frame)
            if isinstance(message, Failed):
                return wire.error_of(message)
        return _died(self._process)


class _Grammars:
    """Questions beside the steps, from any thread; a thread of its own hears the answers."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[Prepared | None]] = {}
        self._listener: threading.Thread | None = None
        self._gone = False

    def ask(self, question: Callable[[int], Aside]) -> Prepared | None:
        """None: the rank is gone."""
        answer: queue.SimpleQueue[Prepared | None] = queue.SimpleQueue()
        with self._lock:
            if self._gone:
                return None
            number = next(self._numbers)
            self._waiting[number] = answer
            if self._listener is None:
                self._listener = threading.Thread(target=self._listen, name="penstock-grammars", daemon=True)
                self._listener.start()
            with suppress(OSError):  # the listener hears of it, too
                self._sock.sendall(wire.frame(question(number)))
        return answer.get()

    def _listen(self) -> None:
        decode = msgspec.msgpack.Decoder(Prepared).decode
        with suppress(OSError):
            while (frame := wire.read_frame(self._sock)) is not None:
                reply = decode(frame)
                self._waiting.pop(reply.number).put(reply)
        with self._lock:
            self._gone = True
            for answer in self._waiting.values():
                answer.put(None)


def _spawn(command: Sequence[str], box: BlackBox | None, inherits: Sequence[int] = ()) -> StartedRank:
    """The child's ends of the sockets, and the box, are inherited by it alone. Raises EngineError."""
    (ours, theirs), (aside, their_aside) = socket.socketpair(), socket.socketpair()
    fds = [theirs.fileno(), their_aside.fileno()]
    if box is not None and box.fd is not None:
        fds.append(box.fd)
    # A process dies with the thread that started it, if it asks for that; only the main one lives as long as we do.
    with_thread = threading.current_thread() is threading.main_thread()
    words = [str(fd) for fd in (*fds, -1)[:3]] + [str(int(with_thread))]
    try:
        process = subprocess.Popen([*command, *words], stdin=subprocess.DEVNULL, pass_fds=[*fds, *inherits])
    except OSError as error:
        ours.close()
        aside.close()
        raise EngineError(f"the rank's process cannot be started ({error})") from error
    finally:
        theirs.close()
        their_aside.close()
    return StartedRank(process, ours, aside)


def _end(process: RankProcess, *socks: socket.socket) -> None:
    """Also called when the executor is forgotten, and when this process ends."""
    for sock in socks:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # wakes whoever waits for it
        sock.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _died(process: RankProcess) -> RankGoneError:
    """Waits for the end of a process that has closed its sockets."""
    try:
        status = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return RankGoneError("the rank's process was ended: it had closed its socket and went on")
    if status >= 0:
        return RankGoneError(f"the rank's process ended with exit code {status}; see its last words above")
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return RankGoneError(f"the rank's process was ended by {name}", killed=status == -signal.SIGKILL)
