"""What tenants have pinned, by the contents of blocks: a pin beyond a tenant's part is refused before it is queued.

The engine has the last word and counts the same (`kv.hints`); what it refuses stays retained.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from penstock.base.errors import InputError
from penstock.base.hashing import digest


class PinLedger:
    """Blocks by name, each until a time in seconds. `most`: what all tenants together may pin, in blocks."""

    def __init__(self, most: int, block_size: int) -> None:
        self._most = most
        self._size = max(1, block_size)
        self._pinned: dict[str, dict[bytes, float]] = {}

    def pin(
        self, tenant: str, share: float, namespace: bytes, ids: Sequence[int], until_s: float, now_s: float
    ) -> None:
        """Count the whole blocks of `ids` as pinned. Raises InputError, and nothing is counted: more than its part."""
        most = int(self._most * (share or 1.0))
        num = len(ids) // self._size
        if num > most:
            raise InputError(
                f"this pins {num * self._size} tokens; at most {most * self._size} may be pinned here (kv_pin_share)",
                param="kv_hints",
            )
        known = self._pinned.setdefault(tenant, {})
        for name in [name for name, end_s in known.items() if end_s <= now_s]:
            del known[name]
        names, name = [], namespace
        for at in range(0, num * self._size, self._size):
            name = digest(name, array("I", ids[at : at + self._size]).tobytes())
            names.append(name)
        new = sum(name not in known for name in names)
        if len(known) + new > most:
            raise InputError(
                f"this pins {new * self._size} tokens more, beside {len(known) * self._size} that are pinned; at most "
                f"{most * self._size} may be (kv_pin_share)", param="kv_hints",
            )  # fmt: skip
        for name in names:
            known[name] = max(until_s, known.get(name, until_s))
