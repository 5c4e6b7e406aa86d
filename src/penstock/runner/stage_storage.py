"""The bytes of the caches of one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.core.cache_spec import CacheGroup
from penstock.core.page_ops import AnyPageOp, BlendOp, LoadOp, PackOp, PageOp, StoreOp
from penstock.runner.storage import Storage


class StageStorage(Storage):
    """A storage of some layers of each group, for those who count pages of all of them: they move whole slabs, and so
    it does with what a slab has here."""

    def __init__(self, groups: tuple[CacheGroup, ...], *args: Any, whole: Sequence[CacheGroup], **how: Any) -> None:
        """`whole`: the groups with all layers."""
        super().__init__(groups, *args, **how)
        self._widths = [(own.pages_per_slab, group.pages_per_slab) for own, group in zip(groups, whole, strict=True)]

    def apply(
        self, ops: Iterable[AnyPageOp], pack: Callable[[PackOp], None] | None = None,
        blend: Callable[[BlendOp], None] | None = None,
    ) -> dict[int, bool]:  # fmt: skip
        own: list[AnyPageOp] = []
        nothing: list[int] = []
        for op in ops:
            if not isinstance(op, PageOp | StoreOp | LoadOp):
                own.append(op)
            elif self._widths[op.group][0]:
                own.append(self._here(op))
            elif isinstance(op, LoadOp):
                nothing.append(op.move)  # and nothing was missing
        moves = super().apply(own, pack, blend)
        return dict.fromkeys(nothing, True) | moves

    def _here(self, op: PageOp | StoreOp | LoadOp) -> AnyPageOp:
        own, whole = self._widths[op.group]

        def page(number: int) -> int:
            assert number < 0 or number % whole == 0, f"{op}: a part of a slab"
            return number if number < 0 else number // whole * own

        return replace(op, src=page(op.src), dst=page(op.dst), count=page(op.count))
