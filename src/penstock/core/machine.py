"""The machine as plain data. `plan.probe` fills it in; tests and simulators write their own."""

from __future__ import annotations

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Units: bytes. `num_cores` is what affinity and the cgroup quota allow, never the number of installed cores."""

    num_cores: int
    memory_bytes: int
    available_bytes: int
    arch: str = "x86_64"
    flags: frozenset[str] = frozenset()
