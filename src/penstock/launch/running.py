"""The servers of this user that run: a small file each in a folder that is nobody else's, and what /proc says of them.

A number of a process is used again after its end, so a file names the start of its process, too; one whose process is
gone, or is another, is removed by whoever finds it.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.base.errors import ModelError
from penstock.formats.files import quoted
from penstock.ops.native.private_folder import PrivateFolder

_SUFFIX = ".json"
_MAX_BYTES = 64 << 10
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class RunningServer(msgspec.Struct, kw_only=True):
    """A server. `started`: of its process, in ticks since `boot` ("" where there is no /proc). `where`: host:port, or
    the path of a unix socket (`port` is 0 then). `model`: as it was named; `names`: by which clients call it.
    `num_live`: requests that it answers. `models`: of a server of several, what each is doing."""

    pid: int
    started: str
    model: str
    names: list[str]
    where: str
    port: int
    since_s: float
    num_live: int = 0
    models: dict[str, str] = {}


class Process(NamedTuple):
    parent: int
    started: str


def runtime_folder() -> Path:
    """penstock/ in XDG_RUNTIME_DIR, or a folder of this user's where temporary files are."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-{os.geteuid()}"


def announce_running(entry: RunningServer, folder: Path | None = None) -> bool:
    """Write or rewrite the file of a server; whether that was possible. If not, the server runs without it."""
    found = PrivateFolder.open(folder or runtime_folder(), create=True)
    if found is None:
        return False
    with found as opened:
        try:
            opened.write(f"{entry.pid}{_SUFFIX}", [msgspec.json.encode(entry)])
        except OSError:
            return False
    return True


def end_running(pid: int, folder: Path | None = None) -> None:
    """Remove the file of a server that ends."""
    found = PrivateFolder.open(folder or runtime_folder(), create=False)
    if found is not None:
        with found as opened:
            opened.remove(f"{pid}{_SUFFIX}")


def running(folder: Path | None = None) -> list[RunningServer]:
    """Those that live, by port."""
    found = PrivateFolder.open(folder or runtime_folder(), create=False)
    if found is None:
        return []
    alive = []
    with found as opened:
        for name, _ in opened.files(_SUFFIX):
            fd = opened.open_file(name)
            if fd is None:
                continue
            with open(fd, "rb") as file:
                try:
                    entry = msgspec.json.decode(file.read(_MAX_BYTES), type=RunningServer)
                except msgspec.MsgspecError:
                    continue
            if started(entry.pid) == entry.started:
                alive.append(entry)
            else:
                opened.remove(name)
    return sorted(alive, key=lambda entry: (entry.port, entry.where))


def started(pid: int) -> str | None:
    """When a process began, as one string for all time; "" where there is no /proc; None if it does not live."""
    if _BOOT.exists():
        process = _process(pid)
        return None if process is None else f"{_BOOT.read_text().strip()}:{process.started}"
    try:
        os.kill(pid, 0)
    except OSError:
        return None
    return ""


def _process(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else Process(int(fields[1]), fields[19])


def memory_bytes(pid: int) -> int:
    """What a process and its children take; memory that they share counts once. 0 if it cannot be told."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and (process := _process(int(name))) is not None:
            children.setdefault(process.parent, []).append(int(name))
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        todo += children.get(one, [])
        total += _shared_out(one)
    return total


def _shared_out(pid: int) -> int:
    for name, key in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
                if line.startswith(key):
                    return int(line.split()[1]) << 10
        except OSError:
            continue
    return 0


def find_running(text: str, servers: list[RunningServer]) -> RunningServer:
    """The server of a model's name, a port or the number of a process. Raises ModelError, naming what there is."""
    named = [s for s in servers if text in (s.model, s.where, str(s.port), str(s.pid), *s.names)]
    if len(named) == 1:
        return named[0]
    if named:
        ports = ", ".join(str(s.port or s.where) for s in named)
        raise ModelError(f"{len(named)} servers answer as {quoted(text)}: name a port ({ports})")
    there = ", ".join(f"{s.model} ({s.port or s.where})" for s in servers)
    raise ModelError(f"no server of yours runs {quoted(text)}; " + (f"there are {there}" if there else "none runs"))


def stop_running(entry: RunningServer, *, now: bool = False) -> None:
    """Tell a server to end (SIGTERM): it takes nothing new and ends what it has begun; `now`: not even that.

    The process is taken hold of before it is looked at, so that no other one of the same number is hit. Raises
    ModelError if it has ended.
    """
    gone = ModelError(f"{entry.model} ({entry.port or entry.where}) has ended already")
    try:
        if not hasattr(os, "pidfd_open"):
            os.kill(entry.pid, signal.SIGTERM)
            return
        fd = os.pidfd_open(entry.pid)
        try:
            if started(entry.pid) != entry.started:
                raise gone
            for _ in range(2 if now else 1):
                signal.pidfd_send_signal(fd, signal.SIGTERM)
        finally:
            os.close(fd)
    except ProcessLookupError:
        raise gone from None
