"""The main of an engine process: `python -m penstock.launch.engine_process SOCKET BOX`, two inherited descriptors.

Started by `engine.process_link`, never by people. It lives exactly as long as the other end of its socket.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import msgspec

from penstock.base.errors import ModelError, RankGoneError
from penstock.base.memory import trim
from penstock.base.spans import Spans, process_began_s, told
from penstock.config import from_kwargs
from penstock.core.messages import EngineInfo, Failed, Hello, Loading, Ready, Send, Shutdown
from penstock.core.protocols import Executor
from penstock.core.request import Control
from penstock.core.spare import SpareWork
from penstock.core.weight_swap import WeightsOrder
from penstock.engine import child, wire
from penstock.engine.blackbox import BlackBox
from penstock.engine.child import EXIT_BROKEN
from penstock.engine.core import EngineCore
from penstock.engine.faults import Faults
from penstock.engine.loop import EngineLoop
from penstock.launch.build import Engine, info_of, start
from penstock.runner.block_files import BlockFiles

EXIT_OTHER_BUILD, EXIT_NOT_STARTED = 71, 72
_STUCK = 5
"""A step that takes this many times `stall_s` is stuck; being stopped shows much sooner."""
_NODE_BYTES = 600
"""About what a node of the prefix tree takes in Python, and per block its slab ids and tokens."""


def main(argv: list[str]) -> int:
    child.begin()  # Ctrl-C and service managers mean the server: it drains through this process
    sock = socket.socket(fileno=int(argv[0]))
    sock.set_inheritable(False)
    box = BlackBox.attach(int(argv[1]))
    spans = Spans(process_began_s())
    spans.end("process and imports")
    hello = greet(sock)
    if hello is None:
        return EXIT_OTHER_BUILD
    spans.end("greeting")
    log = child.open_log(hello.config.get("log_file"))
    speaker = Speaker(sock)
    inbox = Inbox(sock)
    inbox.start()
    faults = Faults([])
    try:
        faults = Faults.of(hello.faults, hello.epoch)
        faults.move = box.progress
        BlockFiles.trouble = staticmethod(faults.at_store)  # type: ignore[method-assign]
        faults.at("load")
        loaded = load(hello, speaker, box, spans)
        if hello.weights is not None:
            take_up(loaded.core, hello.weights)
    except Exception as error:
        speaker.say(wire.failed_of(error, "the engine could not be started"))
        return EXIT_NOT_STARTED
    core = loaded.core
    faults.spoil = core.executor.spoil
    loop = EngineLoop(core, speaker.say, box, epoch=hello.epoch, memory=loaded.memory, faults=faults)
    loop.spare = loaded.spare
    loop.block_news = None if loaded.engine.followed is None else loaded.engine.followed.news
    inbox.deliver(loop)
    signal.signal(signal.SIGTERM, lambda *_: setattr(loop, "notice", True))
    trim()
    gc.freeze()  # what lives now lives as long as the process: no collection needs to look at it again
    box.beat(False)
    Watchdog(box, hello.stall_s, partial(write_stacks, core.executor, log), log).start()
    try:
        if hello.epoch:
            loop.try_out()
        spans.end("ready")
        logging.getLogger("penstock.engine").info("started in %.2f s: %s", spans.total_s, told(spans.parts))
        speaker.say(Ready(hello.epoch, msgspec.structs.replace(loaded.info, start_parts=spans.parts)))
        loop.run()
    except BaseException as error:  # a panic of a library in Rust is no Exception
        traceback.print_exc(file=log)
        core.executor.close()
        if isinstance(error, RankGoneError) and error.killed:  # as if it had been this process: nobody's fault, perhaps
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return EXIT_BROKEN
    return 0


def greet(sock: socket.socket) -> Hello | None:
    """The server's greeting; None if it is of another build, which has been told so. Ends if nobody is there."""
    frame = wire.read_frame(sock)
    if frame is None:
        os._exit(0)
    said = msgspec.msgpack.decode(frame)  # untyped: the structs of another build may have other fields
    if isinstance(said, list) and said[:2] == ["Hello", wire.schema()]:
        hello = wire.to_engine.decode(frame)
        assert isinstance(hello, Hello)
        return hello
    other = str(said[1]).partition("-")[0] if isinstance(said, list) and len(said) > 1 else "an unknown one"
    version = wire.schema().partition("-")[0]
    Speaker(sock).say(
        Failed(
            "EngineError",
            f"the engine process is another build of Penstock ({version}) than the server ({other}): it was probably "
            "updated while the server ran; restart the server",
        )
    )
    return None


