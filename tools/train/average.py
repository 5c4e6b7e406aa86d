"""The mean of the weights of two runs, one of which went on from the other (or both from a third).

    PYTHONPATH=tools python -m train.average src/penstock/bundled/nano build/g build/mean --weight 0.7

Source: averaging along a run, arXiv 1803.05407; of runs from one start, arXiv 2203.05482.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file


def average(first: Path, second: Path, out: Path, weight: float) -> None:
    """Writes `out`: everything of folder `second`, with (1 - weight) x first + weight x second for weights.

    Summed in float32, kept in the type of `first`. Raises ValueError for folders with other weights.
    """
    a, b = (load_file(folder / "model.safetensors") for folder in (first, second))
    if {n: t.shape for n, t in a.items()} != {n: t.shape for n, t in b.items()}:
        raise ValueError(f"{first} and {second} do not have the same weights")
    if not 0 <= weight <= 1:
        raise ValueError(f"a weight of {weight} is not between 0 and 1")
    shutil.copytree(second, out, dirs_exist_ok=True)
    mean = {n: ((1 - weight) * t.float() + weight * b[n].float()).to(t.dtype) for n, t in a.items()}
    save_file(mean, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weight", type=float, default=0.5, help="of the second")
    args = parser.parse_args()
    average(args.first, args.second, args.out, args.weight)


if __name__ == "__main__":
    main()
