"""What the sampler asks of who draws tokens for all rows of a step at once: each backend's own (`Backend.draws`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class Ranked(NamedTuple):
    """What `DrawKernel.logprobs` tells of a row: the largest logit, the sum of the weights in units of 2^-42, the ranks
    of the tokens asked for, and the ids of the likeliest."""

    peak: float
    total: int
    ranks: list[int]
    top_ids: list[int]


class DrawRows(Protocol):
    """The rows of a step. `point`, then `ask` for those that draw, then `run`; results are valid until the next."""

    def point(self, logits: Any) -> None:
        """Rows of the next run: [R, V], alive until then."""
        ...

    def ask(
        self, r: int, scale: float, min_p: float, top_k: int, top_p: float, seed: int, sample_index: int, position: int,
        num_tokens: int,
    ) -> None:  # fmt: skip
        """Row `r` draws. `scale`: log2(e) / temperature."""
        ...

    def run(self, num_rows: int) -> tuple[list[int], list[int]]:
        """(the first largest of each row, 1 for each healthy row)."""
        ...

    def tokens(self) -> list[list[int]]:
        """What was drawn, in the order of `ask`."""
        ...

    def peak(self, r: int) -> float:
        """The largest logit of row `r`."""
        ...


class DrawKernel(Protocol):
    """Draws by the definition of `ops.draw_weights`: the same tokens, whoever draws."""

    def rows(self) -> DrawRows: ...

    def logprobs(self, jobs: Sequence[tuple[Any, Sequence[int], int]]) -> list[Ranked]:
        """One row each: (healthy logits [V], tokens whose ranks are wanted, how many of the likeliest)."""
        ...