def take_up(core: EngineCore, order: WeightsOrder) -> None:
    """The weights that the engine before had. Raises ModelError if they are no longer there."""
    facts = core.executor.ready_weights(order.path)
    if order.facts is not None and facts.content != order.facts.content:
        raise ModelError(f"the weights {order.version} at {order.path} have changed since they were taken up")
    core.add(Control(kind="weights", weights=msgspec.structs.replace(order, facts=facts)))
    while core.has_work:
        core.step()


class Speaker:
    """Sends messages to the front end. If that is gone, so is this process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def say(self, message: Any) -> None:
        try:
            self._sock.sendall(wire.frame(message))
        except OSError:
            os._exit(0)


class Inbox(threading.Thread):
    """Reads what the front end sends, while steps run. End of file ends the process at once."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(name="penstock-inbox", daemon=True)
        self._sock = sock
        self._loop: EngineLoop | None = None
        self._has_loop = threading.Event()

    def deliver(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._has_loop.set()

    def run(self) -> None:
        while (frame := wire.read_frame(self._sock)) is not None:
            try:
                message = wire.to_engine.decode(frame)
            except msgspec.MsgspecError:
                traceback.print_exc()
                os._exit(EXIT_BROKEN)
            if isinstance(message, Shutdown):
                break
            if isinstance(message, Send):
                self._has_loop.wait()
                assert self._loop is not None
                self._loop.send(message.items)
        os._exit(0)


def write_stacks(executor: Executor, log: TextIO) -> None:
    """Of all threads of this process, and of those that its ranks live in."""
    faulthandler.dump_traceback(log)
    for pid in executor.processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)


class Watchdog(threading.Thread):
    """Writes the stacks of all threads to `log`, once per stall: the process was stopped, or a step is stuck."""

    def __init__(self, box: BlackBox, stall_s: float, dump: Callable[[], None], log: TextIO) -> None:
        super().__init__(name="penstock-watchdog", daemon=True)
        self._box = box
        self._stall_s = stall_s
        self._dump = dump
        self._log = log

    def run(self) -> None:
        last = time.monotonic()
        told = False
        while True:
            time.sleep(min(0.25, self._stall_s / 4))
            now = time.monotonic()
            gap_s, age_s, last = now - last, self._box.age_s(), now
            stopped, stuck = gap_s > self._stall_s, age_s > _STUCK * self._stall_s
            if (stopped or stuck) and not told:
                what = "was stopped" if stopped else "has been in one step"
                said = f"penstock: the engine process {what} for {max(gap_s, age_s):.1f} s; its stacks"
                if self._log is not sys.stderr:
                    sys.stderr.write(f"{said} are in {self._log.name}\n")
                self._log.write(f"{time.strftime('%F %T')} {said}:\n")
                self._log.flush()
                self._dump()
                sys.stderr.flush()
            told = stopped or stuck


@dataclass
class Loaded:
    core: EngineCore
    info: EngineInfo
    engine: Engine
    spare: SpareWork | None

    def memory(self) -> dict[str, int]:
        """Bytes by subsystem. The prefix tree's are an estimate: nobody counts Python's objects."""
        plan, stats = self.engine.plan, self.core.kv.stats()
        cached = sum(group.evictable for group in stats.groups)
        tree = cached * (_NODE_BYTES + 4 * plan.block_size)
        rss = sum(_rss(pid) for pid in (os.getpid(), *self.core.executor.processes))
        return {"weights": plan.weight_bytes, "kv_limit": plan.kv_bytes, "prefix_tree": tree, "rss": rss}


def load(hello: Hello, speaker: Speaker, box: BlackBox, spans: Spans) -> Loaded:
    """Raises what keeps the engine from starting."""
    began = time.monotonic()
    said_s = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal said_s
        now = time.monotonic()
        if now - said_s >= 0.1 or done >= total:
            said_s = now
            speaker.say(Loading(done, total))

    config = from_kwargs(**hello.config)
    spare = None
    if config.lora.finetune_root is not None:
        from penstock.launch.finetune import finetuner_of  # nobody else needs it

        spare = finetuner_of(config)
    engine = start(
        config, progress=progress, serving=True, box=box, block_secret=hello.block_secret, spans=spans
    )  # fmt: skip
    return Loaded(engine.core, info_of(engine, config, time.monotonic() - began, os.getpid()), engine, spare)


def _rss(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
