"""Ranks a model's heads by how much they look at positions, and gives each a factor (Ms-PoE, catalogue row G37).

    PYTHONPATH=.:tools python benchmarks/quality/mspoe_heads.py --corpus CORPUS --out benchmarks/results/mspoe_nano.json
    penstock run nano --rope-scaling "$(cat benchmarks/results/mspoe_nano.json)" ...

A head's score is the share of keys that the last query of a text gives at least three times the mean attention: many
such outliers are a head that finds what matters where it stands (Zhang et al., Found in the Middle, arXiv 2403.04797,
section 4). Heads with the highest score get the smallest factor, those with the lowest the largest, evenly spaced. The
paper ranks query heads; keys are kept rotated here, so the query heads that share a key share its factor, and their
scores are averaged.  It reads with the reference operations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from penstock.config import from_kwargs
from penstock.core.model_spec import Attention
from penstock.eval.scorer import LoadedModel, ProgramScorer, load
from penstock.launch.bundled import bundled_model
from penstock.ops.blas import BLAS
from penstock.ops.ref.rotary import rope
from train.text import books

OUTLIER = 3.0


def scores(model: LoadedModel, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """[L, G]: share of outliers among the keys of the last query, a mean over texts and over heads that share keys."""
    turned: list[np.ndarray] = []

    def kept(x: np.ndarray, angles: np.ndarray, interleaved: bool, first: int = 0) -> np.ndarray:
        turned.append(rope(x, angles, interleaved, first))
        return turned[-1]

    scorer = ProgramScorer(model, BLAS.replaced("heads", {"rope": kept}, batch_invariant=False))
    return np.mean([_of_text(model, scorer, turned, ids) for ids in texts], axis=0)


def _of_text(model: LoadedModel, scorer: ProgramScorer, turned: list[np.ndarray], ids: Sequence[int]) -> np.ndarray:
    turned.clear()
    scorer.logits(ids)
    layers = len(model.spec.layers)
    out = []
    for n, layer in enumerate(model.spec.layers):
        mixer = layer.mixer
        assert isinstance(mixer, Attention)
        # A text is read in several steps; each turns the queries and the keys of every layer, in this order.
        keys = np.concatenate(turned[2 * n + 1 :: 2 * layers])
        query = turned[2 * n :: 2 * layers][-1][-1]
        per = mixer.num_heads // mixer.num_kv_heads
        points = np.einsum("gpd,tgd->gpt", query.reshape(mixer.num_kv_heads, per, -1), keys)
        points = np.exp((points - points.max(-1, keepdims=True)) * (mixer.scale or mixer.head_dim**-0.5))
        share = points / points.sum(-1, keepdims=True)
        out.append((share > OUTLIER / len(keys)).mean(axis=(1, 2)))
    return np.array(out)


def factors(found: np.ndarray, low: float, high: float) -> list[list[float]]:
    """Evenly spaced between `low`, for the highest score of a layer, and `high`."""
    rows: list[list[float]] = []
    for row in found:
        steps = np.linspace(low, high, len(row))
        order = np.argsort(np.argsort(-row, kind="stable"), kind="stable")
        rows.append([round(float(steps[i]), 3) for i in order])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", default=str(bundled_model("nano")))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--range", type=float, nargs=2, default=(1.2, 1.8))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = load(from_kwargs(model=args.model, ops="ref"))
    assert model.tokenizer is not None
    # Books that were trained on: those that are held out are what the result is judged by.
    texts = books(args.corpus / "children", held=False)[:4]
    ids = [
        [model.spec.bos_token_id or 0, *model.tokenizer.encode(text[20000:60000])[: args.tokens - 1]] for text in texts
    ]
    found = scores(model, ids)
    console = Console(stderr=True)
    for n, row in enumerate(found):
        console.print(f"layer {n}: outliers {np.round(row, 4).tolist()}")
    made: dict[str, Any] = {"rope_type": "default", "head_factors": factors(found, *args.range)}
    args.out.write_text(json.dumps(made) + "\n", "utf-8")
    console.print(made["head_factors"])


if __name__ == "__main__":
    main()
