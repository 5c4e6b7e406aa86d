"""Ranks in processes of their own that run functions, for studies and tests: each has an end of a `socket_mesh`."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from penstock.base.errors import EngineError, RankGoneError
from penstock.parallel.messages import Messages, socket_mesh

_PATIENCE_S = 120.0


def _serve(rank: int, ends: list[Any], asked: Connection) -> None:
    comm = Messages(rank, ends)
    while True:
        try:
            found = asked.recv()
        except EOFError:
            break
        function, arguments = found
        try:
            asked.send((True, function(comm, *arguments)))
        except Exception:
            asked.send((False, traceback.format_exc()))
            break  # the others may wait for this rank: they see that it has gone
    comm.close()


class RankTeam:
    """`size` processes. What is called, and what it is given and gives, is this program's own (it is pickled)."""

    def __init__(self, size: int) -> None:
        context = get_context("spawn")
        self.size = size
        self.processes: list[BaseProcess] = []
        self._asked: list[Connection] = []
        mesh = socket_mesh(size)
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, mesh[rank], theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._asked.append(ours)
        for ends in mesh:
            for end in ends:
                if end is not None:
                    end.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(comm, *arguments)` on every rank: what each gives.

        Raises: EngineError with the trace of the first rank that failed, RankGoneError if one has ended. Then the
        team is of no further use.
        """
        for asked in self._asked:
            asked.send((function, arguments))
        found: dict[int, Any] = {}
        failed = ""
        while len(found) < self.size:
            left = [asked for rank, asked in enumerate(self._asked) if rank not in found]
            ready = wait(left, _PATIENCE_S)
            if not ready:
                self.close()
                raise EngineError(f"{len(left)} of {self.size} ranks have not answered for {_PATIENCE_S:.0f} s")
            for rank in [n for n, asked in enumerate(self._asked) if asked in ready]:
                try:
                    fine, found[rank] = self._asked[rank].recv()
                except (EOFError, ConnectionResetError):
                    self.close()
                    raise RankGoneError(f"the process of rank {rank} has ended") from None
                failed = failed or ("" if fine else f"rank {rank}: {found[rank]}")
        if failed:
            raise EngineError(failed)
        return [found[rank] for rank in range(self.size)]

    def close(self) -> None:
        for asked in self._asked:
            asked.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> RankTeam:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
