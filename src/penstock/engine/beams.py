"""The beams of a request at commit: sequences are forked and dropped as their hypotheses win and lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.core.output import EngineOutput
from penstock.core.sequence import Sequence
from penstock.engine import beam as beam_search

if TYPE_CHECKING:
    from penstock.core.request import Request
    from penstock.engine.group import SequenceGroup
    from penstock.sched.scheduler import Scheduler


class Beams:
    """Part of `commit.Commit`, with its parts. Mutates: sequences, groups, queues; appends to `emitted`."""

    def __init__(
        self,
        scheduler: Scheduler,
        groups: dict[str, SequenceGroup],
        sequences: dict[int, Sequence],
        new_sequence: Callable[[Request, int, int], Sequence],
        emitted: list[EngineOutput],
    ) -> None:
        self.scheduler = scheduler
        self.groups = groups
        self.sequences = sequences
        self.new_sequence = new_sequence
        self.emitted = emitted
        self.stats = scheduler.stats

    def advance(self, group: SequenceGroup) -> None:
        """All beams have their candidates: pick the next ones, fork and drop sequences accordingly."""
        request = group.request
        params = request.beam
        assert params is not None
        beams = sorted(group.live.values(), key=lambda s: (-s.cumulative_logprob, s.index))
        picked = beam_search.advance(
            [s.cumulative_logprob for s in beams],
            [group.candidates[s.seq_id] for s in beams],
            params.beam_width,
            frozenset(request.eos_token_ids),
        )
        group.candidates.clear()
        for c in picked.ended:
            generated = beams[c.parent].token_ids[beams[c.parent].prompt_len :].tolist()
            group.completed.append(([*generated, c.token_id], c.cum_logprob, "stop"))
        self._reassign(group, beams, picked.going_on)
        done = [s for s in group.live.values() if s.num_generated >= request.max_tokens]
        if not group.live or done:
            self._finish(group)

    def _reassign(self, group: SequenceGroup, beams: list[Sequence], going_on: list[beam_search.Continuation]) -> None:
        """A beam's first continuation stays on its own sequence; further ones fork it before it changes."""
        first: dict[int, beam_search.Continuation] = {}
        forks: list[beam_search.Continuation] = []
        for c in going_on:
            if c.parent in first:
                forks.append(c)
            else:
                first[c.parent] = c
        grown: list[tuple[Sequence, beam_search.Continuation]] = []
        for c in forks:
            parent = beams[c.parent]
            child = self.new_sequence(group.request, group.arrival, group.next_index)
            group.next_index += 1
            child.token_ids = parent.token_ids[:]
            group.live[child.index] = child
            self.scheduler.fork(parent, child)
            grown.append((child, c))
        for number, seq in enumerate(beams):
            if number in first:
                grown.append((seq, first[number]))
            else:
                self.scheduler.remove(seq)
                del self.sequences[seq.seq_id]
                del group.live[seq.index]
        for seq, c in grown:
            seq.held = False
            seq.token_ids.append(c.token_id)
            seq.cumulative_logprob = c.cum_logprob
            self.scheduler.appended(seq, [c.token_id])
            self.stats.num_sampled_tokens += 1

    def _finish(self, group: SequenceGroup) -> None:
        request = group.request
        params = request.beam
        assert params is not None
        ranked = sorted(group.live.values(), key=lambda s: (-s.cumulative_logprob, s.index))
        hypotheses = group.completed + [
            (s.token_ids[s.prompt_len :].tolist(), s.cumulative_logprob, "length") for s in ranked
        ]
        prompt_len = len(request.prompt_token_ids)

        def score(h: tuple[list[int], float, str]) -> float:
            return beam_search.final_score(h[1], prompt_len + len(h[0]), h[2] == "stop", params.length_penalty)

        best = sorted(hypotheses, key=lambda h: -score(h))[: params.beam_width]
        for seq in list(group.live.values()):
            self.scheduler.remove(seq)
            del self.sequences[seq.seq_id]
        group.live.clear()
        del self.groups[request.request_id]
        self.stats.num_finished += 1
        self.emitted.append(EngineOutput(request_id=request.request_id, index=0, finish_reason=best[0][2], beams=best))
