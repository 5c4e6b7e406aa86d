"""InfiniGen's rehearsals (catalogue row B18): what is found one layer before, and what a text loses with no more.

    PYTHONPATH=. python benchmarks/quality/infinigen.py MODEL --text FILE [--reach 3.5 4] [--rank 0.8 1] [--windows 3]
        [--prefix 864] [--tokens 128] [--out FILE.json]

Turns are learnt from 512 tokens at the text's end. Of each window the tokens behind the prefix attend, in all layers
but the first, to what was rehearsed. `recall`: the attention on what was fetched, of that on as many tokens as
attention itself would choose. `fetched`: bytes of keys and values, of all in reach; `rehearsed`: bytes of the keys'
components that rehearsals read, of the same. Nats of every window, less those of reading everything: mean and 95 %
(bootstrap).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save
from benchmarks.quality.selector_pairs import difference
from rich.console import Console
from rich.progress import track

from penstock.config import from_kwargs
from penstock.eval.perplexity import log_probs
from penstock.eval.rehearsal import Fetched, RehearsingScorer
from penstock.eval.scorer import load


def measure(args: argparse.Namespace) -> dict[str, Any]:
    length = args.prefix + args.tokens
    model = load(from_kwargs(model=args.model, ops="ref", max_model_len=max(length, 512)))
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(Path(args.text).read_text())
    scorer = RehearsingScorer(model, first=args.prefix)
    scorer.learn(ids[-512:])
    whole = "everything"
    settings = {whole: (math.inf, 1.0)} | {f"{a:g} {b:g}": (a, b) for a in args.reach for b in args.rank}
    nats: dict[str, list[float]] = {name: [] for name in settings}
    counted = {name: Fetched() for name in settings}
    starts = np.linspace(0, len(ids) - 512 - length - 1, args.windows).astype(int)
    for start in track(starts, console=Console(stderr=True)):
        window = ids[start : start + length + 1]
        for name, (scorer.reach, scorer.rank) in settings.items():
            scorer.count(counted[name])
            p = log_probs(scorer.logits(window[:-1])[args.prefix :])
            nats[name].append(float(-p[np.arange(args.tokens), window[args.prefix + 1 :]].mean()))
    found: dict[str, Any] = {}
    for name, values in nats.items():
        f = counted[name]
        found[name] = {"perplexity": float(np.exp(np.mean(values))), "nats": values}
        if name != whole:
            found[name] |= {
                "over_everything": float(np.exp(np.mean(values) - np.mean(nats[whole]))),
                "nats_more": difference(values, nats[whole]), "recall": f.recall, "fetched": f.share,
                "rehearsed": f.rehearsed_bytes / f.all_bytes,
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--reach", type=float, nargs="+", default=[3.5, 4.0], help="in nats below the largest score")
    parser.add_argument("--rank", type=float, nargs="+", default=[0.8, 1.0], help="share of a head's components")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--prefix", type=int, default=864)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = measure(args)
    Console().print_json(json.dumps({n: {k: v for k, v in f.items() if k != "nats"} for n, f in found.items()}))
    asked = {"model": Path(args.model).name, "text": Path(args.text).name, "prefix": args.prefix, "tokens": args.tokens}
    save(args.out, about(asked=asked, found=found))


if __name__ == "__main__":
    main()
