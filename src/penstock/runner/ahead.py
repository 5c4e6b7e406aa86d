"""A rank on a device: a step is started before the tokens of the step before are on the host.

At depth 2, step n + 1 is planned and given to the device while step n runs there. Its promised tokens are taken from
where step n leaves them; here they have a stand-in until step n is read, which is all that the host waits for. A step's
states, in order: queued; planned; running (the model was started); choosing (its tokens, too); read. A step

  - is planned and runs once the step before is choosing, or read: only then is that step's token somewhere, and its
    logits have been made use of. So at most two run.
  - chooses with that, unless processors or a grammar follow one of its rows: they must be told the tokens of the step
    before, so it chooses once that is read. The device runs the model meanwhile.
  - waits for its turn and is settled as without a device (`Runner.settle`) if somebody wants hidden states, candidates
    for beams, or logprobs of several samples at once.

A row whose promised token does not come (it failed, or it is complete) has run on some token by then, into memory that
is its own until the step retires. Its result is dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.protocols import Drafter
from penstock.model.forward import Forward, TakingForward
from penstock.ops.plan import Taken
from penstock.runner.device_sampler import DeviceSampler, Started
from penstock.runner.runner import NO_STATES, Planned, Runner
from penstock.runner.sampler import Sampler


class Pending(msgspec.Struct, eq=False):
    """A step in flight.

    Attributes:
        output: once it is planned: as it runs.
        planned: None, too, for a step in which nothing runs.
        logits: on the device. `started`: the tokens, there as well.
        late: sequences whose promised token the host has not read; `void`: those of them for which none came.
    """

    output: SchedulerOutput
    start_s: float
    is_planned: bool = False
    planned: Planned | None = None
    moves: dict[int, bool] = {}
    logits: Any = None
    started: Started | None = None
    late: list[int] = []
    void: set[int] = set()

    @property
    def chooses(self) -> bool:
        """Whether its tokens will be somewhere without anybody's doing."""
        return self.started is not None or (self.is_planned and self.planned is None)

    def rows(self) -> dict[int, int]:
        """The row of `started.draws.tokens` with the one token of each sequence."""
        return {} if self.started is None else {p.seq_id: p.row for p in self.started.picks if p.num_samples == 1}


class AheadRunner(Runner):
    """See `Runner` and `executor.rank.AheadRank`. For models and samplers that `can_run_ahead` takes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        assert isinstance(self._resident, TakingForward), "its logits must stay on the device"
        assert isinstance(self.sampler, DeviceSampler), "its sampler must not look at logits"
        assert self._promises is not None, "only with two steps in flight"
        self._taking, self._starting, self._known = self._resident, self.sampler, self._promises
        self._flight: deque[Pending] = deque()
        self._read_s = 0.0

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """`launch` and `finish`."""
        return self.finish(self.launch(output))

    def launch(self, output: SchedulerOutput) -> Pending:
        """Start a step as far as that can be done without waiting. Mutates: rows, processors, storage."""
        pending = Pending(output, self._clock.now())
        self._flight.append(pending)
        self._go_on()
        return pending

    def ready(self, pending: Pending) -> bool:
        """Whether nothing is gained by doing something else before `finish`."""
        return pending.started is None or pending.started.draws.ready()

    def finish(self, pending: Pending) -> StepOutput:
        """Wait for the oldest step, and start what waited for it.

        Units: `duration_s` is seconds since it was launched, or since the step before was read, whichever came later.
        Mutates: as `Runner.execute`.
        """
        assert pending is self._flight[0], "steps are read in order"
        self._go_on()
        result = self._result(pending)
        if pending.void:
            result = _without(result, pending.void)
        now_s = self._clock.now()
        duration_s, self._read_s = now_s - max(pending.start_s, self._read_s), now_s
        result = msgspec.structs.replace(result, duration_s=duration_s)
        self._flight.popleft()
        self._known.settled(result)
        if self._flight and self._flight[0].late:
            self._flight[0].void = self._known.read(self._flight[0].late)
        self._go_on()
        return self.with_late(result)

    # -- one step after the other ----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Start what can be started."""
        before: Pending | None = None
        for pending in list(self._flight)[:2]:
            if not pending.is_planned and (before is None or before.chooses):
                self._run(pending, before)
            if pending.started is None and pending.logits is not None and self._may_choose(pending, before):
                assert pending.planned is not None, "it has logits"
                self.spoil_first(pending.output, pending.logits)
                pending.started = self._starting.start(pending.logits, pending.planned.picks)
            before = pending

    def _run(self, pending: Pending, before: Pending | None) -> None:
        """Plan the step, and start the model where its logits are all that is wanted."""
        rows = {} if before is None else before.rows()
        pending.output, pending.planned = self.plan(pending.output, rows)
        pending.late, self._known.late = self._known.late, []
        pending.is_planned, pending.moves = True, self._moves
        planned = pending.planned
        if planned is None:
            return
        if pending.late:
            assert before is not None, "it was read"
            assert before.started is not None, "their tokens are there"
            late = set(pending.late)
            at = [b for b, job in enumerate(pending.output.scheduled) if job.seq_id in late]
            sources = [rows[pending.output.scheduled[b].seq_id] for b in at]
            taken = Taken(before.started.draws.tokens, np.array(sources, np.int32), planned.step.query_start_loc[at])
            planned.step = replace(planned.step, taken=taken)
        if not planned.hidden.size:
            pending.logits = self._taking.run_resident(planned.step, self.storage.planes)

    def _may_choose(self, pending: Pending, before: Pending | None) -> bool:
        assert pending.planned is not None, "it has logits"
        picks = pending.planned.picks
        if not self._starting.starts(picks):
            return False
        return before is None or not self.sampler.chain.follows_any([pick.seq_id for pick in picks])

    def _result(self, pending: Pending) -> StepOutput:
        self._moves = pending.moves
        planned, output = pending.planned, pending.output
        if planned is None:
            return StepOutput(output.step, moves=pending.moves)
        if pending.started is None:
            found, hidden = (pending.logits, NO_STATES) if pending.logits is not None else self.forward(planned)
            return self.settle(output, planned, found, hidden, pending.start_s)
        chosen = self._starting.read(pending.started)
        counts = None if self.grammars is None else self.grammars.counts()
        return StepOutput(
            output.step, chosen.sampled, chosen.prompt_logprobs, chosen.errors, ended=list(chosen.ended),
            grammars=counts, moves=pending.moves,
        )  # fmt: skip


def can_run_ahead(
    depth: int, forward: Forward, sampler: Sampler, *, drafter: Drafter | None, verifier: Any, selections: Any
) -> bool:
    """Drafts, and what rows keep, depend on results of the step before."""
    if depth < 2 or drafter is not None or verifier is not None or selections is not None:
        return False
    return isinstance(forward, TakingForward) and isinstance(sampler, DeviceSampler)


def _without(result: StepOutput, void: set[int]) -> StepOutput:
    """The result without these sequences."""
    return msgspec.structs.replace(
        result,
        sampled=[s for s in result.sampled if s.seq_id not in void],
        errors=[e for e in result.errors if e.seq_id not in void],
        ended=[seq_id for seq_id in result.ended if seq_id not in void],
    )
