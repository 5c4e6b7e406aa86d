"""Inference with reference: where the output has begun to copy a reference text, draft that it goes on copying.

The reference is the request's own (`TokenRules.reference`: OpenAI's `prediction`) or else the prompt: summaries,
answers from retrieved documents and edited code repeat it in long spans.

Source: Yang et al., LLMA, arXiv 2304.04487, section 3. There a span is copied from the first match of n tokens; here
from the longest one, and among equals from the one nearest behind what was copied last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.draft import NO_DRAFT, DraftJob, DraftTree, Outcome, chain
from penstock.drafters.bench import DraftBench
from penstock.drafters.matches import I32, ends_of
from penstock.drafters.per_row import PerRow

LONGEST = 16
"""Tokens of output that are compared with the reference: enough to tell repetitions in it apart."""


@dataclass
class _Copying:
    reference: I32
    place: int = 0
    """What of the reference has been copied ends here."""


class ReferenceDrafter(PerRow[_Copying]):
    """`least`: tokens of output that must be found in the reference."""

    name = "reference"

    def __init__(self, *, least: int = 1) -> None:
        super().__init__()
        self._least = least

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [self._copy(job) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """What was accepted is found in the reference in the next step."""

    def _copy(self, job: DraftJob) -> DraftTree:
        state = self.states.get(job.seq_id)
        if state is None:
            given = job.rules.reference
            reference = np.array(given, np.int32) if given else job.tokens[: job.prompt_len].copy()
            state = self.states[job.seq_id] = _Copying(reference)
        output = job.tokens[job.prompt_len :][-LONGEST:]
        ends, _ = ends_of(state.reference, output, self._least, LONGEST)
        if not ends.size:
            return NO_DRAFT
        ahead = int(np.searchsorted(ends, state.place))
        place = state.place = int(ends[ahead if ahead < ends.size else -1])
        return chain(state.reference[place : place + min(job.num_nodes, job.max_depth)].tolist())


def make(bench: DraftBench) -> ReferenceDrafter:
    return ReferenceDrafter(least=bench.config.prompt_lookup_min)
