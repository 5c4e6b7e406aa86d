"""What an executor and the process of a rank tell each other, over two sockets: steps, in order, and all else.

Ids, numbers and short texts; logits never leave their rank. `core.messages.Loading` and `Failed` are said, too.
"""

from __future__ import annotations

import msgspec

from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.messages import Failed, Loading
from penstock.core.weight_swap import WeightFacts
from penstock.executor.rank import RankSpec


class Build(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message. Another `schema` is another build: refused."""

    schema: str
    spec: RankSpec


class Built(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank takes steps. `packed_file`: see `core.protocols.Executor`."""

    packed_file: str


class RunStep(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    output: SchedulerOutput
    spoil: bool = False


class Result(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    output: StepOutput


class Back(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """See `Executor.back`. It comes between two steps."""

    num_slabs: list[int]


class Switch(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """See `Executor.switch_weights`. It comes while no step is in flight; answered with a Switched."""


class Switched(msgspec.Struct, frozen=True, tag=True, array_like=True):
    seconds: float


class ReadWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """See `Executor.ready_weights`; answered with a Prepared of the same number, beside the steps."""

    number: int
    path: str


class Prepare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """See `Executor.prepare`; answered with a Prepared of the same number, beside the steps."""

    number: int
    grammar: str
    param: str


class Prepared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`problem`: why it cannot be compiled, with the parameter that has to change; "": it has been. `broken`: the
    grammar is not to blame. `weights`: what was read, or `failed`, why it was not."""

    number: int
    problem: str = ""
    param: str | None = None
    code: str | None = None
    broken: bool = False
    weights: WeightFacts | None = None
    failed: Failed | None = None


ToRank = Build | RunStep | Back | Switch
FromRank = Result | Loading | Built | Switched | Failed
Aside = Prepare | ReadWeights
"""`ToRank`, `FromRank`: the socket of the steps; the other one has these, and Prepared."""
