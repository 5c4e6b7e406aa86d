"""Early exiting (catalogue row D42): layers per token against agreement with the whole model, by confidence; and what
the layers know before the last: the head, read behind the first n of them.

    PYTHONPATH=tools python benchmarks/quality/exits.py src/penstock/bundled/nano nano --corpus CORPUS --exits 2 4

A token leaves at the first exit whose likeliest token has at least the threshold as its probability (BranchyNet,
arXiv 1709.01686, with the confidence of Schuster et al., CALM, arXiv 2207.07061, section 3.5: softmax maximum). Read on
held-out prose, one row of text after another, each token behind the true ones before it.

Keys and values of skipped layers: every layer has them for every token here, as they are where all layers run over the
token later (Penstock's early-exit drafter: the step that verifies computes them). So the layers per token are what a
token needs before it is known, and not what is computed for it in all; and nothing is lost with exits as a drafter. If
the token were emitted unverified instead, its text would agree with the whole model's as often as the table says.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from train.export import read_weights
from train.interpreter import SpecModule
from train.recipes import RECIPES
from train.text import held_out_prose

THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.01)


class Read(NamedTuple):
    """Of each token, behind each stop [stops, tokens]: the largest probability, whether the likeliest token is the
    whole model's, and -log2 of the true token's probability."""

    confidence: torch.Tensor
    same: torch.Tensor
    bits: torch.Tensor


@torch.no_grad()
def read(model: SpecModule, ids: list[int], stops: list[int], row: int) -> Read:
    parts: list[tuple[torch.Tensor, ...]] = []
    for start in range(0, len(ids) - row, row):
        x, y = torch.tensor([ids[start : start + row]]), torch.tensor(ids[start + 1 : start + row + 1])
        each = [torch.log_softmax(model.head(r)[0].float(), -1) for r in model.residuals(x, stops)]
        best = [logs.max(-1) for logs in each]
        confidence = torch.stack([b.values.exp() for b in best])
        same = torch.stack([b.indices == best[-1].indices for b in best])
        bits = torch.stack([-logs.gather(1, y[:, None])[:, 0] / math.log(2) for logs in each])
        parts.append((confidence, same, bits))
    return Read(*(torch.cat(column, 1) for column in zip(*parts, strict=True)))


def at_threshold(found: Read, stops: list[int], threshold: float) -> dict[str, float]:
    """Exits at the first stop that is confident; the last one takes all that are left."""
    sure = found.confidence >= threshold
    sure[-1] = True
    taken = sure.to(torch.int8).argmax(0)
    at = torch.arange(taken.numel())
    layers = torch.tensor(stops, dtype=torch.float64)[taken]
    same, bits = found.same[taken, at].double(), found.bits[taken, at].double()
    count = taken.numel()
    return {
        "threshold": threshold,
        "layers_per_token": float(layers.mean()),
        "agreement": float(same.mean()),
        "agreement_error": float(same.std() / count**0.5) * 1.96,
        "perplexity": float(2 ** bits.mean()),
        **{f"exit_{stop}": float((taken == i).double().mean()) for i, stop in enumerate(stops)},
    }


def table_of(rows: list[dict[str, float]], stops: list[int]) -> Table:
    table = Table("threshold", "layers/token", *(f"leave at {s}" for s in stops), "agreement", "perplexity")
    for r in rows:
        shares = [f"{r[f'exit_{s}']:.1%}" for s in stops]
        agreement = f"{r['agreement']:.1%} ± {r['agreement_error']:.1%}"
        name = "never" if r["threshold"] > 1 else f"{r['threshold']:g}"
        table.add_row(name, f"{r['layers_per_token']:.2f}", *shares, agreement, f"{r['perplexity']:.2f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--exits", type=int, nargs="+", required=True)
    parser.add_argument("--chars", type=int, default=60_000)
    parser.add_argument("--row", type=int, default=512, help="tokens of a text that are read as one")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()
    spec = RECIPES[args.recipe]
    model = SpecModule(spec, 2048)
    model.load(read_weights(args.model, spec))
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    ids = tokenizer.encode(held_out_prose(args.corpus)[: args.chars]).ids
    stops = [*sorted(args.exits), len(spec.layers)]
    found = read(model, ids, stops, args.row)
    rows = [at_threshold(found, stops, t) for t in THRESHOLDS]
    Console().print(f"{found.bits.shape[1]} tokens of held-out prose")
    Console().print(table_of(rows, stops))
    behind = Table("layers", "bits per token", "same first choice as all")
    for stop, bits, same in zip(stops, found.bits, found.same, strict=True):
        behind.add_row(str(stop), f"{float(bits.mean()):.3f}", f"{float(same.double().mean()):.1%}")
    Console().print(behind)
    if args.out is not None:
        result = {"model": args.model.name, "tokens": found.bits.shape[1], "exits": stops, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
