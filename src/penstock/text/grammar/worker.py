"""A process that tries grammars, so that one that takes all time, memory or stack takes them from nobody else.

Frames on the socket that is file descriptor 0: four bytes of length, little-endian, then msgpack. The first one is a
`Start`; the answer to it and to every `Job` is a `Verdict`. Source of the idea: every grammar library has had inputs
that hang it or bring it down.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import threading
from pathlib import Path

import msgspec

from penstock.base.errors import InputError
from penstock.core.sampling import StructuredOutputs
from penstock.text.grammar.compile import Compiler, Vocabulary
from penstock.text.grammar.lead import led
from penstock.text.grammar.source import grammar_of, kind_of

STACK_BYTES = 1 << 20
"""A rank's threads have several times as much: what fits here fits there."""
MAX_FRAME_BYTES = 256 << 20
_PR_SET_PDEATHSIG = 1


class Start(msgspec.Struct, frozen=True, array_like=True):
    """`memory_bytes`: address space that the process may take beyond what it has when it starts."""

    vocabulary: Vocabulary
    memory_bytes: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """`param`: how the client calls it. `lead`: rules of what comes before it (`text.grammar.lead`)."""

    asked: StructuredOutputs
    param: str
    lead: str = ""


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """llguidance's form of the grammar, which compiles; or why it does not, and which field has to change."""

    text: str = ""
    problem: str = ""
    param: str | None = None


def main() -> None:
    """Answer until the other side is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sock = socket.socket(fileno=0)
    start = msgspec.msgpack.decode(_receive(sock), type=Start)
    compiler = Compiler(start.vocabulary)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + start.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decode = msgspec.msgpack.Decoder(Job).decode
    _send(sock, Verdict())
    threading.stack_size(STACK_BYTES)
    while True:
        job = decode(_receive(sock))
        answer = [Verdict(problem=f"{job.param} cannot be compiled: it is too complex", param=job.param)]
        thread = threading.Thread(target=_try, args=(compiler, job, answer))
        thread.start()
        thread.join()
        _send(sock, answer[0])


def _try(compiler: Compiler, job: Job, answer: list[Verdict]) -> None:
    try:
        text = grammar_of(job.asked, job.param)
        compiler.compile(text, f"{job.param}.{kind_of(job.asked, job.param)}")
        if job.lead:
            text = led(job.lead, text)
            compiler.compile(text, job.param)
        answer[0] = Verdict(text=text)
    except InputError as error:
        answer[0] = Verdict(problem=str(error), param=error.param)
    except (MemoryError, RecursionError):
        pass  # what `answer` says already


def _receive(sock: socket.socket) -> bytes:
    """Ends the process, without ado, when the other side is gone."""
    size = int.from_bytes(_exactly(sock, 4), "little")
    if size > MAX_FRAME_BYTES:
        os._exit(1)
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        n = sock.recv_into(view[got:])
        if n == 0:
            os._exit(0)
        got += n
    return bytes(data)


def _send(sock: socket.socket, verdict: Verdict) -> None:
    data = msgspec.msgpack.encode(verdict)
    sock.sendall(len(data).to_bytes(4, "little") + data)


if __name__ == "__main__":
    main()
