"""What the layers of a model know before the last: the head, read behind the first n layers.

    PYTHONPATH=tools python -m train.exits src/penstock/bundled/nano nano --corpus ../shared/data/corpus --exits 2 4

Bits per token of held-out children's prose, and how often the most likely token behind n layers is the whole model's:
what self-speculation (Elhoushi et al., LayerSkip, arXiv 2404.16710, section 4.3) would have accepted first.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from train.export import read_weights
from train.interpreter import SpecModule
from train.recipes import RECIPES
from train.text import held_out_prose


@torch.no_grad()
def measured(model: SpecModule, ids: list[int], stops: list[int], row: int = 1024) -> list[tuple[float, float]]:
    """(bits per token, share of tokens on which the first choice is the last layer's) behind each of `stops`."""
    bits, same, count = [0.0] * len(stops), [0] * len(stops), 0
    for start in range(0, len(ids) - row, row):
        x, y = torch.tensor([ids[start : start + row]]), torch.tensor(ids[start + 1 : start + row + 1])
        logits = [model.head(residual)[0].float() for residual in model.residuals(x, stops)]
        for i, out in enumerate(logits):
            bits[i] += float(F.cross_entropy(out, y, reduction="sum")) / math.log(2)
            same[i] += int((out.argmax(-1) == logits[-1].argmax(-1)).sum())
        count += row
    return [(b / count, s / count) for b, s in zip(bits, same, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--exits", type=int, nargs="+", required=True)
    parser.add_argument("--chars", type=int, default=60_000)
    args = parser.parse_args()
    spec = RECIPES[args.recipe]
    model = SpecModule(spec, 2048)
    model.load(read_weights(args.model, spec))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ids = tokenizer.encode(held_out_prose(args.corpus)[: args.chars]).ids
    stops = [*sorted(args.exits), len(spec.layers)]
    table = Table("layers", "bits per token", "same first choice as all")
    for stop, (bits, same) in zip(stops, measured(model, ids, stops), strict=True):
        table.add_row(str(stop), f"{bits:.3f}", f"{same:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
