"""What the sampler asks of who draws tokens for all rows of a step at once: each backend's own (`Backend.draws`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


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


class AskedDraw(NamedTuple):
    """What `DrawRows.ask` takes."""

    row: int
    scale: float
    min_p: float
    top_k: int
    top_p: float
    seed: int
    sample_index: int
    position: int
    num_tokens: int


class Likely(NamedTuple):
    """The rank of `token` in row `row` is wanted (-1: of what it chooses), and so many of the likeliest tokens; or,
    in their place, `ids`."""

    row: int
    num_top: int
    token: int = -1
    ids: Sequence[int] = ()


class DrawnRows(NamedTuple):
    """What a step's draws came to.

    Attributes:
        best, peaks: the first largest of each row of the final logits [R], and its logit.
        healthy: which rows of the raw logits hold neither a NaN nor an infinity that is no exclusion [R].
        tokens: what was drawn, in the order of the draws.
        ranked: of each `Likely`, in raw logits: `Ranked` of the token, its logit, and those of `top_ids`.
    """

    best: list[int]
    healthy: list[bool]
    peaks: list[float]
    tokens: list[list[int]]
    ranked: list[tuple[Ranked, float, list[float]]]


class StartedDraws(Protocol):
    """Draws that a device was told to make. `tokens` [R]: of each row the token it chooses, the first if it draws
    several, on the device; of sick rows it is some token of the vocabulary."""

    tokens: Any

    def ready(self) -> bool:
        """Whether `read` need not wait."""
        ...

    def read(self) -> DrawnRows: ...


@runtime_checkable
class StartingKernel(DrawKernel, Protocol):
    """A kernel on a device that works while the host goes on."""

    def start(self, raw: Any, final: Any, asked: Sequence[AskedDraw], likely: Sequence[Likely]) -> StartedDraws:
        """Chooses from `final` [R, V]: the logits `raw` [R, V] themselves, or what the processors made of them."""
        ...
