"""Faults on purpose, for tests: `site:kind:nth`. Set when a server starts, never by a request.

Sites: `load` (an engine process loads the model), `intake` (it takes a request in), `prepare` (a thread beside the
steps compiles a request's grammar), `step` (it begins a step). Kinds: `kill` (SIGKILL to itself), `exception`, `hang`;
at `step` also `nan` (the logits of one row) and `slow` (it takes five seconds, and shows that it moves).
nth: it happens at the nth time, counted from 1, in the server's first engine process alone; for `load` the nth process.
With a plus (`step:kill:200+`) it happens every nth time in each.

Of the store of blocks (`kv_offload`), where the engine process has its rank in itself: `store-read` (a block's file is
about to be read: `error`, `flip`, `cut`, `gone`, `slow`, `kill`), `store-write` (to be written: `error`, `full`,
`slow`, `kill`), `store-rename` (a whole file is to get its name: `error`, `kill`), `store-lock` (`error`: another
process has it), `store-folder` (a block is to be written: `gone`, the folder with all that is in it).

At `prepare` and `step` also `poison`, `poison-kill`, `poison-exception` and, at `step`, `poison-hang`. For these nth is
a token id: a request whose prompt has this token ends the process with SIGSEGV, as a bug in native code would, with
SIGKILL, as the kernel does where memory is short, or with an exception, or it never goes on.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from penstock.base.errors import ConfigError
from penstock.core.request import Request

_ENDS = ("kill", "exception", "hang")
_POISONS = ("poison", "poison-kill", "poison-exception", "poison-hang")
SITES = {
    "load": _ENDS, "intake": _ENDS, "prepare": ("kill", *_POISONS[:3]), "step": (*_ENDS, *_POISONS, "nan", "slow"),
    "store-read": ("error", "flip", "cut", "gone", "slow", "kill"), "store-write": ("error", "full", "slow", "kill"),
    "store-rename": ("error", "kill"), "store-lock": ("error",), "store-folder": ("gone",),
}  # fmt: skip
SLOW_S = 5.0


@dataclass(frozen=True)
class Fault:
    site: str
    kind: str
    nth: int
    again: bool = False


def parse(text: str) -> Fault:
    """Raises ConfigError that names what is possible."""
    parts = text.strip().split(":")
    if len(parts) != 3 or parts[0] not in SITES or parts[1] not in SITES[parts[0]]:
        known = ", ".join(f"{site}:{'|'.join(kinds)}" for site, kinds in SITES.items())
        raise ConfigError(f"fault: {text!r} is not site:kind:nth; known are {known}", field="fault")
    number = parts[2].removesuffix("+")
    if not number.isascii() or not number.isdigit() or (parts[1] not in _POISONS and int(number) < 1):
        raise ConfigError(f"fault: {parts[2]!r} is not a number from 1 on, with or without a plus", field="fault")
    return Fault(parts[0], parts[1], int(number), parts[2].endswith("+"))


@dataclass
class Faults:
    """The faults of one engine process; `epoch` is its number, from 0.

    `move` shows that the engine moves; `spoil` spoils the logits of the next step.
    """

    faults: list[Fault]
    epoch: int = 0
    move: Callable[[], None] = lambda: None
    spoil: Callable[[], None] = lambda: None
    _counts: Counter[str] = field(default_factory=Counter)
    _counting: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, texts: Iterable[str], epoch: int = 0) -> Faults:
        return cls([parse(text) for text in texts], epoch)

    def at(self, site: str, requests: Collection[Request] = ()) -> None:
        """Called at each site. Does what is due: it may not return."""
        if not self.faults:
            return
        self._counts[site] += 1
        count = self._counts[site] + (self.epoch if site == "load" else 0)
        for fault in self.faults:
            if fault.site == site and self._due(fault, count, requests):
                self._happen(fault)

    def at_store(self, site: str, path: Path) -> None:
        """Called by threads at each site of the store. `path`: of the file, or the folder. Raises OSError."""
        with self._counting:
            self._counts[site] += 1
            due = [f for f in self.faults if f.site == site and self._due(f, self._counts[site], ())]
        for fault in due:
            if fault.kind in ("error", "full"):
                number = errno.ENOSPC if fault.kind == "full" else errno.EIO
                raise OSError(number, f"injected fault {fault.site}:{fault.kind}:{fault.nth}")
            if fault.kind == "slow":
                time.sleep(SLOW_S)
            elif fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.exists():
                _spoil(path, fault.kind)

    def _due(self, fault: Fault, count: int, requests: Collection[Request]) -> bool:
        if fault.kind in _POISONS:
            return any(fault.nth in request.prompt_token_ids for request in requests)
        if fault.again:
            return count % fault.nth == 0
        return count == fault.nth and (self.epoch == 0 or fault.site == "load")

    def _happen(self, fault: Fault) -> None:
        kind = fault.kind.removeprefix("poison-")
        if kind in ("kill", "poison"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSEGV)
        if kind == "exception":
            raise RuntimeError(f"injected fault {fault.site}:{fault.kind}:{fault.nth}")
        if kind == "nan":
            self.spoil()
        if kind == "slow":
            for _ in range(int(SLOW_S / 0.05)):
                time.sleep(0.05)
                self.move()
        while kind in ("hang", "kill", "poison"):  # a signal to oneself may take a moment
            time.sleep(0.05)


def _spoil(path: Path, kind: str) -> None:
    """A file that is damaged, cut or gone."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if kind != "gone":
        path.write_bytes(data if kind == "flip" else data[:-9])
