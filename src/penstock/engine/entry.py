"""What comes in takes effect: requests become sequences, aborts end them, orders change them."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from penstock.base.errors import InputError
from penstock.core.events import MachineNews, Move, PoolGrowth, StoreNews
from penstock.core.output import EngineOutput
from penstock.core.request import FENCED, Abort, Control, Intake, Request, Resume
from penstock.core.sequence import Sequence, Status
from penstock.engine.group import SequenceGroup
from penstock.engine.swapping import Swapping
from penstock.sched.knobs import Knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.core.protocols import Executor
    from penstock.engine.commit import Commit
    from penstock.engine.grower import Grower
    from penstock.sched.controller import Controller

CONTROL_KINDS = (
    "preempt", "ragged", "taint", "reset_prefix_cache", "evict_prefix_cache", "resume", "pause", "sleep", "weights",
    "hold", "go_on", "freeze", "thaw", "fence",
)  # fmt: skip
MOVES_KEPT = 64
_LOG = logging.getLogger("penstock")


class Entry:
    """A part of `EngineCore`: what its intake does to its sequences. Mutates: those, the groups and the queues."""

    def __init__(
        self, commit: Commit, new_sequence: Callable[[Request, int, int], Sequence], executor: Executor,
        inflight: Collection[Any],
    ) -> None:  # fmt: skip
        self._commit = commit
        self._scheduler, self._kv, self._groups = commit.scheduler, commit.kv, commit.groups
        self._new_sequence = new_sequence
        self._pending_ids: set[str] = set()
        self._leaving_ids: set[str] = set()
        """Live requests whose abort is queued: their ids are free for what is queued behind it."""
        self._next_arrival = 0
        self._prefetches: list[Sequence] = []
        self.swapping = Swapping(commit, executor, inflight)
        self.knobs = Knobs(commit.scheduler)
        self.moves: deque[tuple[float, Move]] = deque(maxlen=MOVES_KEPT)
        """The last moves of knobs, and when they were made on the engine's clock."""

    def queued(self, item: Intake | MachineNews) -> None:
        """It is about to be queued. Raises InputError if a request's id is in use or it cannot have come as far as it
        says, or if an order is unknown."""
        if isinstance(item, Request):
            name = item.request_id
            if (name in self._groups or name in self._pending_ids) and name not in self._leaving_ids:
                raise InputError(f"request id {name!r} is already in use", param="request_id")
            if item.resume is not None:
                item.resume.check(item)
            if item.calls:
                item.check_calls()
            self._leaving_ids.discard(name)
            self._pending_ids.add(name)
        elif isinstance(item, Abort):
            if item.index is None and (item.request_id in self._groups or item.request_id in self._pending_ids):
                self._leaving_ids.add(item.request_id)
        elif isinstance(item, Control):
            if item.kind not in CONTROL_KINDS:
                raise InputError(
                    f"unknown control order {item.kind!r}; known: {', '.join(CONTROL_KINDS)}", param="kind"
                )
            if item.kind == "weights" and (item.weights is None or item.weights.facts is None):
                raise InputError("no rank has read these weights" if item.weights is None else item.weights.problem)

    def request(self, request: Request) -> None:
        self._pending_ids.discard(request.request_id)
        arrival, self._next_arrival = self._next_arrival, self._next_arrival + 1
        resume = request.resume
        if resume is not None and resume.samples[0][1]:
            self._resumed(request, resume, arrival)
            return
        leader = self._new_sequence(request, arrival, 0)
        group = self._groups[request.request_id] = SequenceGroup(request, arrival, leader)
        if resume is not None:
            leader.prompt_logprobs_done = resume.num_prompt_logprobs
            group.cancelled = set(range(request.n)) - {index for index, _ in resume.samples}
        self.swapping.enter(leader)
        if request.prefetches:
            self._prefetches.append(leader)

    def settle(self) -> None:
        """All of the intake has been taken."""
        self._end_prefetches()
        if self.swapping.order is not None:
            self.swapping.settle()

    def _end_prefetches(self) -> None:
        """Requests that only bring blocks end when these are there, or are not to be had, or had to go again."""
        for seq in list(self._prefetches):
            group = self._groups.get(seq.request.request_id)
            waits = not seq.held or seq.status is Status.LOADING
            if group is not None and group.live.get(0) is seq and waits:
                continue
            self._prefetches.remove(seq)
            if group is not None and group.live.get(0) is seq:
                if seq.status is Status.RUNNING:
                    self._kv.commit(seq)
                seq.first_cached = seq.num_computed
                self._commit.finish(group, seq, "stop", None)

    def _resumed(self, request: Request, resume: Resume, arrival: int) -> None:
        """Its samples are forked already. Each catches up on its own; the prefix cache keeps that cheap."""
        sequences = [self._new_sequence(request, arrival, index) for index, _ in resume.samples]
        group = self._groups[request.request_id] = SequenceGroup(request, arrival, sequences[0])
        group.forked = True
        for seq, (index, token_ids) in zip(sequences, resume.samples, strict=True):
            seq.token_ids.extend(token_ids)
            seq.prompt_logprobs_done = resume.num_prompt_logprobs
            group.live[index] = seq
            self._scheduler.add(seq)

    def abort(self, abort: Abort) -> None:
        if abort.index is None:
            self._leaving_ids.discard(abort.request_id)
        group = self._groups.get(abort.request_id)
        if group is None:
            return  # it ended in the meantime: nothing is owed
        self.swapping.leaves(group.live.values())
        if abort.index is None or group.request.beam is not None:
            self._commit.abort_group(group, abort.reason)
        elif not group.forked:
            self._commit.cancel(group, abort.index, abort.reason)
        elif abort.index in group.live:
            self._commit.finish(group, group.live[abort.index], abort.reason, None, aborted=True)

    def growth(self, growth: PoolGrowth) -> None:
        """There is more memory for KV, or less than was needed."""
        backing, stats = self._kv.backing, self._commit.stats
        stats.num_kv_refusals += growth.is_short and not growth.at_rest
        stats.num_kv_growths += sum(growth.num_slabs) > sum(backing.num_slabs)
        backing.apply(growth)

    def unasked(
        self, controller: Controller | None, store_news: Callable[[float], list[StoreNews]] | None,
        grower: Grower | None, now_s: float,
    ) -> list[MachineNews]:  # fmt: skip
        """What nobody has sent and the next step takes in first; in a replay, where the log has it, nothing."""
        found: list[MachineNews] = []
        if controller is not None:
            found += controller.look(now_s)
        if store_news is not None:
            found += store_news(now_s)
        if grower is not None:
            found += grower.look(self._kv.backing, self._scheduler.wake_s is not None, now_s)
        return found

    def news(self, news: StoreNews | Move, now_s: float) -> None:
        """Others have changed what the store of blocks holds, or a knob gets another value."""
        if isinstance(news, Move):
            self._move(news, now_s)
        elif self._kv.stored is not None:
            self._kv.stored.heard(news)

    def _move(self, move: Move, now_s: float) -> None:
        self.knobs.set(move.name, move.value)
        self.moves.append((now_s, move))
        self._commit.stats.num_moves += 1
        _LOG.info("adaptive: %s: %s, was %s: %s", move.name, move.value, move.was, move.why)

    def control(self, control: Control) -> None:
        if control.kind == "reset_prefix_cache":
            self._kv.reset_prefix_cache()
            return
        if control.kind == "fence":  # what was told before it has taken effect, and whoever asked may know
            fence = EngineOutput(request_id=control.request_id, index=0, finish_reason=FENCED)
            self._commit.emitted.append(fence)
            return
        if control.kind == "sleep":
            self._kv.reset_prefix_cache()
            if self._kv.adapters is not None:
                self._kv.adapters.give_up_all()
            self._kv.backing.gives_all = True
            return
        if control.kind == "evict_prefix_cache":
            self._kv.hints.evict(control.label, control.age_s)
            return
        if control.kind in ("freeze", "thaw"):
            self.knobs.frozen = control.kind == "freeze"
            return
        if control.kind == "pause":
            self._scheduler.pauses.between(control.namespace, control.token_ids, control.expected_s)
            return
        if control.kind == "weights":
            self.swapping.swap(control)
            return
        if control.kind in ("hold", "go_on"):
            if control.kind == "hold":
                self.swapping.hold(control.label)
            else:
                self.swapping.go_on()
            return
        group = self._groups.get(control.request_id)
        if group is None:
            return
        for index, seq in list(group.live.items()):
            if control.index is not None and index != control.index:
                continue
            if control.kind == "resume":
                self._scheduler.pauses.end(seq, control.token_ids)
            elif control.kind == "preempt":
                if seq.status is not Status.WAITING:
                    self._scheduler.preempt(seq)
            elif control.kind == "taint":
                if seq.taint_start is None:
                    seq.taint_start = seq.num_computed
            elif seq.status is Status.RUNNING and seq.num_inflight == 0:
                for g in range(len(seq.tables)):
                    self._kv.make_ragged(seq, g)
