"""Sequences that were promised a pace: how many guesses they need to keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.sequence import Sequence

if TYPE_CHECKING:
    from penstock.sched.drafts.track import Track


def slo_of_request(seq: Sequence) -> float | None:
    """Seconds per output token that a request was promised, if it was."""
    return seq.request.slo_tpot_s


class Pace:
    """How a sequence stands against its promise of `slo_s` seconds per token.

    Source: AdaServe, arXiv 2501.12162, section 4.1: the tokens that a sequence must get in a step so that its mean time
    per token is within its promise at the end of it.
    """

    __slots__ = ("elapsed_s", "num_tokens", "slo_s")

    LEAST_GAIN = 0.3
    """A guess less likely to be used than that does not help to keep a promise."""

    def __init__(self, slo_s: float) -> None:
        self.slo_s = slo_s
        self.elapsed_s = 0.0
        self.num_tokens = 0

    def add(self, seconds: float, num_tokens: int) -> None:
        self.elapsed_s += seconds
        self.num_tokens += num_tokens

    def guesses(self, gains: list[float], has: float, step_s: float) -> int:
        """Guesses that a step of `step_s` needs for it; fewer if even those would not do it.

        `gains`: the chance of each guess to be used; `has`: the share of proposals that hold any.
        """
        short = (self.elapsed_s + step_s) / self.slo_s - self.num_tokens - 1.0
        count = 0
        for gain in gains:
            if short <= 0.0 or gain < self.LEAST_GAIN:
                break
            short -= has * gain
            count += 1
        return count


def tightened(
    rooms: dict[int, tuple[int, int]], tracks: list[Track], gains: list[list[float]], has: float, step_s: float,
    depth: int,
) -> None:  # fmt: skip
    """Those who are behind their deadline get the guesses they need, the least likely of others make place.

    Mutates: `rooms` (sequence -> guesses, depth). `gains`: chances of each track's guesses; `has`: see `Pace.guesses`;
    `step_s`: what a step with these rooms takes.
    """
    needs = [(track, row, track.pace) for track, row in zip(tracks, gains, strict=True) if track.pace is not None]
    in_time = {track.seq_id: row for track, row in zip(tracks, gains, strict=True)}
    taken = 0
    for track, row, pace in sorted(needs, key=lambda need: need[2].slo_s):
        has_room = rooms.get(track.seq_id, (0, 0))[0]
        wanted = pace.guesses(row, has, step_s)
        if wanted:
            in_time.pop(track.seq_id, None)
        if wanted > has_room:
            rooms[track.seq_id] = (wanted, min(wanted, depth))
            taken += wanted - has_room
    while taken > 0:
        others = [(in_time[seq_id][room - 1], seq_id) for seq_id, (room, _) in rooms.items() if seq_id in in_time]
        if not others:
            return
        _, seq_id = min(others)
        room = rooms.pop(seq_id)[0] - 1
        if room:
            rooms[seq_id] = (room, min(room, depth))
        taken -= 1
