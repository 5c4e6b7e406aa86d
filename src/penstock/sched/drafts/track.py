"""Whom a controller decides about, and what it knows of each."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.core.sequence import Sequence
from penstock.sched.drafts.slo import Pace


class Track:
    """Attributes:
    slot: of its belief; -1: it has ended.
    interval: steps between probes. due_at: the step from which the next one may come. probed: one is under way.
    pace: its deadline, if it has one.
    num_heard, num_right, num_wrong: verifications that nothing was learned from yet, guesses accepted in them, and how
        many ended with a wrong guess.
    """

    __slots__ = ("due_at", "interval", "num_heard", "num_right", "num_wrong", "pace", "probed", "seq_id", "slot")

    def __init__(self, seq_id: int, slot: int, step: int, pace: Pace | None = None) -> None:
        self.seq_id = seq_id
        self.slot = slot
        self.interval = 2
        self.due_at = step
        self.probed = False
        self.pace = pace
        self.num_heard = self.num_right = self.num_wrong = 0


def guessers(running: Seq[Sequence]) -> list[Sequence]:
    """Those for whom guesses can be verified: they decode, alone, and no step in flight works on them."""
    return [s for s in running if s.is_decoding and not s.num_inflight and s.request.beam is None]


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
