"""The process of a rank, from its first message to its end. `launch.rank_process` is its main."""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec

from penstock.base.errors import EngineError, InputError
from penstock.base.memory import trim
from penstock.core.batch import StepOutput
from penstock.core.messages import Failed, Loading
from penstock.engine import child, wire
from penstock.engine.blackbox import BlackBox
from penstock.engine.child import EXIT_BROKEN
from penstock.engine.prepare import NUM_THREADS
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
from penstock.executor.rank import AheadRank, Rank, RankFactory, switched

EXIT_NOT_BUILT = 72
_SIGN_S = 0.25
_LOOK_S = 50e-6
"""So often a device is asked whether it is ready, while the next step may come as well."""


def main(argv: list[str], build: RankFactory) -> int:
    """`argv`: descriptors of two sockets and a box (-1: none); whether to end with the thread that started us."""
    child.begin(with_thread=argv[3] == "1")
    sock, aside = (socket.socket(fileno=int(fd)) for fd in argv[:2])
    for inherited in (sock, aside):
        inherited.set_inheritable(False)
    box = BlackBox.attach(int(argv[2])) if argv[2] != "-1" else None
    grammars = Grammars(aside)
    grammars.start()

    def say(message: Any) -> None:
        try:
            sock.sendall(wire.frame(message))
        except OSError:
            os._exit(0)  # nobody is there

    try:
        with signs_of_life(box):
            spec = _greeting(sock).spec
            log = child.open_log(spec.config.get("log_file"))
            faulthandler.register(signal.SIGUSR1, log)
            rank = build(spec, lambda done, total: say(Loading(done, total)))
        if box is not None:
            rank.watch(box.progress_address)
    except Exception as error:
        say(wire.failed_of(error, "the rank could not be built"))
        return EXIT_NOT_BUILT
    grammars.serve(rank)
    trim()
    gc.freeze()  # what lives now lives as long as the process: no collection needs to look at it again
    say(Built(rank.packed_file))
    try:
        run(sock, rank, grammars.serve, box)
    except BaseException as error:  # a panic of a library in Rust is no Exception
        traceback.print_exc(file=log)
        say(Failed("EngineError", f"a step of the rank failed ({type(error).__name__}: {error})"))
        return EXIT_BROKEN
    return 0


def run(sock: socket.socket, rank: Rank, serve: Callable[[Rank], None], box: BlackBox | None) -> None:
    """Steps until nobody asks for more. `serve` hears of another rank. Raises what breaks the rank."""
    decode = msgspec.msgpack.Decoder(ToRank).decode
    ahead = rank if isinstance(rank, AheadRank) else None
    launched: deque[Any] = deque()
    while True:
        result: StepOutput | None = None
        if ahead is not None and launched and (len(launched) > 1 or not _comes_first(sock, ahead, launched[0])):
            result = ahead.finish(launched.popleft())
        elif (frame := wire.read_frame(sock)) is None:
            return
        elif isinstance(message := decode(frame), RunStep):
            if message.spoil:
                rank.spoil(message.output.step)
            if ahead is None:
                result = rank.execute(message.output)
            else:
                launched.append(ahead.launch(message.output))
        elif isinstance(message, Back):
            rank.back(message.num_slabs)
        elif isinstance(message, Switch):
            rank, seconds = switched(rank, box)
            serve(rank)
            ahead = rank if isinstance(rank, AheadRank) else None
            if not _answer(sock, Switched(seconds)):
                return
        if result is not None and not _answer(sock, Result(result)):
            return


def _answer(sock: socket.socket, message: Result | Switched) -> bool:
    """False: nobody is there."""
    try:
        sock.sendall(wire.frame(message))
    except OSError:
        return False
    return True


def _comes_first(sock: socket.socket, rank: AheadRank, launched: Any) -> bool:
    """Whether another step comes before this one is ready: then the device can have it at once."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not rank.ready(launched):
        if poll.poll(0):
            return True
        time.sleep(_LOOK_S)
    return False


def _greeting(sock: socket.socket) -> Build:
    """Raises EngineError if it is of another build."""
    frame = wire.read_frame(sock)
    if frame is None:
        os._exit(0)
    said = msgspec.msgpack.decode(frame)  # untyped: the structs of another build may have other fields
    if said[:2] != ["Build", wire.identity(ToRank, FromRank)]:
        raise EngineError(
            "the rank's process is another build of Penstock than the engine: it was probably updated while the engine "
            "started; start it again"
        )
    return msgspec.msgpack.decode(frame, type=Build)


class Grammars(threading.Thread):
    """Compiles grammars while steps run. End of file, at any time, ends the process at once."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(name="penstock-aside", daemon=True)
        self._sock = sock
        self._lock = threading.Lock()
        self._rank: Rank | None = None
        self._pool = ThreadPoolExecutor(NUM_THREADS, "penstock-prepare")

    def serve(self, rank: Rank) -> None:
        self._rank = rank

    def run(self) -> None:
        decode = msgspec.msgpack.Decoder(Aside).decode
        while (frame := wire.read_frame(self._sock)) is not None:
            self._pool.submit(self._prepare, decode(frame))
        os._exit(0)

    def _prepare(self, job: Aside) -> None:
        assert self._rank is not None, "nobody asks before it is built"
        reply = self._read(self._rank, job) if isinstance(job, ReadWeights) else self._compile(self._rank, job)
        with self._lock:
            self._sock.sendall(wire.frame(reply))

    def _read(self, rank: Rank, job: ReadWeights) -> Prepared:
        try:
            return Prepared(job.number, weights=rank.ready_weights(job.path))
        except Exception as error:
            return Prepared(job.number, failed=wire.failed_of(error, "the weights cannot be read"))

    def _compile(self, rank: Rank, job: Prepare) -> Prepared:
        reply = Prepared(job.number)
        try:
            rank.prepare(job.grammar, job.param)
        except InputError as error:
            reply = Prepared(job.number, str(error), error.param, error.code)
        except BaseException as error:
            traceback.print_exc()
            why = f"the grammar could not be compiled ({type(error).__name__}: {error})"
            reply = Prepared(job.number, why, broken=True)
        return reply


@contextmanager
def signs_of_life(box: BlackBox | None) -> Iterator[None]:
    """While a rank is built its processor time counts as movement: reading and packing weights show in no other way."""
    if box is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        last_s = 0.0
        while not ended.wait(_SIGN_S):
            now_s = time.process_time()
            if now_s - last_s > _SIGN_S / 100:
                last_s = now_s
                box.progress()

    thread = threading.Thread(target=watch, name="penstock-signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
