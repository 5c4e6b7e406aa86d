"""What an executor and the process of a rank tell each other, over two sockets: steps, in order, and all else.

Ids, numbers and short texts; logits never leave their rank. `core.messages.Loading` and `Failed` are said, too.
"""

from __future__ import annotations

import msgspec

from penstock.core.batch import SchedulerOutput, StepOutput
from penstock.core.messages import Failed, Loading
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


class Prepare(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """See `Executor.prepare`; answered with a Prepared of the same number, beside the steps."""

    number: int
    grammar: str
    param: str


class Prepared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`problem`: why it cannot be compiled, with the parameter that has to change; "": it has been. `broken`: the
    grammar is not to blame."""

    number: int
    problem: str = ""
    param: str | None = None
    code: str | None = None
    broken: bool = False


ToRank = Build | RunStep | Back
FromRank = Result | Loading | Built | Failed
"""The socket of the steps; the other one has Prepare and Prepared."""
