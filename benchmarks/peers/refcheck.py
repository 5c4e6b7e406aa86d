"""Are an engine's tokens the model's? Its greedy choices, held against float32 logits given the same tokens before.

A choice is right if its reference logit lies within a bound of the largest one, and all choices are if they do so on
average. The bounds depend on the precision, and are in standard deviations of the row's logits, so they mean the same
for every model; a token out of the blue lies about four below. Teacher-forced: one early disagreement does not make all
that follows wrong.

    python -m benchmarks.peers.refcheck results.jsonl      (`run` does it at its end)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.engines import BITS, CODES, GGUF, Place, Spec, default_place, highest_id, needed_path
from benchmarks.peers.reference import Reference
from benchmarks.peers.results import Entry, Results, opened
from benchmarks.peers.stored_reference import CodesReference, GgufReference
from benchmarks.peers.workloads import workload
from rich.console import Console

BOUNDS = {32: (0.01, 0.001), 16: (0.1, 0.01), 8: (0.8, 0.1), 4: (3.5, 1.6)}
"""Bits -> how many deviations below the largest logit one choice may lie, and all of them on average.

On the random qwen2.5-0.5b, 64 tokens: bfloat16 products reach 0.005; 8-bit weights 0.1, with 8-bit activations 0.27
(0.016 on average); 4-bit weights in groups of 32, the head too, 2.5 (0.96 on average); tokens drawn at random lie 4.4
below on average and 2.5 at least. So at 4 bits only the average tells right from wrong; at 8 and 16 every token does.
"""
STORED_BITS = 8
"""Tokens of stored formats are held against what their codes stand for: only activations may be rounded."""
CHECKED = ("W0", "W1", "W3", "W4")
"""Workloads whose answers are long enough; of each, the first repeat that is there."""


def samples(entries: Sequence[Entry], place: Place) -> dict[tuple[str, str, str], list[tuple[list[int], list[int]]]]:
    """(engine, precision, model) -> (prompt, generated tokens), from the cells that kept their tokens."""
    seen: set[tuple[str, str, str, str]] = set()
    out: dict[tuple[str, str, str], list[tuple[list[int], list[int]]]] = defaultdict(list)
    for entry in entries:
        if entry.get("kind") != "cell" or "error" in entry or entry["workload"] not in CHECKED:
            continue
        who = entry["engine"], entry["precision"], entry["model"]
        if (*who, entry["workload"]) in seen:
            continue
        seen.add((*who, entry["workload"]))
        highest = highest_id(entry["model"], place)
        asked = workload(entry["workload"], entry["repeat"], highest=highest).requests
        out[who] += [(prompt, ids) for (prompt, _), ids in zip(asked, entry["tokens"], strict=False) if _known(ids)]
    return dict(out)


def check(reference: Reference, requests: Sequence[tuple[list[int], list[int]]], bits: int) -> dict[str, Any]:
    """Figures of one engine. `wrong`: choices beyond the bound; `agreement`: share that is the reference's own."""
    found = reference.scores(requests)
    gap = np.concatenate([s.gap for s in found])
    best = np.concatenate([s.is_best for s in found])
    bound, mean_bound = BOUNDS[bits]
    gap = np.nan_to_num(gap, nan=1e9, posinf=1e9)
    wrong, mean = int((gap > bound).sum()), float(gap.mean())
    return {
        "num_tokens": len(gap), "bound": bound, "mean_bound": mean_bound, "worst_gap": float(gap.max()),
        "mean_gap": mean, "agreement": float(best.mean()), "wrong": wrong, "ok": wrong == 0 and mean <= mean_bound,
    }  # fmt: skip


def check_all(results: Results, place: Place, console: Console) -> int:
    """Check every engine that has tokens and no verdict on them yet; returns how many are wrong."""
    there = results.latest("check")
    references: dict[tuple[str, str], Reference | str] = {}
    num_wrong = 0
    for (engine, precision, model), requests in samples(results.entries, place).items():
        tokens = hashlib.sha256(json.dumps(requests).encode()).hexdigest()[:16]
        key = f"{engine}:{precision}|{model}|{tokens}"
        found = there.get(key)
        if found is None:
            try:
                if (at := (model, precision if precision in GGUF | CODES else "")) not in references:
                    references[at] = _open(Spec(engine, precision), model, place)
                reference = references[at]
                if isinstance(reference, str):
                    verdict: dict[str, Any] = {"ok": None, "why": reference}
                else:
                    verdict = check(reference, requests, bits_of(precision))
            except (IndexError, ValueError) as error:  # ids that no vocabulary has
                verdict = {"ok": False, "why": str(error), "wrong": 1}
            found = {
                "kind": "check", "key": key, "engine": engine, "precision": precision, "model": model, **verdict,
            }  # fmt: skip
            results.add(found)
        num_wrong += found["ok"] is False
        console.print(_sentence(found), style="red" if found["ok"] is False else None, markup=False)
    return num_wrong


def _sentence(found: Entry) -> str:
    who = f"{found['engine']}:{found['precision']} on {found['model']}"
    if "num_tokens" not in found:
        return f"check: {who}: {'not checked' if found['ok'] is None else 'WRONG'}: {found['why']}"
    return (
        f"check: {who}: {'ok' if found['ok'] else 'WRONG'}: {found['num_tokens']} tokens, {found['agreement']:.0%} the "
        f"reference's own, worst {found['worst_gap']:.3f} deviations below it (allowed: {found['bound']:g}), on "
        f"average {found['mean_gap']:.4f} ({found['mean_bound']:g})"
    )


def bits_of(precision: str) -> int:
    """Which bounds hold."""
    return STORED_BITS if precision in GGUF | CODES else BITS[precision]


def _open(spec: Spec, model: str, place: Place) -> Reference | str:
    path = needed_path(spec, model, place)
    try:
        if path is not None and spec.precision in GGUF:
            return GgufReference(path)
        if path is not None and spec.precision in CODES:
            return CodesReference(path)
        return Reference(place.model(model))
    except (ImportError, OSError, ValueError, KeyError) as error:
        return str(error)


def _known(tokens: Sequence[int]) -> bool:
    return bool(tokens) and tokens[0] >= 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--peers", type=Path, help="default: $PENSTOCK_PEERS or ~/.cache/penstock-peers")
    args = parser.parse_args(argv)
    place = Place(args.peers) if args.peers else default_place()
    with opened(args.results) as results:
        return 1 if check_all(results, place, Console()) else 0


if __name__ == "__main__":
    sys.exit(main())
