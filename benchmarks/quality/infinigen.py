"""What `--kv-selector infinigen` reads, finds and costs (catalogue row B18), by the engine's own programs.

    PYTHONPATH=. python benchmarks/quality/infinigen.py MODEL --text FILE [--reach 3.5 4] [--rank 0.8 1] [--budget 99%]
        [--windows 16] [--counted 2] [--prefix 864] [--tokens 128] [--out FILE.json]

Of each window the tokens behind the prefix read, in all layers but the first, what was chosen a layer ahead: by the
native program if there is one. `read`: tokens of kv heads that are read, of all that these layers might; `moved`: the
same of bytes of keys and values, with the first layer's; `near`: bytes of the parts of keys, of all of these. Nats of
every window, less those of reading everything: mean and 95 % (bootstrap). `recall`, of the first `--counted` windows,
by the reference operations: attention on what was read, of that on as many tokens as attention itself would choose.
Turns, where the rank is below 1, are learnt from 512 tokens at the text's end.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common import about, save
from benchmarks.quality.selector_pairs import difference
from rich.console import Console
from rich.progress import track

from penstock.backends.reference import BlasBackend
from penstock.config import from_kwargs
from penstock.config.selection import parse_budget
from penstock.core.selection import TokenReads, num_components
from penstock.eval.perplexity import log_probs
from penstock.eval.rehearsal import counting_scorer, turns_of_text
from penstock.eval.scorer import ProgramScorer, load
from penstock.model.emitter import Reading
from penstock.model.forward import ChoosingForward


def measure(args: argparse.Namespace) -> dict[str, Any]:
    length = args.prefix + args.tokens
    model = load(from_kwargs(model=args.model, max_model_len=max(length, 512), threads=1))
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(Path(args.text).read_text())
    starts = np.linspace(0, len(ids) - 512 - length - 1, args.windows).astype(int)
    windows = [ids[start : start + length + 1] for start in starts]
    turns = turns_of_text(model, BlasBackend(), ids[-512:]) if min(args.rank) < 1 else []
    budget, dim = parse_budget(args.budget), model.spec.layers[0].mixer.head_dim  # type: ignore[union-attr]

    def nats(scorer: ProgramScorer, name: str) -> list[float]:
        out = []
        for window in track(windows, name, console=Console(stderr=True)):
            p = log_probs(scorer.logits(window[:-1])[args.prefix :])
            out.append(float(-p[np.arange(args.tokens), window[args.prefix + 1 :]].mean()))
        return out

    whole = nats(ProgramScorer(model, model.backend), "everything")
    found: dict[str, Any] = {"everything": {"perplexity": float(np.exp(np.mean(whole))), "nats": whole}}
    for reach in args.reach:
        for rank in args.rank:
            reads = TokenReads(budget.tokens, budget.share, args.recent, 1, reach, rank)
            parts = num_components(rank, dim)
            reading = Reading(tokens=reads, turns=None if rank == 1 else [t[:, :, :parts].copy() for t in turns])
            scorer = ProgramScorer(model, model.backend, reading=reading, first=args.prefix)
            own = nats(scorer, f"reach {reach:g}, rank {rank:g}")
            row: dict[str, Any] = {
                "perplexity": float(np.exp(np.mean(own))), "over": float(np.exp(np.mean(own) - np.mean(whole))),
                "nats_more": difference(own, whole), "nats": own, "near": parts / dim / 2,
            }  # fmt: skip
            if isinstance(scorer.forward, ChoosingForward):
                read, seen = scorer.forward.tokens_read
                layers = len(model.spec.layers)
                row |= {"read": read / seen, "moved": (1 + (layers - 1) * read / seen) / layers}
            counting, attention = counting_scorer(model, reading, args.prefix)
            for window in windows[: args.counted]:
                counting.logits(window[:-1])
            if args.counted:
                row |= {"recall": attention.fetched.recall, "recall_read": attention.fetched.share}
            found[f"{reach:g} {rank:g}"] = row
            Console(stderr=True).print({k: v for k, v in row.items() if k != "nats"})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--reach", type=float, nargs="+", default=[3.5, 4.0], help="in nats below the largest score")
    parser.add_argument("--rank", type=float, nargs="+", default=[0.8, 1.0], help="share of a head's components")
    parser.add_argument("--budget", default="99%", help="tokens of a kv head at most")
    parser.add_argument("--recent", type=int, default=8)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--counted", type=int, default=2)
    parser.add_argument("--prefix", type=int, default=864)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = measure(args)
    Console().print_json(json.dumps({n: {k: v for k, v in f.items() if k != "nats"} for n, f in found.items()}))
    names = {"model": Path(args.model).name, "text": Path(args.text).name}
    save(args.out, about(asked=vars(args) | names | {"out": None}, found=found))


if __name__ == "__main__":
    main()
