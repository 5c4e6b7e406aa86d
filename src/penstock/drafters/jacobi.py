"""Jacobi decoding: the model improves its own drafts. A block of tokens is drafted; what the model says behind each of
them is the next draft for the place after it, until drafts and answers agree.

`jacobi` slides its block along, always `window` wide. `gauss-seidel` finishes one block of `window` places before it
begins the next (the paper's hybrid: blocks one after the other, places of a block side by side): fewer drafts run.
Either accepts at least one token in every step, so there are never more steps than tokens.

Source: Santilli et al., arXiv 2305.10427, section 3 (algorithms 1 and 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.draft import UNKNOWN, DraftJob, DraftTree, Outcome, chain
from penstock.drafters.bench import DraftBench
from penstock.drafters.per_row import PerRow


@dataclass
class _Block:
    """`drafts[i]` is for place `known` + i, where `known` tokens are known."""

    known: int
    drafts: list[int]


class JacobiDrafter(PerRow[_Block]):
    def __init__(self, window: int, *, blocks: bool = False) -> None:
        super().__init__()
        self._window, self._blocks = window, blocks
        self.name = "gauss-seidel" if blocks else "jacobi"

    def propose(self, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        return [chain(self._block(job)[: min(job.num_nodes, job.max_depth)]) for job in jobs]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            block = self.states.get(outcome.seq_id)
            if block is not None:
                # Behind its i-th draft the model says what stands at place known + i + 1.
                answers = outcome.choices[1:]
                old = block.drafts
                new = [a if a != UNKNOWN else old[i + 1] if i + 1 < len(old) else a for i, a in enumerate(answers)]
                new += old[len(new) + 1 :]
                done = len(outcome.path)
                block.known += done + 1
                block.drafts = [token for token in new[done : self._left(len(old), done)] if token >= 0]

    def _left(self, num_drafts: int, done: int) -> int:
        """Where the improved drafts end: with the block, or one place further."""
        return max(done, num_drafts - 1) if self._blocks else num_drafts

    def _block(self, job: DraftJob) -> list[int]:
        """The drafts behind what is known now."""
        known = len(job.tokens)
        block = self.states.get(job.seq_id)
        if block is None or not block.known <= known <= block.known + len(block.drafts):
            block = self.states[job.seq_id] = _Block(known, [])
        block.drafts = block.drafts[known - block.known :]  # steps without drafts go on, too
        block.known = known
        if not self._blocks or not block.drafts:
            missing = self._window - len(block.drafts)
            if missing > 0:
                block.drafts += _filler(job, missing)
        return block.drafts


def _filler(job: DraftJob, count: int) -> list[int]:
    """Something to begin with: the text again, as if it repeated itself with a period of `count`."""
    last: list[int] = job.tokens[-count:].tolist()
    return (last * -(-count // len(last)))[:count]


def make(bench: DraftBench) -> JacobiDrafter:
    return JacobiDrafter(bench.config.window)


def make_gauss_seidel(bench: DraftBench) -> JacobiDrafter:
    return JacobiDrafter(bench.config.window, blocks=True)
