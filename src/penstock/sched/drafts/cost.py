"""What a step costs: a timer's prediction, set right by the steps that were run; and what drafting costs.

Only steps in which everybody decodes are compared: in others a prompt hides what drafts cost.
"""

from __future__ import annotations

from math import log2

from penstock.core.protocols import StepTimer
from penstock.core.step_shape import StepShape

_KEPT = 9
"""Measurements of one kind of step whose median counts."""
_PLAIN, _AFTER_DRAFTS = 0, 1
_DOUBT = 0.1
_CONTEXTS_PER_BIT = 8


class UnitTimer:
    """For engines without a cost table: a step of one, and 2 % of it for every token. Measurements set the scale."""

    name = "unit"

    def step_s(self, shape: StepShape) -> float:
        return 1.0 + 0.02 * shape.num_tokens

    def copy_s(self, num_bytes: int) -> float:
        return 0.0


class _Recent:
    """The median of the last few ratios of measured to predicted time."""

    __slots__ = ("_ring", "_turn", "used", "value")

    def __init__(self) -> None:
        self._ring: list[float] = []
        self._turn = 0
        self.value = 1.0
        self.used = 0.0
        """The value that tables were made with."""

    def add(self, ratio: float) -> bool:
        """Whether tables are out of date."""
        if len(self._ring) < _KEPT:
            self._ring.append(ratio)
        else:
            self._ring[self._turn] = ratio
            self._turn = (self._turn + 1) % _KEPT
        self.value = sorted(self._ring)[len(self._ring) // 2]
        if abs(self.value - self.used) > 0.02 * self.used:
            self.used = self.value
            return True
        return False


class StepCosts:
    """Seconds of decode steps by width (tokens that run), sequences and cached tokens.

    A ratio measured/predicted is kept per kind of step: sequences by powers of two, steps without drafts apart, the
    others by width in half powers of two. A kind that was never run borrows the ratio of the nearest one that was.

    Plain steps behind a plain one and those behind a step with drafts are kept apart: the latter find caches full of
    other things, so they take longer than plain decoding would. The lower of the two counts.
    """

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._ratios: dict[int, dict[int, _Recent]] = {}
        self._tables: dict[tuple[int, int], dict[int, float]] = {}
        self.confirmed = False
        """A step with drafts was measured."""

    def table(self, num_rows: int, context: int) -> dict[int, float]:
        """Width -> seconds, for `fill`; valid until the next measurement."""
        key = (num_rows, context_class(context))
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = {}
        return table

    def fill(self, table: dict[int, float], num_rows: int, context: int, width: int) -> float:
        """Seconds of a step of `width` tokens, noted in the table."""
        seconds = table[width] = self.step_s(num_rows, class_middle(context), width)
        return seconds

    def seconds(self, num_rows: int, context: int, width: int) -> float:
        """Seconds of a step of `width` tokens."""
        table = self.table(num_rows, context)
        return table.get(width) or self.fill(table, num_rows, context, width)

    def step_s(self, num_rows: int, context: int, width: int) -> float:
        """Seconds; `context`: cached tokens of all sequences together."""
        ratio = self._ratio(num_rows, width)
        return ratio * self._timer.step_s(_shape(num_rows, context, width))

    def predicted_s(self, num_rows: int, context: int, width: int, prefill_tokens: int) -> float:
        """The timer's word alone, with `prefill_tokens` prompt tokens in the same step."""
        shape = _shape(num_rows, context, width)
        return self._timer.step_s(shape.plus(0, prefill_tokens) if prefill_tokens else shape)

    def observe(self, num_rows: int, context: int, width: int, seconds: float, *, after_drafts: bool = False) -> None:
        """A step in which everybody decoded took so long, drafting left out. `after_drafts`: behind one with drafts."""
        predicted = self._timer.step_s(_shape(num_rows, context, width))
        if predicted <= 0.0:
            return
        kinds = self._ratios.setdefault(num_rows.bit_length(), {})
        kind = _kind(num_rows, width)
        self.confirmed = self.confirmed or kind != _PLAIN
        if kind == _PLAIN and after_drafts:
            kind = _AFTER_DRAFTS
        recent = kinds.get(kind)
        if recent is None:
            recent = kinds[kind] = _Recent()
        if recent.add(seconds / predicted):
            self._tables.clear()

    def doubtful(self, num_rows: int) -> bool:
        """Steps with drafts do not take what the timer says, and no plain one of so many sequences was measured."""
        kinds = self._ratios.get(num_rows.bit_length(), {})
        if _PLAIN in kinds or _AFTER_DRAFTS in kinds:
            return False
        return any(abs(recent.value - 1.0) > _DOUBT for recent in kinds.values())

    def surprising(self, num_rows: int) -> bool:
        """Plain steps of so many sequences do not take what the timer says."""
        plain = self._ratios.get(num_rows.bit_length(), {}).get(_PLAIN)
        return plain is None or abs(plain.value - 1.0) > _DOUBT

    def _ratio(self, num_rows: int, width: int) -> float:
        if not self._ratios:
            return 1.0
        rows = num_rows.bit_length()
        kinds = self._ratios.get(rows)
        if kinds is None:
            kinds = self._ratios[min(self._ratios, key=lambda other: (abs(other - rows), other))]
        kind = _kind(num_rows, width)
        plain, after_drafts = kinds.get(_PLAIN), kinds.get(_AFTER_DRAFTS)
        recent = kinds.get(kind)
        if recent is None and kind != _PLAIN:
            nearest = min(kinds, key=lambda other: (abs(other - kind), other))
            if nearest not in (_PLAIN, _AFTER_DRAFTS):
                recent = kinds[nearest]
        if recent is None or recent is plain:  # plain, or nothing nearer than plain
            known = [one.value for one in (plain, after_drafts) if one is not None]
            if known:
                return min(known)
            recent = kinds[min(kinds, key=lambda other: (abs(other - kind), other))]
        return recent.value


class DraftCosts:
    """Seconds of drafting by room (drafts of the sequence that has most) and sequences that draft.

    Without a measurement: that of the nearest room, larger rooms in proportion; nothing as long as there is none.
    """

    def __init__(self) -> None:
        self._known: dict[int, dict[int, float]] = {}
        self._warm: set[tuple[int, int]] = set()
        """(sequences, room) that were measured twice or more: the first time a drafter touches its memory."""

    def seconds(self, limit: int, num_rows: int) -> float:
        if not self._known:
            return 0.0
        rows = num_rows.bit_length()
        limits = self._known.get(rows)
        if limits is None:
            nearest = min(self._known, key=lambda other: (abs(other - rows), other))
            limits = self._known[nearest]
        kind = limit.bit_length()
        found = limits.get(kind)
        if found is not None:
            return found
        nearest = min(limits, key=lambda other: (abs(other - kind), other))
        return limits[nearest] * 2.0 ** (kind - nearest)

    def observe(self, limit: int, num_rows: int, seconds: float) -> bool:
        """Whether what is known has changed by much."""
        limits = self._known.setdefault(num_rows.bit_length(), {})
        kind = limit.bit_length()
        was = limits.get(kind)
        if was is None:
            limits[kind] = seconds
            return True
        if (num_rows.bit_length(), kind) not in self._warm:
            self._warm.add((num_rows.bit_length(), kind))
            limits[kind] = min(was, seconds)
        else:
            limits[kind] = was + 0.25 * (min(seconds, 2.0 * was + 1e-6) - was)
        return False


def _shape(num_rows: int, context: int, width: int) -> StepShape:
    """Everybody has the same context and the same number of drafts."""
    pairs = width * context // num_rows + width * (width + num_rows) // (2 * num_rows)
    return StepShape(width, num_rows, context + width, pairs, width)


def _kind(num_rows: int, width: int) -> int:
    return _PLAIN if width <= num_rows else 4 + int(2.0 * log2(width))


def context_class(context: int) -> int:
    return int(_CONTEXTS_PER_BIT * log2(context + 64))


def class_middle(context: int) -> int:
    """A context that stands for all of its class."""
    return max(0, int(2.0 ** ((context_class(context) + 0.5) / _CONTEXTS_PER_BIT)) - 64)
