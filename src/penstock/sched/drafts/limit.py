"""A bound on drafts that may change between two steps: a draft controller around another."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.core.protocols import DraftController
    from penstock.core.sequence import Sequence


class DraftLimit:
    """See `core.protocols.DraftController`; all else is as the controller `inner` has it.

    `most`: drafts of a sequence in a step; 0: nobody drafts, and `inner` is not asked.
    """

    def __init__(self, inner: DraftController, most: int) -> None:
        self.inner, self.most = inner, most

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin_step(self, running: Seq[Sequence], now_s: float | None = None) -> Mapping[int, tuple[int, int]]:
        if not self.most:
            return {}
        rooms = self.inner.begin_step(running, now_s)
        return {seq_id: (min(num, self.most), depth) for seq_id, (num, depth) in rooms.items()}
