"""The one thing the runner wants of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.core.cache_spec import CacheGroup
from penstock.ops.adapter_units import UnitMemory
from penstock.ops.adapters import LowRank
from penstock.ops.plan import Planes, StepPlan


class Forward(Protocol):
    """Runs a planned step: writes the new tokens' cache entries and computes the logits that were asked for.

    Shapes: `planes[g]` holds the planes of cache group g; the result is float32 [R, V], row r for
    `plan.logits_indices[r]`. The result may live in the model's own arena: it is read before the next call and never
    written to.
    Mutates: `planes`, at the pages of the plan's tables only.
    """

    def run(self, plan: StepPlan, planes: Sequence[Planes]) -> npt.NDArray[np.float32]: ...


@runtime_checkable
class GreedyForward(Forward, Protocol):
    """A model that finds the largest logits by itself, while they are warm and its threads awake."""

    def run_greedy(self, plan: StepPlan, planes: Sequence[Planes]) -> list[int] | npt.NDArray[np.float32]:
        """`run`, and the first largest of each row of logits; the logits themselves if one of them is not finite."""
        ...


@runtime_checkable
class ResidentForward(Forward, Protocol):
    """A model whose logits can stay where they are, for a sampler that draws there."""

    def run_resident(self, plan: StepPlan, planes: Sequence[Planes]) -> Any:
        """`run`, whose result has an array's indices and is read before the next call."""
        ...


@runtime_checkable
class TakingForward(ResidentForward, Protocol):
    """A model on a device that goes on by itself: `run_resident` waits for nothing, and takes token ids that the host
    does not know from where they are (`StepPlan.taken`)."""

    takes_tokens: bool


@runtime_checkable
class PoolingForward(Forward, Protocol):
    """A model that also gives hidden states."""

    def run_pooling(
        self, plan: StepPlan, planes: Sequence[Planes]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Logits [R, V], and the hidden states [P, E] of `plan.hidden_indices` behind the final norm."""
        ...


@runtime_checkable
class HeadForward(PoolingForward, Protocol):
    """A model whose output matrix can be used by itself."""

    def run_head(self, hidden: npt.NDArray[np.float32], planes: Sequence[Planes]) -> npt.NDArray[np.float32]:
        """Logits [R, V] of hidden states [R, E] behind the final norm; as `run`, but nothing is cached."""
        ...


@runtime_checkable
class TableForward(Forward, Protocol):
    """A model whose table of embeddings lies where whoever changes it cannot write."""

    def put_rows(self, first: int, rows: npt.NDArray[np.float32]) -> None:
        """From row `first` on the table `embed` holds `rows` [n, W], for the runs that follow. Mutates: self."""
        ...


@runtime_checkable
class WatchedForward(Forward, Protocol):
    """A model that shows how it gets on while it runs."""

    def watch(self, progress: int) -> None:
        """From now on, add one for each finished operation to the 64-bit word at this address, which outlives it."""
        ...


@runtime_checkable
class LayeredForward(Forward, Protocol):
    """A model that can pause between its layers."""

    num_layers: int

    def pause(self, call: Callable[[int], None] | None) -> None:
        """From now on `call(n)` is called before layer n of every run, and `call(num_layers)` behind the last; None:
        nobody is. What it raises ends the run."""
        ...


@runtime_checkable
class AdaptingForward(Forward, Protocol):
    """A model whose steps may have adapters (`StepPlan.adapters`), by number: see `ops.adapters.AdapterTable`."""

    def prepare(self, parts: Mapping[str, LowRank]) -> Any: ...

    def put(self, number: int, prepared: Any) -> None: ...

    def drop(self, number: int) -> None: ...


@runtime_checkable
class PlacingForward(AdaptingForward, Protocol):
    """One whose adapters may lie in memory of somebody else's."""

    def lay(self, prepared: Any, memory: UnitMemory) -> Any:
        """What `prepare` gave with its numbers in `memory`, but those of codes. In any thread.

        Raises: EngineError if there is too little room."""
        ...


@runtime_checkable
class MergingForward(AdaptingForward, Protocol):
    """One that can hold its weights once more, with an adapter in them."""

    merges: bool
    """Whether they are numbers that sums go into without being rounded to 16 bits."""

    def merge(self, number: int, parts: Mapping[str, LowRank]) -> None:
        """Steps in which everybody has adapter `number`, which is `parts`, run on weights with it in them, until it is
        dropped; -1: none do."""
        ...


@runtime_checkable
class ObservedForward(Forward, Protocol):
    """A model that was built to show its queries (`model.builder.build`, `observe`)."""

    def queries(self, num_tokens: int) -> Sequence[npt.NDArray[np.float32]]:
        """Of the step that ran last, which had T = `num_tokens`: [T, H, D] of each attention layer, rotated."""
        ...


@runtime_checkable
class ChoosingForward(Forward, Protocol):
    """A model that counts what its rehearsals choose (`core.selection.TokenReads`)."""

    @property
    def tokens_read(self) -> tuple[int, int]:
        """Since it was made, over layers and kv heads: tokens that were read by choice, and those that were there."""
        ...


@runtime_checkable
class StreamingForward(Forward, Protocol):
    """A model whose weights may come while it runs."""

    @property
    def weights_read(self) -> tuple[int, float] | None:
        """Bytes since it was made, and seconds for which runs have waited for them; None: they never come again."""
        ...


@runtime_checkable
class SharingForward(Forward, Protocol):
    """A model whose attention may read once what several sequences have in common."""

    @property
    def keys_read(self) -> tuple[int, int] | None:
        """Since it was made, over layers and kv heads: keys read, and how many more it would have been without that;
        None: it reads for each."""
        ...


@runtime_checkable
class ExpertForward(Forward, Protocol):
    """A model whose experts may not all be in memory."""

    @property
    def expert_counts(self) -> tuple[float, ...]:
        """Since it was made, as `core.events.EXPERT_COUNTS`; nothing where all of them are in memory."""
        ...

    def expect_rows(self, rows: Sequence[int], gone: Collection[int]) -> None:
        """The next run is of these sequences, in this order; those `gone` will not come again. For predictions only."""
        ...


class StepLimits(NamedTuple):
    """What a rank may be asked to run: rows and tokens of a step, blocks of the first groups, and trees of drafts."""

    groups: tuple[CacheGroup, ...]
    block_size: int
    max_num_seqs: int
    max_tokens: int
    trees: bool


@runtime_checkable
class WarmedForward(Forward, Protocol):
    """A model that is slow the first time."""

    def warm(self, planes: Sequence[Planes], limits: StepLimits, report: Callable[[int, int], None]) -> None:
        """Everything once, before the first step; `report` hears of (done, in all). `planes` are those of every step.

        Mutates: planes, which nobody has written to, so nobody may read them before they are zeroed.
        """
        ...

    @property
    def num_late(self) -> int:
        """Kernels that were compiled since then."""
        ...
