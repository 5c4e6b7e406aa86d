"""What this machine lets us use: cores, memory, instruction sets.

A container sees the host's /proc but may only use its cgroup's share; so every figure is the minimum of what the
machine has and what each cgroup above this process allows.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.core.machine import Machine

_KIB = 1024
_DRAFT_BYTES = 4 * 1024**3  # for systems that tell nothing: small enough to be true nearly everywhere
_NO_LIMIT = 2**62  # cgroup v1 writes "no limit" as a huge number (about 2**63, rounded down to a page)
_ARCH = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


class Free(NamedTuple):
    """What this process may use, and what of it is free now. Units: bytes."""

    memory_bytes: int
    available_bytes: int


def probe(root: str | Path = "/", *, affinity: int | None = None, arch: str | None = None) -> Machine:
    """The machine as this process may use it. Reads files below `root` only; never fails, falls back to drafts.

    `affinity` (cores this process may run on) and `arch` replace what the operating system says; tests give them
    together with a `root` of their own. Units: bytes.
    """
    base = Path(root)
    cores = float(affinity if affinity is not None else _affinity())
    for folder in _cgroup_folders(base, "cpu"):
        cores = min(cores, _quota(folder))
    free = free_memory(base)
    return Machine(
        # Rounded down: a thread more than the quota stalls all others at the end of every scheduling period.
        num_cores=max(1, int(cores)),
        memory_bytes=free.memory_bytes,
        available_bytes=free.available_bytes,
        arch=_arch(arch or platform.machine()),
        flags=_cpu_flags(base),
    )


def free_memory(root: str | Path = "/") -> Free:
    """The memory of `probe` alone, in about a tenth of a millisecond."""
    base = Path(root)
    meminfo = _meminfo(base)
    total = meminfo.get("MemTotal") or _physical_bytes()
    # MemAvailable is missing on kernels before 3.14 and off Linux; half is a draft that seldom swaps.
    available = meminfo.get("MemAvailable", total // 2)
    for folder in _cgroup_folders(base, "memory"):
        limit, used = _memory(folder)
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Free(total, min(available, total))


def _arch(name: str) -> str:
    return _ARCH.get(name.lower(), name.lower() or "unknown")


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _DRAFT_BYTES


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """The first word as a non-negative integer, or None ("max", "-1", an empty file)."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    return int(word) if word.isascii() and word.isdigit() else None


def _meminfo(root: Path) -> dict[str, int]:
    out: dict[str, int] = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        value = _number(rest)
        if value is not None:
            out[name.strip()] = value * _KIB
    return out


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the cgroups that hold this process, innermost first, for v2 and v1 alike.

    Limits of an outer group bind too, so all ancestors up to the mount point are given.
    """
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "":
            tops = [mount, mount / "unified"]
        elif controller in names.split(","):
            tops = [mount / controller, mount / names]
        else:
            continue
        for top in tops:
            if top.is_dir():
                yield from _ancestors(top, path)
                break


def _ancestors(top: Path, path: str) -> Iterator[Path]:
    # Inside a container without its own cgroup namespace, `path` is the host's and does not exist below the mount;
    # parts like ".." show a group outside the namespace. Then only the mount point itself speaks.
    parts = [p for p in path.split("/") if p]
    if ".." in parts:
        parts = []
    for depth in range(len(parts), -1, -1):
        folder = top.joinpath(*parts[:depth])
        if folder.is_dir():
            yield folder


def _quota(folder: Path) -> float:
    """Cores that the group may use; infinity if it has no quota."""
    text = _read(folder / "cpu.max").split()
    if len(text) == 2:
        quota, period = _number(text[0]), _number(text[1])
    else:
        quota = _number(_read(folder / "cpu.cfs_quota_us"))
        period = _number(_read(folder / "cpu.cfs_period_us"))
    return quota / period if quota and period else float("inf")


def _memory(folder: Path) -> tuple[int, int]:
    """(limit, use) of the group in bytes. Use leaves out file pages the kernel would drop first, as MemAvailable does:

    otherwise a model file that was just read would count twice.
    """
    for limit_name, use_name, stat_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(_read(folder / limit_name))
        if limit is not None and limit < _NO_LIMIT:
            used = _number(_read(folder / use_name)) or 0
            return limit, max(0, used - _stat(folder, stat_name))
    return _NO_LIMIT, 0


def _stat(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value) or 0
    return 0


def _cpu_flags(root: Path) -> frozenset[str]:
    """Instruction-set flags that every core has (cores may differ): `flags` on x86, `Features` on ARM."""
    common: frozenset[str] | None = None
    for line in set(_read(root / "proc/cpuinfo").splitlines()):
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found = frozenset(rest.split())
            common = found if common is None else common & found
    return common or frozenset()
