"""Quality of experience first: who gains most of it from the next seconds, for the memory he takes, has a place.

Readers read more slowly than an engine writes. While memory and places last, everybody is served as by `fcfs`. When
somebody waits for them, this policy weighs, for everybody alive, the quality of experience (`core.qoe`) at the end of
the next `horizon_s` seconds if he is served until then against that if he is not, divided by the tokens of memory that
he takes: the greedy answer to the paper's knapsack. Who waits goes in this order, and takes the place of the one who
gains least, if he gains `margin` times as much himself: of somebody whose reader has enough to read meanwhile, or for
whom all is too late.

Bounds. Places are given up at most `preemptions` times per request that was admitted (the paper's cap), only by who got
a token in his place, and only while what has to be computed again is a small part (`overhead`) of all tokens. Who has
had no token for `max_wait_s` seconds goes first, the longest such wait before the others and one at a time, and keeps
his place until he ends: so nobody starves, whoever else comes.
Source: Liu et al., Andes, arXiv 2404.16283 (v1), section 4 (knapsack, greedy packing, selective triggering, cap). The
bounds on waits and on tokens are ours. Of the paper's batch sizes one is tried, the largest: fewer in a step cost
more throughput than quality was won (docs/concepts/quality-of-experience.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from penstock.base.errors import ConfigError, InputError
from penstock.core.qoe import Delivery, Expected, expected_of
from penstock.core.sequence import Sequence, Status
from penstock.sched.policy.fcfs import Fcfs

NEVER_S = float("inf")
_CLAIMS = 8
"""Of those who wait, how many may take somebody's place in one step."""
_FORGETTING = 0.1
"""Weight of the newest gap between tokens in the estimate of how fast a sequence that is served goes on."""


class _Reader:
    """What the reader of a sequence that has been admitted has got."""

    __slots__ = ("delivery", "num", "num_lost", "num_placed", "overdue", "seq", "since_s")

    def __init__(self, seq: Sequence, delivery: Delivery, now_s: float) -> None:
        self.seq = seq
        self.delivery = delivery
        self.num = seq.num_generated
        self.num_placed = self.num
        """Tokens that it had when it got its place."""
        self.num_lost = 0
        """Tokens that it has to compute again, as far as is known."""
        self.since_s = now_s
        """When its newest token came, or it was first looked at."""
        self.overdue = False
        """It got its place because it had waited too long, and keeps it."""


