"""Who leaves memory so that another model fits. Integers only, so that it can be drawn and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Holder(NamedTuple):
    """A model with memory: bytes that it holds, when it was last used, and whether it can leave now."""

    name: str
    num_bytes: int
    used_s: float
    is_idle: bool


def leavers(need_bytes: int, free_bytes: int, holders: Sequence[Holder], *, idle_only: bool = True) -> list[str] | None:
    """Names of those that leave, who has been idle longest first; None: not enough of them can.

    `idle_only` False: also those that are in use, behind all that are not.
    """
    able = [holder for holder in holders if holder.num_bytes and (holder.is_idle or not idle_only)]
    gone: list[str] = []
    for holder in sorted(able, key=lambda one: (not one.is_idle, one.used_s)):
        if free_bytes >= need_bytes:
            break
        gone.append(holder.name)
        free_bytes += holder.num_bytes
    return gone if free_bytes >= need_bytes else None
