"""What a rank is made of, as data that can be sent, and what an executor may ask of one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from penstock.base.memory import trim
from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.links import Links
from penstock.core.weight_swap import WeightFacts
from penstock.plan.resolve import Plan

if TYPE_CHECKING:
    from penstock.engine.blackbox import BlackBox

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, whole. Whoever has it and the files it names can build the rank, in any process of this machine.

    Attributes:
        config: `EngineConfig.as_kwargs()`, with `ops` decided: quantization, threads, drafter, selector and what else
            the rank does by it. Packed weights are found under a key that follows from it and the files.
        plan: with dtypes and cache groups; its decisions are left out, for they were the engine's.
        model: folder or file of the model's weights; None: they are arrays in the memory of this process.
        drafts: folder or file of each draft model of `plan.drafts`.
        rank, world_size: which of how many ranks.
        links: descriptors, in the rank's process, of the memory that ranks share.
        warm_grammars: make the tables for structured outputs at once.
        poison: KV memory starts as NaN and rows are watched (tests).
        wire: messages go through their encoded form, also where both sides are one process (tests).
    """

    config: dict[str, Any]
    plan: Plan
    model: str | None = None
    drafts: tuple[str, ...] = ()
    rank: int = 0
    world_size: int = 1
    links: Links = Links()
    warm_grammars: bool = False
    poison: bool = False
    wire: bool = False


class Rank(Protocol):
    """What an executor drives; `runner.runner.Runner` is one. `holds` and `prepare` may be called beside the steps."""

    packed_file: str
    """See `core.protocols.Executor`."""

    def execute(self, output: SchedulerOutput) -> StepOutput: ...

    def back(self, num_slabs: Sequence[int]) -> None: ...

    def holds(self, grammar: str) -> bool: ...

    def prepare(self, grammar: str, param: str) -> None: ...

    def spoil(self, step: int) -> None: ...

    def watch(self, progress: int) -> None: ...

    def ready_weights(self, path: str) -> WeightFacts:
        """See `Executor.ready_weights`."""
        ...

    def switched(self) -> Rank:
        """The rank over the weights that were readied last, which has what this one had; this one is done."""
        ...


def switched(rank: Rank, box: BlackBox | None) -> tuple[Rank, float]:
    """`rank.switched`, watched, and the seconds that it took; the old weights' memory is given back."""
    began = time.perf_counter()
    new = rank.switched()
    if box is not None:
        new.watch(box.progress_address)
    del rank
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # the old rank lives in cycles, and what is frozen is never looked at
    trim()
    if frozen:
        gc.freeze()
    return new, time.perf_counter() - began


@runtime_checkable
class AheadRank(Rank, Protocol):
    """A rank on a device that works while the host goes on; `runner.ahead.AheadRunner` is one. `execute` is `launch`
    and `finish`; up to the executor's depth of steps may be launched before the oldest is finished."""

    def launch(self, output: SchedulerOutput) -> Any: ...

    def ready(self, launched: Any) -> bool:
        """Whether `finish` need not wait for the device."""
        ...

    def finish(self, launched: Any) -> StepOutput:
        """Of the oldest."""
        ...


RankFactory = Callable[[RankSpec, Progress | None], Rank]
"""Raises what keeps a rank from being built: ModelError, ConfigError."""
