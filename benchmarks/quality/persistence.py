"""How much of what matters in a text goes on mattering: the persistence ratio (catalogue row F04).

    PYTHONPATH=.:tools python benchmarks/quality/persistence.py --corpus CORPUS --out FILE

Liu et al., Scissorhands, arXiv 2305.17118, section 3.2: a token is pivotal for another if it gets more than average
attention from it. Of the tokens of a text's first half those that matter to the first half are the ones that some of
its tokens, none of them nearer than `--near`, found pivotal; likewise those that matter to the second half. The ratio
is the share of the latter that are among the former. Most tokens matter to somebody, so the same is counted for the
heavy ones as well: the tenth that gets the most attention from either half, in the mean over the tokens behind it; by
chance a tenth of them would be the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from benchmarks.common import about, save, show
from benchmarks.quality.retained import windows
from rich.console import Console

from penstock.base.bf16 import F32
from penstock.config import from_kwargs
from penstock.eval.maps import MapReader
from penstock.eval.scorer import load
from train.text import held_out_prose

HEAVY = 0.1


def pivotal(weights: F32, near: int) -> tuple[float, float, float]:
    """Of one head's map [T, T]: (persistence ratio, share of the first half that is pivotal in it, heavy ones that
    stay heavy)."""
    length = len(weights)
    half = length // 2
    ages = np.arange(length)[:, None] - np.arange(length)[None]
    far = ages >= near
    above = far & (weights > 1 / np.arange(1, length + 1)[:, None])
    first, second = above[:half, : half - near].any(axis=0), above[half:, : half - near].any(axis=0)
    ratio = (first & second).sum() / max(1, second.sum())
    count = max(1, round(HEAVY * (half - near)))
    means = [
        (np.where(far, weights, 0)[rows, : half - near].sum(axis=0) / far[rows, : half - near].sum(axis=0))
        for rows in (slice(0, half), slice(half, None))
    ]
    old, new = (set(np.argsort(-mean, kind="stable")[:count].tolist()) for mean in means)
    return float(ratio), float(first.mean()), len(old & new) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--near", type=int, default=32, help="tokens so near are kept anyway, and count for nobody")
    parser.add_argument("--out")
    options = parser.parse_args()
    model = load(from_kwargs(model=options.model, ops="ref"))
    reader = MapReader(model)
    found: dict[int, list[list[tuple[float, float, float]]]] = {}
    for ids in windows(model, held_out_prose(options.corpus), options.windows, options.tokens):
        for layer in reader.read(ids)[1]:
            weights = layer.weights.reshape(options.tokens, -1, options.tokens)
            heads = [pivotal(weights[:, h], options.near) for h in range(weights.shape[1])]
            found.setdefault(layer.layer, []).append(heads)
    rows = []
    for n, values in found.items():
        each = np.array(values)
        ratio, share, heavy = each.mean(axis=(0, 1))
        rows.append(
            {"layer": n, "persistence": ratio, "pivotal": share, "heavy": heavy,
             "heads": each[:, :, 0].mean(axis=0).round(4).tolist()}
        )  # fmt: skip
    shown = [[str(r["layer"]), *(f"{r[key]:.1%}" for key in ("persistence", "pivotal", "heavy"))] for r in rows]
    title = f"{options.model}: {options.windows} windows of {options.tokens} tokens"
    show(Console(), title, ("layer", "persistence ratio", "pivotal in the first half", "heavy tenth stays"), shown)
    more = {"windows": options.windows, "tokens": options.tokens, "near": options.near}
    save(options.out, about(model=options.model, **more, layers=rows))


if __name__ == "__main__":
    main()
