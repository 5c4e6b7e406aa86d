"""The narrow seams. Each has one conformance suite in `tests/conformance`; registering an implementation enrols it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.core.batch import SchedulerOutput, StepOutput
    from penstock.core.sampling import TokenRules
    from penstock.core.sequence import Sequence


@runtime_checkable
class Executor(Protocol):
    """Runs steps in order. `submit` never blocks on the result; `collect` returns the oldest one's."""

    depth: int
    """Steps that may be in flight."""

    def submit(self, output: SchedulerOutput) -> None: ...

    def collect(self) -> StepOutput: ...

    def close(self) -> None: ...


class SchedulingPolicy(Protocol):
    """Answers three questions: in what order, how many tokens, whom to preempt."""

    name: str

    def order(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> list[Sequence]:
        """Candidates of this step, first served first. May leave sequences out; must not starve any for ever."""
        ...

    def num_tokens(self, seq: Sequence, budget_left: int, num_decodes_left: int) -> int:
        """How many of `seq.lag` tokens to run now; at most `budget_left`; 0 skips it in this step."""
        ...

    def victim(self, running: Seq[Sequence], needy: Sequence) -> Sequence | None:
        """Whom to preempt so that `needy` gets memory; `needy` itself if nobody should yield to it."""
        ...


class PrefixCache(Protocol):
    """Remembers full blocks by what was computed in them. Ids only. See `kv.prefix` for the laws."""

    name: str


class EvictionPolicy(Protocol):
    """Orders evictable entries: the smallest key goes first."""

    name: str

    def on_insert(self, entry: Any, tick: int) -> None: ...

    def on_hit(self, entry: Any, tick: int) -> None: ...

    def key(self, entry: Any) -> Any: ...


class LogitsProcessor(Protocol):
    """Changes logits before sampling. Batched; state per row, kept on the rank."""

    name: str

    def add(self, seq_id: int, rules: TokenRules, prompt: Seq[int], output: Seq[int]) -> bool:
        """Begin to follow a row. False: nothing to do for it (the row is not followed)."""
        ...

    def apply(self, logits: npt.NDArray[np.float32], seq_ids: Seq[int]) -> None:
        """Mutates `logits` [R, V] in place; row r belongs to `seq_ids[r]` (rows not followed are left alone)."""
        ...

    def advance(self, seq_id: int, token_ids: Seq[int]) -> None: ...

    def rollback(self, seq_id: int, n: int) -> None: ...

    def fork(self, parent_id: int, child_id: int) -> None: ...

    def remove(self, seq_id: int) -> None: ...


class AttentionBackend(Protocol):
    """Attention over paged planes; see `ops.ref.attention` for shapes."""

    name: str
    online: bool


class ModelFamily(Protocol):
    """formats -> ModelSpec and weight names; see `families.registry`."""

    name: str


class StepTimer(Protocol):
    """Predicts how long a step takes. Units: seconds."""

    def predict(self, output: SchedulerOutput) -> float: ...
