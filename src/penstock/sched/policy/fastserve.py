"""FastServe: a skip-join multi-level feedback queue, for loads in which few requests are much longer than most.

Nobody knows how long an output will be. So whoever has had little service goes first: jobs (requests) stand in levels,
each with a quantum `ratio` times that of the level above it; a job that has used up its quantum goes one level down.
Its first step is known to take as long as its prompt: it joins the first level whose quantum covers that, and skips
those above, which it would only pass through. Within a level, whoever came into it first goes first.
A job below the first level that had no service for `starvation_s` goes to the head of the first one, with time for the
rest of its prompt at least. So it waits at most 17/16 `starvation_s`, and until those who went there before it, at most
N below the first level, have had a quantum: (N / sequences in a step + 2) quanta, however many newcomers there are.

In each step the first `batch` jobs run; the others pause and keep their cache while there is memory. Who waits takes
place or memory of whoever stands in a lower level; with `spare` > 0 the caches of those that pause go to a tier before
anybody needs the room, those first that will run again last, and come back before they are due (`sched.swap_ahead`).

Service is counted in seconds of a frozen price, `prompt_s` per computed token of a prompt and `token_s` per generated
one, so that levels do not depend on whom a step is shared with, and runs replay. Computing something again is free.
Source: Wu et al., Fast Distributed Inference Serving for Large Language Models, arXiv 2305.05920, sections 4.1
(skip-join MLFQ, algorithm 1) and 4.2 (proactive swapping, estimated next scheduled time).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from heapq import nsmallest
from typing import Any

from penstock.base.errors import ConfigError
from penstock.core.sequence import Sequence, Status
from penstock.sched.policy.fcfs import Fcfs

MOST_LEVELS = 24
WINDOW = 64
"""Waiting sequences offered to one step."""
LOOKS = 16
"""Times per `starvation_s` that is looked for who starves."""


class Job:
    """A request's place. Units: seconds.

    `number`: order of coming into a level. `served`: service had; `until`: how much that may come to in this level.
    `since_s`: when it was served last, or came.
    """

    __slots__ = ("level", "rank", "served", "since_s", "until")

    def __init__(self, since_s: float) -> None:
        self.level = 0
        self.rank = (0, 0)
        self.served = self.until = 0.0
        self.since_s = since_s


class FastServe(Fcfs):
    """Args:
    quantum_s: of the first level, > 0; `ratio`: of a level's quantum to that of the level above, > 1.
    starvation_s: without service after which a job goes up to the first level, > 0.
    batch: sequences in one step at most; 0: all that have memory.
    spare: share of the memory that is kept free by copying to the tier whose turn is far off, [0, 0.9].
    token_s, prompt_s: price of a generated token, and of one of a prompt, > 0.
    """

    name = "fastserve"
    displaces = True

    def __init__(
        self, quantum_s: float = 0.5, ratio: float = 2.0, starvation_s: float = 60.0, batch: int = 0,
        spare: float = 0.1, token_s: float = 0.02, prompt_s: float = 0.001,
    ) -> None:  # fmt: skip
        for knob, value in (("quantum_s", quantum_s), ("starvation_s", starvation_s), ("token_s", token_s),
                            ("prompt_s", prompt_s)):  # fmt: skip
            if not 0 < value < float("inf"):
                raise ConfigError(f"{knob} of fastserve is {value}; it must be above 0", field=knob)
        if not 1 < ratio <= 1000:
            raise ConfigError(f"ratio of fastserve is {ratio}; levels need one above 1 and at most 1000", field="ratio")
        if batch < 0 or not 0 <= spare <= 0.9:
            knob = "batch" if batch < 0 else "spare"
            raise ConfigError("fastserve: batch must be at least 0, spare between 0 and 0.9", field=knob)
        self.max_rows = batch
        self.spare = spare
        self.starvation_s = starvation_s
        self.token_s, self.prompt_s = token_s, prompt_s
        self._quanta = [quantum_s * ratio**level for level in range(MOST_LEVELS)]
        self._jobs: dict[int, Job] = {}
        """By order of arrival of the request."""
        self._number = 0
        self._now_s = self._look_s = 0.0
        self._kv: Any = None
        self._running: Seq[Sequence] = ()
        self._heads: list[Sequence] | None = None
        """The first of those that wait, once they were ranked in this step."""

    # -- levels ----------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float, kv: Any) -> None:
        self._now_s, self._kv, self._heads = now_s, kv, None

    def not_before_s(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> None:
        """Never; but it is the first question of a step, and levels follow what the last one did."""
        self._follow(running, waiting)

    def level(self, seq: Sequence) -> int:
        """0 goes first."""
        return self._job(seq).level

    def _rank(self, seq: Sequence) -> tuple[int, int]:
        return self._job(seq).rank

    def _job(self, seq: Sequence) -> Job:
        job = self._jobs.get(seq.arrival)
        if job is None:
            job = self._jobs[seq.arrival] = Job(self._now_s)
            first_s = self._prefill_s(seq)
            level = 0
            while level < MOST_LEVELS - 1 and self._quanta[level] < first_s:
                level += 1
            self._enter(job, level)
        return job

    def _prefill_s(self, seq: Sequence) -> float:
        """What is left of the prompt, but for what the prefix cache has, at its price."""
        done = seq.num_computed
        if not done and self._kv is not None and seq.status is Status.WAITING:
            done = self._kv.match(seq).num_tokens
        return self.prompt_s * max(0, seq.prompt_len - done)

    def _enter(self, job: Job, level: int, at_least_s: float = 0.0, *, at_head: bool = False) -> None:
        self._number += 1
        job.level, job.rank = level, (level - at_head, self._number)
        job.until = job.served + max(self._quanta[level], at_least_s)

    def _follow(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> None:
        """Newcomers join, who was served is charged, who starves goes up."""
        jobs, now_s = self._jobs, self._now_s
        for seq in waiting:
            if seq.arrival not in jobs:
                self._job(seq)
        token_s, prompt_s = self.token_s, self.prompt_s
        for seq in running:
            job = jobs.get(seq.arrival) or self._job(seq)
            prompt_len = seq.prompt_len
            served = token_s * (len(seq.token_ids) - prompt_len)
            served += prompt_s * (min(seq.num_computed, prompt_len) - seq.first_cached)
            if served > job.served:
                job.served, job.since_s = served, now_s
                if served >= job.until:
                    self._enter(job, min(job.level + 1, MOST_LEVELS - 1))
        if now_s >= self._look_s:
            self._look_s = now_s + self.starvation_s / LOOKS
            self._raise([*running, *waiting])
        self._running, self._heads = running, self._first(waiting)

    def _raise(self, everybody: Iterable[Sequence]) -> None:
        """Who starves goes up, whoever has waited longest first; jobs that have ended are forgotten."""
        jobs = self._jobs
        live = {seq.arrival: seq for seq in everybody}
        self._jobs = {arrival: jobs[arrival] for arrival in live}
        starved = [
            (job.since_s, job.rank, arrival)
            for arrival, job in self._jobs.items()
            if job.level and self._now_s - job.since_s >= self.starvation_s
        ]
        for _, _, late in sorted(starved):
            job = self._jobs[late]
            self._enter(job, 0, self._prefill_s(live[late]), at_head=True)
            job.since_s = self._now_s

    def _first(self, waiting: Seq[Sequence]) -> list[Sequence]:
        return nsmallest(WINDOW, waiting, key=self._rank)

    # -- a step ----------------------------------------------------------------------------------------------------

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """The first `batch` jobs, decodes ahead of prompts; then the others, in case some of those cannot run."""
        heads = self._first(waiting) if self._heads is None else self._heads
        self._heads = None
        ranked = sorted([*running, *heads], key=self._rank)
        due, others = self._due(ranked)
        decodes = [s for s in due if s.num_computed > 0 and len(s.token_ids) - s.num_computed == 1]
        if len(decodes) < len(due):
            decodes += [s for s in due if not s.is_decoding]
        return decodes + others

    def _due(self, ranked: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """(those that should run, the others)."""
        if not 0 < self.max_rows < len(ranked):
            return ranked, []
        due: list[Sequence] = []
        others: list[Sequence] = []
        for seq in ranked:
            (others if seq.held or len(due) == self.max_rows else due).append(seq)
        return due, others

    def outranks(self, seq: Sequence, other: Sequence) -> bool:
        return (self._rank(seq), seq.index) < (self._rank(other), other.index)

    def victim(self, running: Seq[Sequence], needy: Sequence) -> Sequence | None:
        """Who comes last, if that is behind `needy`."""
        last = self._last(running, needy)
        return last if last is not None and self.outranks(needy, last) else None

    def _last(self, running: Seq[Sequence], but: Sequence) -> Sequence | None:
        """Of those who have memory to give up, and on whom no step in flight works, who comes last."""
        for seq in sorted(running, key=self._rank, reverse=True):
            if seq is not but and seq.num_inflight == 0 and seq.tables and seq.status is Status.RUNNING:
                return seq
        return None

    def claims(self, waiting: Seq[Sequence]) -> Seq[Sequence]:
        """Those who should run in this step, and stand above somebody who has memory."""
        lowest = max((self.level(seq) for seq in self._running), default=0)
        heads = [s for s in self._heads or () if self.level(s) < lowest and not s.held]
        if heads and self.max_rows:
            due, _ = self._due(sorted([*self._running, *heads], key=self._rank))
            heads = [s for s in due if s.status is Status.WAITING]
        return heads

    def displaced(self, running: Seq[Sequence], newcomer: Sequence) -> Sequence | None:
        """Who comes last, if that is in a lower level than `newcomer`: within a level nobody yields."""
        last = self._last(running, newcomer)
        return last if last is not None and self.level(last) > self.level(newcomer) else None

    def next_run_s(self, seqs: Seq[Sequence]) -> list[float]:
        """Estimated seconds until each of those that do not run now will: until it would starve, or until the quanta
        of everybody in the levels above are used up, whichever is sooner (section 4.2)."""
        above = Counter(job.level for job in self._jobs.values())
        busy_s, total_s = [0.0], 0.0
        for level, quantum_s in enumerate(self._quanta):
            total_s += above[level] * quantum_s / (self.max_rows or 1)
            busy_s.append(total_s)
        found = []
        for seq in seqs:
            job = self._job(seq)
            starves_s = self.starvation_s - (self._now_s - job.since_s) if job.level else 0.0
            found.append(max(0.0, min(busy_s[job.level], starves_s)))
        return found
