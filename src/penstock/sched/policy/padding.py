"""What padding would cost, counted: steps and batches as the rectangles that padded kernels and caches make of them.

Nothing here is padded: rows lie behind each other. This is the measure by which bucketing is judged, and what it was
for before kernels took rows of any length.
"""

from __future__ import annotations

from penstock.core.batch import SchedulerOutput


class Padding:
    """Follows an engine step by step; call `step` with each step that is submitted.

    Attributes (units: tokens):
        prompt, prompt_padded: of prompts in the batches that ran, and what they are if each batch's are padded to its
            longest. A batch is what runs between two moments at which nothing ran.
        step_prompt, step_padded: the same of pieces of prompts in each step: with chunks a piece is never longer than
            a chunk.
    """

    def __init__(self) -> None:
        self.prompt = self.prompt_padded = self.step_prompt = self.step_padded = 0
        self._prompts: dict[int, int] = {}
        self._batch: set[int] = set()

    def step(self, output: SchedulerOutput, *, new_batch: bool) -> None:
        """`new_batch`: nothing ran before this step."""
        if new_batch:
            self.end()
        for row in output.added:
            self._prompts[row.seq_id] = row.prompt_len
            self._batch.add(row.seq_id)
        pieces = [row.num_tokens for row in output.scheduled if row.start < self._prompts.get(row.seq_id, 0)]
        if pieces:
            self.step_prompt += sum(pieces)
            self.step_padded += len(pieces) * max(pieces)

    def end(self) -> None:
        """The last batch is over."""
        lengths = [self._prompts[seq_id] for seq_id in self._batch]
        if lengths:
            self.prompt += sum(lengths)
            self.prompt_padded += len(lengths) * max(lengths)
        self._batch.clear()
        self._prompts.clear()

    @property
    def share(self) -> float:
        """Of padded batches: what is padding."""
        return 1 - self.prompt / self.prompt_padded if self.prompt_padded else 0.0

    @property
    def step_share(self) -> float:
        """Of padded steps."""
        return 1 - self.step_prompt / self.step_padded if self.step_padded else 0.0
