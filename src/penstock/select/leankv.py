"""LeanKV: three levels of tokens, by head: the best whole, the middle ones in half the bits, the rest gone.

Source: Zhang et al., LeanKV (later DiffKV), arXiv 2412.03131, section 4: keys in more bits than values, tokens of
middle importance in fewer of both, and heads that keep as many tokens as their attention asks for. The share `middle`
of the budget holds two tokens in the room of one; the rest is Ada-KV's choice, and so are the middle ones among what is
left. The paper finds thresholds of significance beforehand, and judges a token as it leaves the window; here budgets
are given, and every selection judges all. What has lost bits stays so, or goes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import groupby

import numpy as np

from penstock.core.selection import KVLine, Selecting
from penstock.select.adakv import AdaKV
from penstock.select.bench import SelectionBench
from penstock.select.slots import F32, I32, Mask, always, fill, slots
from penstock.select.snapkv import votes


class LeanKV(AdaKV):
    """See the module."""

    name = "leankv"
    halves = True

    def levels(self, at: Selecting, lines: Seq[KVLine]) -> tuple[list[I32], list[I32]]:
        """See `KVSelector.levels`."""
        whole: list[I32] = []
        middle: list[I32] = []
        for _, group in groupby(lines, key=lambda line: line.layer):
            ours, theirs = self._levels(at, list(group))
            whole += ours
            middle += theirs
        return whole, middle

    def _levels(self, at: Selecting, heads: list[KVLine]) -> tuple[list[I32], list[I32]]:
        points: list[F32] = [votes(line, at, self.options) for line in heads]
        room = round(self.options.middle * at.budget) * len(heads)
        own = replace(at, budget=at.budget - room // len(heads))
        floor = int(self.options.floor * own.budget)
        whole = [np.ones(len(line), np.bool_) if line.coarse is None else ~line.coarse for line in heads]
        sure = [
            fill(always(line, own, self.options) & can, p, floor, can)
            for line, p, can in zip(heads, points, whole, strict=True)
        ]
        every, can, seen = np.concatenate(points), np.concatenate(whole), np.concatenate(sure)
        kept = fill(seen, every, own.budget * len(heads), can)
        both = fill(kept, every, int(kept.sum()) + 2 * room)
        ends = np.cumsum([len(line) for line in heads])[:-1]
        found = zip(np.split(kept, ends), np.split(both, ends), points, strict=True)
        levels = [(slots(mine), _ranked(all_of & ~mine, p)) for mine, all_of, p in found]
        return [mine for mine, _ in levels], [theirs for _, theirs in levels]


def _ranked(mask: Mask, points: F32) -> I32:
    """Slots of `mask`, the best first; of equals the newest."""
    free = np.flatnonzero(mask)[::-1]
    return free[np.argsort(-points[free], kind="stable")].astype(np.int32)


def make(bench: SelectionBench) -> LeanKV:
    return LeanKV(bench)
