"""Weights in two dimensions: what the layouts of a feed-forward give away on a grid of processes (catalogue row H02).

    python -m benchmarks.studies.weight_grid [--hidden 64] [--width 256] [--out FILE]

A feed-forward `relu(x A) B` with A [E, F] and B [F, E] on X * Y ranks. Rows x [T, E] come with E shared out over all
ranks and leave like that; where weights travel instead, rows come by rows. The layouts of Pope et al. (arXiv
2211.05102, section 3.2):

- `stationary-1d`: each rank has columns of A and rows of B; rows are gathered, sums are scattered;
- `stationary-2d`: each rank has a block of E / X by F / Y of both; rows are gathered over Y, what is between over X;
- `gathered-part`: T is shared out over X, whose ranks gather weights; the rest is `stationary-1d` over Y;
- `gathered`: T is shared out over all ranks, and every rank gathers all weights.

`given_bytes` is the analytical model: bytes that one rank gives away, float32. `choose` takes the least. Real processes
carry every layout out, compare what comes of it with one process and count what they give.

Shape letters: T rows, E hidden, F width, X and Y the grid.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from benchmarks.common import about, save, show
from rich.console import Console

from penstock.parallel.messages import Messages
from penstock.parallel.team import RankTeam

F32 = npt.NDArray[np.float32]
LAYOUTS = ("stationary-1d", "stationary-2d", "gathered-part", "gathered")


class Case(NamedTuple):
    """T, E, F, and the grid; all must divide evenly."""

    rows: int
    hidden: int
    width: int
    x: int = 2
    y: int = 2


def given_bytes(case: Case, layout: str) -> int:
    """By each rank. A gather gives what a rank has to each of the others of its line; a scatter of sums gives each of
    them their part of what this rank has added up."""
    t, e, f, x, y = case
    n = x * y
    numbers = {
        "stationary-1d": 2 * t * e * (n - 1) / n,
        "stationary-2d": 2 * t * (e * (y - 1) + f * (x - 1)) / n,
        "gathered-part": 2 * e * f * (x - 1) / n + 2 * (t / x) * e * (y - 1) / y,
        "gathered": 2 * e * f * (n - 1) / n,
    }
    return round(4 * numbers[layout])


def choose(case: Case) -> str:
    return min(LAYOUTS, key=lambda layout: given_bytes(case, layout))


def drawn(case: Case) -> tuple[F32, F32, F32]:
    rng = np.random.default_rng(case.rows)
    shapes = ((case.rows, case.hidden), (case.hidden, case.width), (case.width, case.hidden))
    x, a, b = (rng.standard_normal(shape).astype(np.float32) / 8 for shape in shapes)
    return x, a, b


def alone(case: Case) -> F32:
    x, a, b = drawn(case)
    out: F32 = np.maximum(x @ a, 0) @ b
    return out


def part(x: F32, n: int, of: int, axis: int) -> F32:
    return np.split(x, of, axis=axis)[n]


class _Line:
    """Ranks of one line of the grid, or all: what they gather and scatter."""

    def __init__(self, comm: Messages, group: Sequence[int]) -> None:
        self.comm, self.group, self.at = comm, list(group), list(group).index(comm.rank)

    def gather(self, x: F32, axis: int) -> F32:
        return np.concatenate([got[0] for got in self.comm.gather((x,), self.group, "grid")], axis=axis)

    def scatter_sum(self, x: F32, axis: int) -> F32:
        """This rank's part of the sum of what all have."""
        parts = [(np.ascontiguousarray(own),) for own in np.split(x, len(self.group), axis=axis)]
        found = self.comm.all_to_all(parts, self.group, "grid")
        total: F32 = np.sum([got[0] for got in found], axis=0, dtype=np.float32)
        return total


