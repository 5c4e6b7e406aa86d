"""How often speed is measured: in rounds, all configurations in turn, until the intervals can be read.

The order turns with every round (A B C, C B A, ...), so that a machine that drifts does so for all alike. Rounds go on
until each interval is narrow enough for its gain; whether it says "improved" is not asked: stopping once a gain has
shown would find gains where there are none. Source: Chow & Robbins, fixed-width sequential intervals, Ann. Math. Stat.
36, 1965.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from penstock.eval.cap.conditions import Conditions
from penstock.eval.cap.report import Rounds
from penstock.eval.cap.speed import Speed, by_round
from penstock.measure.intervals import ratio_interval

OF_GAIN = 0.25
"""An interval may reach so far to either side, as a share of its gain; or as far as the tolerance, if that is more."""
MOST_ROUNDS = 64


def run_rounds(
    speeds: Sequence[Speed], conditions: Conditions, timed: Callable[[int, int], None],
    now: Callable[[], float] = time.perf_counter,
) -> Rounds:  # fmt: skip
    """`timed(i, number)` measures one round of configuration i into `speeds[i]`, the plain one being the first."""
    began, before = now(), cpu_seconds()
    number, why = 0, ""
    while not why:
        order = range(len(speeds))
        for i in order if number % 2 == 0 else reversed(order):
            timed(i, number)
        number += 1
        if number >= conditions.rounds:
            why = _ended(number, now() - began, speeds, conditions)
    return Rounds(number=number, seconds=now() - began, why=why, busy=_busy(before, cpu_seconds()))


def _ended(number: int, seconds: float, speeds: Sequence[Speed], conditions: Conditions) -> str:
    """Why no further round is run; empty if one is."""
    wide = num_wide(speeds, conditions)
    if not wide:
        return "every interval of a time is narrow enough to be read"
    left = f"{wide} of {3 * (len(speeds) - 1)} intervals of times are still wide"
    if seconds >= conditions.speed_seconds:
        return f"{left}, and --speed-seconds {conditions.speed_seconds:g} are over"
    return f"{left} after {number} rounds" if number >= max(MOST_ROUNDS, conditions.rounds) else ""


def num_wide(speeds: Sequence[Speed], conditions: Conditions) -> int:
    """Intervals of times beside the plain configuration's that are too wide to be worth reading."""
    plain, wide = speeds[0], 0
    for own in speeds[1:]:
        for old, new in ((plain.ttft_s, own.ttft_s), (plain.tpot_s, own.tpot_s), (plain.batch_s, own.batch_s)):
            gain, found = ratio_interval(by_round(old, conditions.repeats), by_round(new, conditions.repeats))
            room = max(conditions.speed_tolerance, OF_GAIN * abs(gain))
            wide += found is None or (found[1] - found[0]) / 2 > room
    return wide


def cpu_seconds() -> tuple[float, float, float] | None:
    """(there were, of all programs, of this process and what it has ended) so far; None where the system does not tell.

    What a virtual machine's host took away counts as another program's.
    """
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, idle, iowait, irq, soft, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    used = user + nice + system + irq + soft + steal
    return (used + idle + iowait) / ticks, used / ticks, sum(os.times()[:4])


def _busy(before: tuple[float, ...] | None, after: tuple[float, ...] | None) -> float | None:
    if before is None or after is None:
        return None
    there, everybody, own = (b - a for a, b in zip(before, after, strict=True))
    return min(1.0, max(0.0, (everybody - own) / there)) if there > 0 else 0.0
