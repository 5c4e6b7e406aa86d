"""What comes in takes effect: requests become sequences, aborts end them, orders change them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.base.errors import InputError
from penstock.core.events import PoolGrowth
from penstock.core.request import Abort, Control, Request, Resume
from penstock.core.sequence import Status
from penstock.engine.group import Group

if TYPE_CHECKING:
    from penstock.engine.core import EngineCore


class Entry:
    """A part of `EngineCore`: what its intake does to its sequences. Mutates: those, the groups and the queues."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._next_arrival = 0

    def check(self, request: Request) -> None:
        """Raises InputError if its id is in use, or if it cannot have come as far as it says."""
        core, name = self._core, request.request_id
        if (name in core.groups or name in core.pending_ids) and name not in core.leaving_ids:
            raise InputError(f"request id {name!r} is already in use", param="request_id")
        if request.resume is not None:
            request.resume.check(request)

    def request(self, request: Request) -> None:
        core = self._core
        core.pending_ids.discard(request.request_id)
        arrival, self._next_arrival = self._next_arrival, self._next_arrival + 1
        resume = request.resume
        if resume is not None and resume.samples[0][1]:
            self._resumed(request, resume, arrival)
            return
        leader = self._core.new_sequence(request, arrival, 0)
        group = self._core.groups[request.request_id] = Group(request, arrival, leader)
        if resume is not None:
            leader.prompt_logprobs_done = resume.num_prompt_logprobs
            group.cancelled = set(range(request.n)) - {index for index, _ in resume.samples}
        self._core.scheduler.add(leader)

    def _resumed(self, request: Request, resume: Resume, arrival: int) -> None:
        """Its samples are forked already. Each catches up on its own; the prefix cache keeps that cheap."""
        sequences = [self._core.new_sequence(request, arrival, index) for index, _ in resume.samples]
        group = self._core.groups[request.request_id] = Group(request, arrival, sequences[0])
        group.forked = True
        for seq, (index, token_ids) in zip(sequences, resume.samples, strict=True):
            seq.token_ids.extend(token_ids)
            seq.prompt_logprobs_done = resume.num_prompt_logprobs
            group.live[index] = seq
            self._core.scheduler.add(seq)

    def abort(self, abort: Abort) -> None:
        if abort.index is None:
            self._core.leaving_ids.discard(abort.request_id)
        group = self._core.groups.get(abort.request_id)
        if group is None:
            return  # it ended in the meantime: nothing is owed
        if abort.index is None or group.request.beam is not None:
            self._core.commit.abort_group(group, abort.reason)
        elif not group.forked:
            self._core.commit.cancel(group, abort.index, abort.reason)
        elif abort.index in group.live:
            self._core.commit.finish(group, group.live[abort.index], abort.reason, None, aborted=True)

    def growth(self, growth: PoolGrowth) -> None:
        """There is more memory for KV, or less than was needed."""
        core, backing = self._core, self._core.kv.backing
        core.stats.num_kv_refusals += growth.is_short and not growth.at_rest
        core.stats.num_kv_growths += sum(growth.num_slabs) > sum(backing.num_slabs)
        backing.apply(growth)
        if core.grower is not None:
            core.grower.follow(backing)

    def control(self, control: Control) -> None:
        if control.kind == "reset_prefix_cache":
            self._core.kv.reset_prefix_cache()
            return
        group = self._core.groups.get(control.request_id)
        if group is None:
            return
        for index, seq in list(group.live.items()):
            if control.index is not None and index != control.index:
                continue
            if control.kind == "preempt":
                if seq.status is not Status.WAITING:
                    self._core.scheduler.preempt(seq)
            elif control.kind == "taint":
                if seq.taint_start is None:
                    seq.taint_start = seq.num_computed
            elif seq.status is Status.RUNNING and seq.num_inflight == 0:
                for g in range(len(seq.tables)):
                    self._core.kv.make_ragged(seq, g)
