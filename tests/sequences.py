"""For tests of ranks that share out a sequence: what each of them does, in processes or in threads."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.backends.sequence import SequenceModel
from penstock.base.errors import RankGoneError
from penstock.parallel.messages import Messages, socket_mesh
from tests import specs
from tests.paged import Paged

F32 = npt.NDArray[np.float32]
Step = tuple[dict[str, tuple[list[int], list[int]]], dict[str, Any]]
"""What `SequenceModel.run` is given: work, and on which ranks."""


@dataclass
class Played:
    """What one rank has to say of all steps: logits of each, bytes given by label, and so on."""

    logits: list[dict[str, F32]]
    given: dict[str, int]
    flops: int
    workspace: int
    rounds: list[tuple[int, int]]
    kv_bytes: list[int]
    """Kept, behind each step."""
    by_step: list[dict[str, int]] = field(default_factory=list)
    peak_bytes: int = 0
    traced_bytes: int = 0


def prompt(count: int, seed: int = 3) -> list[int]:
    return [seed + i * 7 % 50 for i in range(count)]


def play(
    comm: Messages, name: str, method: str, steps: Sequence[Step], layout: str = "", capacity: int | None = None,
    traced: bool = False,
) -> Played:  # fmt: skip
    spec, weights = specs.make(name)
    paged = Paged(spec, weights, num_slabs=1, max_model_len=600)
    model = SequenceModel(paged.graph, comm, method, layout=layout, capacity=capacity)
    start = comm.given.copy()
    logits, kept, by_step = [], [], []
    if traced:  # what is imported at first use is none of a step's memory
        model.run({"before": ([3] * 2 * comm.size, [0])})
        model.forget("before")
        start = comm.given.copy()
        tracemalloc.start()
    for work, how in steps:
        before = comm.given.copy()
        logits.append(model.run(work, **how))
        kept.append(model.held.num_bytes())
        by_step.append(dict(comm.given - before))
    peak = tracemalloc.get_traced_memory()[1] if traced else 0
    if traced:
        tracemalloc.stop()
    work_ = model.work
    return Played(
        logits, dict(comm.given - start), work_.flops, work_.workspace, work_.rounds, kept, by_step,
        model.program.peak_bytes, peak,
    )  # fmt: skip


def in_threads(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """As `RankTeam.run`, with ranks that are threads."""
    ends = [Messages(rank, row) for rank, row in enumerate(socket_mesh(size))]

    def run(comm: Messages) -> Any:
        try:
            return function(comm, *arguments)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
        begun = [pool.submit(run, comm) for comm in ends]
        wrong = [error for future in begun if (error := future.exception(120)) is not None]
        for error in sorted(wrong, key=lambda e: isinstance(e, RankGoneError)):
            raise error  # the others have only seen that somebody ended
        return [future.result() for future in begun]


def alone(name: str, steps: Sequence[Step]) -> list[dict[str, F32]]:
    """The same steps in one process, without ranks."""
    spec, weights = specs.make(name)
    paged = Paged(spec, weights, max_model_len=600)
    return [{seq: np.array(rows) for seq, rows in paged.run(work).items()} for work, _ in steps]


def difference(got: Sequence[dict[str, F32]], want: Sequence[dict[str, F32]]) -> float:
    """The largest, relative to the largest logit of its step; also between sequences that are not there."""
    worst = 0.0
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for seq in theirs:
            assert mine[seq].shape == theirs[seq].shape
            assert np.isfinite(theirs[seq]).all()
            assert np.isfinite(mine[seq]).all(), "a NaN is larger than nothing"
            if theirs[seq].size:
                worst = max(worst, float(np.abs(mine[seq] - theirs[seq]).max() / np.abs(theirs[seq]).max()))
    return worst


def mixed(count: int = 37) -> list[Step]:
    """Two sequences: prompts in chunks, single tokens, both in one step; all logits wanted, or some."""
    a, b = prompt(count), prompt(count, 5)
    return [
        ({"a": (a[:20], list(range(20)))}, {}),
        ({"a": (a[20:21], [0]), "b": (b[:9], [0, 8])}, {}),
        ({"a": (a[21:], list(range(count - 21))), "b": (b[9:10], [])}, {}),
        ({"b": (b[10:11], [0]), "a": ([7], [0])}, {}),
        ({"a": ([9], [0]), "b": (b[11:15], [1, 3])}, {}),
    ]