class Andes(Fcfs):
    """Args:
    ttft_s, tds: what readers expect of requests that do not say it (seconds, tokens per second).
    horizon_s: how far the comparison of served and not served looks, > 0.
    margin: how many times as much somebody who waits must gain as who gives his place up, >= 1.
    preemptions: the most places that are given up, per request that was admitted, >= 0.
    overhead: the largest share of tokens that are computed again because places were given up, >= 0.
    max_wait_s: seconds without a token after which a sequence goes first, > 0.
    window: waiting sequences that are compared in a step: the half that came first, and the half that came last.
    """

    name = "andes"
    displaces = True

    def __init__(
        self, ttft_s: float = 1.0, tds: float = 4.8, horizon_s: float = 40.0, margin: float = 2.0,
        preemptions: float = 1.0, overhead: float = 0.03, max_wait_s: float = 120.0, window: int = 128,
    ) -> None:  # fmt: skip
        try:
            self.expected = Expected(ttft_s, tds).check()
        except InputError as error:
            raise ConfigError(f"ttft_s, tds: {error}", field=error.param) from None
        if not (horizon_s > 0 and max_wait_s > 0):
            raise ConfigError("horizon_s and max_wait_s must be above 0 seconds", field="horizon_s")
        if not margin >= 1:
            raise ConfigError(f"margin is {margin}; below 1, two would take each other's place in turn", field="margin")
        if not (preemptions >= 0 and overhead >= 0):
            raise ConfigError("preemptions and overhead must be 0 or more", field="preemptions")
        if window < 2:
            raise ConfigError(f"window is {window}; it must be at least 2", field="window")
        self.horizon_s, self.margin, self.preemptions, self.overhead = horizon_s, margin, preemptions, overhead
        self.max_wait_s, self.window = max_wait_s, window
        self._now_s = 0.0
        self._gap_s = 0.0
        """Between two tokens of a sequence that is served, lately; 0: nobody knows yet."""
        self._readers: dict[int, _Reader] = {}
        self._gains: dict[int, float] = {}
        self._ranking: tuple[int, list[Sequence]] = (-1, [])
        """Found in this step; of a queue of such a length."""
        self._placed: dict[int, _Reader] = {}
        """Of those who ran in the last step."""
        self._num_admitted = self._num_taken = 0
        self._num_tokens = self._num_lost = 0
        """Tokens of everybody who was admitted, and those that are computed again because a place was given up."""
        self._overdue: Sequence | None = None
        """Who goes first because it has waited too long."""

    # -- what the scheduler asks -----------------------------------------------------------------------------------

    def begin_step(self, now_s: float, kv: Any) -> None:
        self._now_s = now_s
        self._gains.clear()
        self._ranking = (-1, [])

    def not_before_s(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> float | None:
        """Never holds anybody back; but nobody else is asked about both queues before places are taken."""
        self._follow(running)
        self._overdue = self._longest_wait(running, waiting)
        return None

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        return super().order(running, self._ranked(waiting))

    def claims(self, waiting: Seq[Sequence]) -> Seq[Sequence]:
        return self._ranked(waiting)[:_CLAIMS]

    def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        """Whoever gains least, if it has got a token in its place and `newcomer` gains more by `margin`."""
        overdue = newcomer is self._overdue
        if not overdue and not self._may_take():
            return None
        found, least = None, NEVER_S
        for seq in running:
            reader = self._readers.get(seq.seq_id)
            if reader is None or reader.overdue or reader.num <= reader.num_placed:
                continue
            if seq.num_inflight or not seq.tables:
                continue
            gain = self.gain(seq)
            if gain < least:
                found, least = seq, gain
        if found is not None and not overdue and self.gain(newcomer) <= self.margin * least:
            return None
        return found

    def victim(self, running: Seq[Sequence], needy: Sequence) -> Sequence | None:
        """Who gains least of all but the oldest, which always gets on, and those that had waited too long."""
        found, least = None, NEVER_S if needy is running[0] else self.gain(needy)
        for seq in running[1:]:
            reader = self._readers.get(seq.seq_id)
            if seq is needy or seq.num_inflight or not seq.tables or (reader is not None and reader.overdue):
                continue
            gain = self.gain(seq)
            if gain < least:
                found, least = seq, gain
        if found is None and needy is running[0]:
            return super().victim(running, needy)
        return found

    def _may_take(self) -> bool:
        few = self._num_taken < self.preemptions * self._num_admitted
        return few and self._num_lost <= self.overhead * self._num_tokens

    # -- what they gain --------------------------------------------------------------------------------------------

    def gain(self, seq: Sequence) -> float:
        """Quality of experience that serving `seq` for `horizon_s` seconds brings, per token of its memory."""
        found = self._gains.get(seq.seq_id)
        if found is None:
            found = self._gains[seq.seq_id] = self._gain(seq) / len(seq.token_ids)
        return found

    def _gain(self, seq: Sequence) -> float:
        reader = self._readers.get(seq.seq_id)
        delivery = self._new(seq) if reader is None else reader.delivery
        until_s = self._now_s + self.horizon_s
        expected = delivery.expected_area(until_s)
        if expected <= 0:
            return 0.0
        rate = 1 / (self._gap_s or delivery.gap_s)
        without = delivery.area(until_s)
        served = without + delivery.more_area(self._now_s, until_s, rate)
        return min(1.0, served / expected) - min(1.0, without / expected)

    def _new(self, seq: Sequence) -> Delivery:
        request = seq.request
        return Delivery(request.arrival_s, expected_of(request.expected_ttft_s, request.expected_tds, self.expected))

    def _ranked(self, waiting: Seq[Sequence]) -> list[Sequence]:
        """Those who wait, who goes first by need before those who gain most; of a long queue only both ends, and all
        who had a place before."""
        if len(waiting) == self._ranking[0]:  # in one step, sequences only join the queue before it is offered
            return self._ranking[1]
        looked = list(waiting)
        if len(looked) > self.window:
            half = self.window // 2
            had = [r.seq for r in self._readers.values() if r.seq.status is Status.WAITING]
            first = [] if self._overdue is None else [self._overdue]
            ends = (*waiting[:half], *waiting[len(waiting) - half :])
            looked = list({seq.seq_id: seq for seq in (*first, *ends, *had)}.values())
        if len(looked) > 1:
            gain, overdue = self.gain, self._overdue
            looked.sort(key=lambda s: (s is not overdue, -gain(s), s.arrival, s.index))
        self._ranking = (len(waiting), looked)
        return looked

    # -- who is read how -------------------------------------------------------------------------------------------

    def _follow(self, running: Seq[Sequence]) -> None:
        """Take in what has been generated since the last step, who has got a place and who has lost one."""
        now_s, readers = self._now_s, self._readers
        newest = NEVER_S
        placed = {}
        for seq in running:
            reader = self._placed.get(seq.seq_id)
            if reader is None:
                placed[seq.seq_id] = self._got_place(seq)
                continue
            placed[seq.seq_id] = reader
            news = len(seq.token_ids) - seq.prompt_len - reader.num
            if news > 0:
                reader.delivery.take(news, now_s)
                reader.num += news
                self._num_tokens += news
                newest = min(newest, (now_s - reader.since_s) / news)
                reader.since_s = now_s
        for seq_id in self._placed.keys() - placed.keys():
            self._lost_place(readers[seq_id])
        self._placed = placed
        for reader in [r for r in readers.values() if r.seq.status is Status.FINISHED]:
            self._num_lost -= reader.num_lost  # nobody will
            del readers[reader.seq.seq_id]
        if newest < NEVER_S:
            self._gap_s = newest if not self._gap_s else self._gap_s + _FORGETTING * (newest - self._gap_s)

    def _got_place(self, seq: Sequence) -> _Reader:
        reader = self._readers.get(seq.seq_id)
        if reader is None:
            reader = self._readers[seq.seq_id] = _Reader(seq, self._new(seq), self._now_s)
            if reader.num:
                reader.delivery.take(reader.num, self._now_s)
            self._num_admitted += 1
            self._num_tokens += len(seq.token_ids)
        elif reader.num_lost:
            self._num_lost -= min(reader.num_lost, seq.num_cached)  # the prefix cache still had so many
            reader.num_lost = 0
        reader.num_placed = reader.num
        reader.overdue = seq is self._overdue
        return reader

    def _lost_place(self, reader: _Reader) -> None:
        seq = reader.seq
        if seq.status is Status.FINISHED:
            return
        reader.overdue = False
        self._num_taken += 1
        if seq.swapped is None:
            reader.num_lost = len(seq.token_ids)
            self._num_lost += reader.num_lost

    def _longest_wait(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> Sequence | None:
        """Of those who wait for longer than they may, who has waited longest; None while such a one runs."""
        if not waiting or any(reader.overdue for reader in self._placed.values()):
            return None
        new = next((s for s in waiting if s.seq_id not in self._readers and not s.held), None)
        found, since_s = None, self._now_s - self.max_wait_s
        if new is not None and new.request.arrival_s < since_s:
            found, since_s = new, new.request.arrival_s
        for seq_id, reader in self._readers.items():
            if reader.since_s < since_s and seq_id not in self._placed and not reader.seq.held:
                found, since_s = reader.seq, reader.since_s
        return found