def carried_out(comm: Messages, case: Case, layout: str) -> tuple[F32, int]:
    """On one rank: its part of the result, and the bytes that it has given."""
    x, a, b = drawn(case)
    n, before = comm.size, comm.given["grid"]
    i, j = divmod(comm.rank, case.y)
    row = _Line(comm, [i * case.y + k for k in range(case.y)])  # the same i
    column = _Line(comm, [k * case.y + j for k in range(case.x)])  # the same j
    everybody = _Line(comm, range(n))
    if layout == "stationary-1d":
        all_of_it = everybody.gather(part(x, comm.rank, n, 1), 1)
        between = np.maximum(all_of_it @ part(a, comm.rank, n, 1), 0)
        out = everybody.scatter_sum(between @ part(b, comm.rank, n, 0), 1)
    elif layout == "stationary-2d":
        own_a, own_b = part(part(a, i, case.x, 0), j, case.y, 1), part(part(b, j, case.y, 0), i, case.x, 1)
        own = row.gather(part(x, comm.rank, n, 1), 1)
        between = np.maximum(column.scatter_sum(own @ own_a, 1), 0)
        out = row.scatter_sum(column.gather(between, 1) @ own_b, 1)
    elif layout == "gathered-part":
        own = row.gather(part(part(x, i, case.x, 0), j, case.y, 1), 1)
        own_a = column.gather(part(part(a, j, case.y, 1), i, case.x, 1), 1)
        own_b = column.gather(part(part(b, j, case.y, 0), i, case.x, 0), 0)
        out = row.scatter_sum(np.maximum(own @ own_a, 0) @ own_b, 1)
    else:
        all_a, all_b = everybody.gather(part(a, comm.rank, n, 1), 1), everybody.gather(part(b, comm.rank, n, 0), 0)
        out = np.maximum(part(x, comm.rank, n, 0) @ all_a, 0) @ all_b
    return out, comm.given["grid"] - before


def together(case: Case, layout: str, parts: Sequence[F32]) -> F32:
    if layout == "gathered":
        return np.concatenate(parts, axis=0)
    if layout == "gathered-part":
        lines = [np.concatenate(parts[i * case.y : (i + 1) * case.y], axis=1) for i in range(case.x)]
        return np.concatenate(lines, axis=0)
    return np.concatenate(parts, axis=1)


def counted(team: RankTeam, case: Case, layout: str) -> tuple[int, float]:
    """Bytes that each rank has given, and the largest difference from one process."""
    found = team.run(carried_out, case, layout)
    given = {bytes_ for _, bytes_ in found}
    assert len(given) == 1, "every rank gives as much"
    return given.pop(), float(np.abs(together(case, layout, [out for out, _ in found]) - alone(case)).max())


def flips(hidden: int, width: int, x: int = 2, y: int = 2) -> list[float]:
    """Numbers of rows at which the model's choice changes, from the formulas: where two of them are equal."""
    n = x * y
    first = min((n - 1) / n, (y - 1 + width / hidden * (x - 1)) / n)  # of T E, stationary
    between = (y - 1) / (x * y)
    moved = (x - 1) / n
    low, high = width * moved / (first - between), width * ((n - 1) / n - moved) / between
    return [low, high] if low < high else [width * (n - 1) / n / first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows, kept = [], []
    with RankTeam(4) as team:
        for t in (8, 32, 64, 112, 144, 256, 496, 528, 1024):
            case = Case(t, args.hidden, args.width)
            found = {layout: counted(team, case, layout) for layout in LAYOUTS}
            least = min(LAYOUTS, key=lambda layout: found[layout][0])
            rows.append([f"{t}", *(f"{found[layout][0]:,}" for layout in LAYOUTS), least, choose(case)])
            given = {layout: bytes_ for layout, (bytes_, _) in found.items()}
            kept.append({"rows": t, "given": given, "least": least, "model": choose(case)})
    title = f"bytes that each of 4 ranks gives; the choice should change at {flips(args.hidden, args.width)} rows"
    show(Console(width=140), title, ["rows", *LAYOUTS, "least", "the model's choice"], rows)
    found_out: dict[str, Any] = {"about": about(), "hidden": args.hidden, "width": args.width, "cases": kept}
    save(None if args.out is None else str(args.out), found_out)


if __name__ == "__main__":
    main()
