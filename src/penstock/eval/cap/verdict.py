"""Whether the data say so: an axis is improved, unchanged or worse only where an interval says it, else "not shown".

Gains are relative (or, of scores, in shares), positive is better, and come with an interval of 95 % over pairs. `same`:
an interval within it is no change worth telling; `beyond`: where a gain or a loss has to begin to count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from penstock.eval.cap.labels import AXES, Label
from penstock.eval.intervals import Interval

Word = Literal["improved", "unchanged", "worse", "mixed", "not shown"]
"""mixed: by one measure of the axis better, by another worse, or by its figure worse though its interval is wide."""
Confirmed = Literal["confirmed", "in part", "not confirmed", "not shown", "more than declared", "nothing declared"]


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of an axis beside the plain configuration's, in its own `unit`, and the gain with its interval.

    `same`: gains within it are no change worth telling.
    """

    axis: str
    name: str
    unit: str
    before: float
    after: float
    gain: float
    low: float | None
    high: float | None
    word: Word
    same: float = 0.0

    @property
    def leans(self) -> Word:
        """What the figure itself says, however wide its interval is: what a reader of the table sees."""
        if self.word != "not shown":
            return self.word
        if abs(self.gain) <= self.same:
            return "not shown"
        return "improved" if self.gain > 0 else "worse"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Of a configuration. `words`: by axis. `trilemma`: at most two of the three improved."""

    declared: str
    exact: bool
    why: str
    words: dict[str, Word]
    label: Confirmed
    said: str
    trilemma: bool


def measure(
    axis: str, name: str, unit: str, before: float, after: float, gain: float, interval: Interval | None, *,
    same: float, beyond: float,
) -> Measure:  # fmt: skip
    low, high = (None, None) if interval is None else interval
    return Measure(
        axis=axis, name=name, unit=unit, before=before, after=after, gain=gain, low=low, high=high,
        word=judge(interval, same=same, beyond=beyond), same=same,
    )  # fmt: skip


def judge(interval: Interval | None, *, same: float, beyond: float) -> Word:
    if interval is None:
        return "not shown"
    low, high = interval
    if -same <= low and high <= same:
        return "unchanged"
    if low > beyond:
        return "improved"
    return "worse" if high < -beyond else "not shown"


def together(measures: Sequence[Measure]) -> Word:
    """What several measures of one axis say.

    A change counts only where an interval says it. Against it counts whatever the reader sees to be otherwise: memory
    that halved beside a throughput that fell by a third is "mixed", also where that fall has a wide interval.
    """
    found = {m.word for m in measures}
    leans = {m.leans for m in measures}
    if "mixed" in found or ("improved" in found and "worse" in leans) or ("worse" in found and "improved" in leans):
        return "mixed"
    if "improved" in found or "worse" in found:
        return "improved" if "improved" in found else "worse"
    return "unchanged" if found == {"unchanged"} else "not shown"


def verdict(label: Label, measures: Sequence[Measure]) -> Verdict:
    words: dict[str, Word] = {axis: together([m for m in measures if m.axis == axis]) for axis in AXES}
    confirmed, said = confirm(label, words)
    sides = {"better": [], "worse": []}  # type: dict[str, list[str]]
    for m in measures:
        if m.word in ("improved", "worse"):
            sides["better" if m.word == "improved" else "worse"].append(m.name)
        elif words[m.axis] == "mixed" and m.leans in ("improved", "worse"):
            sides["better" if m.leans == "improved" else "worse"].append(f"perhaps {m.name}")
    named = [f"{side}: {', '.join(names)}" for side, names in sides.items() if names]
    if named:
        said += f" ({'; '.join(named)})"
    held = not all(word == "improved" for word in words.values())
    return Verdict(
        declared=label.axes, exact=label.exact, why=label.why, words=words, label=confirmed, said=said, trilemma=held
    )


def confirm(label: Label, words: Mapping[str, Word]) -> tuple[Confirmed, str]:
    """Whether the axes that improved are those that were declared, and a sentence on what is not so."""
    if not label.axes:
        return "nothing declared", "nothing was declared"
    missed = [axis for axis in label.axes if words[axis] in ("unchanged", "worse")]
    broken = label.exact and words["A"] in ("worse", "mixed")
    hidden = [axis for axis in label.axes if words[axis] == "not shown"]
    partly = [axis for axis in label.axes if words[axis] == "mixed"]
    more = [axis for axis in AXES if axis not in label.axes and words[axis] == "improved"]
    parts = [f"{axis} is {words[axis]}" for axis in missed]
    parts += ["A is worse, though no token may change"] if broken else []
    parts += [f"{axis} is not shown" for axis in hidden]
    parts += [f"{axis} is better by one measure and worse by another" for axis in partly]
    parts += [f"{axis} improved as well" for axis in more]
    said = "; ".join(parts) or "as declared"
    if missed or broken:
        return "not confirmed", said
    if hidden:
        return "not shown", said
    if partly:
        return "in part", said
    return ("more than declared" if more else "confirmed"), said
