"""A small evolutionary search for LongRoPE's factors (catalogue row G09), on nano at four times its trained length.

    PYTHONPATH=.:tools python benchmarks/quality/longrope_search.py --corpus CORPUS

Ding et al., LongRoPE, arXiv 2402.13753, section 3: a divisor for each rotated pair, not falling from fast to slow
pairs, and a number of first positions that stay as they are; the best of a population have children by mutation and
crossing, and are judged by the perplexity of a few long texts. It begins with the divisors of YaRN, NTK and linear.
Searched on books that nano was trained on; judged, against YaRN's divisors with the same temperature, on the windows of
the held-out books that positions.py reads, by paired differences over windows.
Writes what `rope_scaling` takes (longrope_nano_x4.json) and what the search did (longrope_search.json).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.quality.positions import TRAINED, passage_of, prose_windows, read, rounded, scores, stretched_model
from rich.console import Console

from penstock.core.model_spec import Rope
from penstock.launch.bundled import bundled_model
from penstock.ops.ref.rotary import rope_frequencies
from train.text import books

RATIO = 4
STARTS = (0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of unstretched first positions that are drawn from: those of the paper, and none more often."""
console = Console(stderr=True)


class Genes(NamedTuple):
    """Divisors [pairs], not falling, and the number of first positions that are left alone."""

    divisors: tuple[float, ...]
    start: int = 0

    def scaling(self, temperature: float) -> dict[str, Any]:
        return {
            "rope_type": "longrope", "factor": float(RATIO), "attention_factor": temperature,
            "long_factor": [round(d, 4) for d in self.divisors], "start_tokens": self.start,
        }  # fmt: skip


def known(theta: float, dim: int) -> dict[str, Genes]:
    """What YaRN, linear interpolation and NTK divide frequencies by."""
    base = rope_frequencies(Rope(dim=dim, theta=theta), 1)
    kinds: dict[str, Any] = {
        "yarn": {"original_max_position": TRAINED}, "linear": {}, "ntk": {},
    }  # fmt: skip
    made = {}
    for kind, more in kinds.items():
        own = rope_frequencies(Rope(kind=kind, dim=dim, theta=theta, factor=float(RATIO), **more), 1)
        made[kind] = Genes(tuple((base / own).tolist()))
    return made


def child(rng: random.Random, parents: Sequence[Genes], spread: float) -> Genes:
    """Of one parent, mutated, or of two, crossed."""
    if rng.random() < 0.3 and len(parents) > 1:
        a, b = rng.sample(list(parents), 2)
        divisors = [rng.choice(pair) for pair in zip(a.divisors, b.divisors, strict=True)]
        start = rng.choice((a.start, b.start))
    else:
        one = rng.choice(parents)
        divisors = [d * math.exp(rng.gauss(0.0, spread)) if rng.random() < 0.3 else d for d in one.divisors]
        start = rng.choice(STARTS) if rng.random() < 0.2 else one.start
    return Genes(tuple(np.maximum.accumulate(np.clip(divisors, 1.0, 2.0 * RATIO)).tolist()), start)


def search(
    model: Path, texts: list[list[int]], first: dict[str, Genes], temperature: float, *, rounds: int, size: int,
    parents: int, seed: int = 0,
) -> tuple[Genes, list[dict[str, Any]]]:  # fmt: skip
    """(the best, what each round found). Each is judged once."""
    rng = random.Random(seed)
    judged: dict[Genes, float] = {}

    def cost(genes: Genes) -> float:
        if genes not in judged:
            nats = read(stretched_model(model, genes.scaling(temperature), RATIO * TRAINED), texts)
            judged[genes] = float(np.concatenate(nats).mean())
        return judged[genes]

    for name, genes in first.items():
        console.print(f"{name}: perplexity {math.exp(cost(genes)):.3f}")
    log = []
    for n in range(rounds):
        best = sorted(judged, key=cost)[:parents]
        began, met = time.perf_counter(), len(judged)
        while len(judged) < met + size:
            cost(child(rng, best, spread=0.35 * 0.8**n))
        leader = min(judged, key=cost)
        log.append({"round": n, "judged": len(judged), "perplexity": round(math.exp(judged[leader]), 3)})
        console.print(
            log[-1], f"{time.perf_counter() - began:.0f} s", [round(d, 2) for d in leader.divisors], leader.start
        )
    return min(judged, key=cost), log


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=bundled_model("nano"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--size", type=int, default=6, help="children in a round")
    parser.add_argument("--parents", type=int, default=3)
    parser.add_argument("--texts", type=int, default=1, help="of 8,192 tokens, to judge by")
    parser.add_argument("--windows", type=int, default=1, help="of each held-out book, at the end")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    plain = stretched_model(args.model, None, RATIO * TRAINED)
    rope = plain.spec.layers[0].mixer.rope  # type: ignore[union-attr]
    encode, bos = plain.tokenizer.encode, plain.spec.bos_token_id or 0  # type: ignore[union-attr]
    length = RATIO * TRAINED
    stories = sorted(books(args.corpus / "children", held=False), key=len)[-args.texts :]
    texts = [[bos, *encode(text[40000 : 40000 + 8 * length])[: length - 1]] for text in stories]
    first, temperature = known(rope.theta, rope.dim), round(0.1 * math.log(RATIO) + 1.0, 4)
    best, log = search(
        args.model, texts, first, temperature, rounds=args.rounds, size=args.size, parents=args.parents
    )  # fmt: skip
    held = prose_windows(args.corpus, encode, args.windows, length, bos)
    passages = {"all": (passage_of(held, 1), 1), "beyond": (passage_of(held, TRAINED), TRAINED)}
    final = {
        name: scores(read(stretched_model(args.model, genes.scaling(temperature), length), held), passages)
        for name, genes in (first | {"searched": best}).items()
    }
    report: dict[str, Any] = {
        "rounds": log,
        "seed": 0,
        "temperature": temperature,
        "windows": len(held),
        "held_out": {},
    }
    for name, found in final.items():
        report["held_out"][name] = {
            part: {"perplexity": round(s.perplexity, 3), "minus_yarn": rounded(s.difference(final["yarn"][part]))}
            for part, s in found.items()
        }  # fmt: skip
    console.print(report["held_out"])
    (args.out / "longrope_nano_x4.json").write_text(json.dumps(best.scaling(temperature)) + "\n", "utf-8")
    (args.out / "longrope_search.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
