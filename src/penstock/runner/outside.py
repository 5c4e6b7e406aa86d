"""Bytes of the tiers outside this process, by number: orders go to the tier that they name, and one load may have
blocks from several."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.page_ops import TIER_NAMES, AdapterOp, FetchOp, GetOp, OutsideOp, PutOp
from penstock.runner.block_files import BlockFiles


class Outside:
    """`tiers`: by number (`core.page_ops.TIER_NAMES`)."""

    def __init__(self, tiers: Mapping[int, BlockFiles]) -> None:
        self.tiers = dict(tiers)
        self._loads: dict[int, set[int]] = {}  # tiers from which something of a load is on its way
        self._failed: set[int] = set()

    def order(self, op: OutsideOp) -> None:
        """Take one of a step's orders, in their order."""
        assert not isinstance(op, AdapterOp), "no tier has adapters"
        tier = self.tiers[op.tier]
        if isinstance(op, PutOp):
            tier.put(op)
        elif isinstance(op, GetOp):
            self._loads.setdefault(op.move, set()).add(op.tier)
            tier.get(op)
        elif isinstance(op, FetchOp):
            tier.fetch(op)
        else:
            tier.change(op)

    def begin(self) -> None:
        """All orders of a step have been given."""
        for tier in self.tiers.values():
            tier.begin()

    def ended(self, wait_s: float = 0.0) -> dict[int, bool]:
        """Moves that have ended since this was last asked, and whether they did what they should: a load when all
        tiers have. `wait_s`: how long to wait for one if loads are on their way."""
        ended: dict[int, bool] = {}
        for number, tier in self.tiers.items():
            for move, good in tier.ended(0.0 if ended else wait_s / len(self.tiers)).items():
                left = self._loads.get(move)
                if left is None:
                    ended[move] = good
                    continue
                left.discard(number)
                if not good:
                    self._failed.add(move)
                if not left:
                    del self._loads[move]
                    ended[move] = move not in self._failed
                    self._failed.discard(move)
        return ended

    def misses(self) -> dict[str, int]:
        """Blocks that could not be read since this was last asked, by tier and reason (`StepOutput.misses`)."""
        return {
            f"{TIER_NAMES[number]}:{reason}": count
            for number, tier in self.tiers.items()
            for reason, count in tier.misses().items()
        }

    def took(self) -> dict[int, tuple[int, float, float]]:
        """What was read since this was last asked, of each tier that was (`BlockFiles.took`)."""
        return {number: took for number, tier in self.tiers.items() if (took := tier.took()) is not None}

    def close(self, wait_s: float = 5.0) -> None:
        """Write what waits, but not for longer than that, each."""
        for tier in self.tiers.values():
            tier.close(wait_s)
