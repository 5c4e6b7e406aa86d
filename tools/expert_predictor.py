"""Fits what `--expert-prediction trained:FILE` reads (SiDA, catalogue row C73), from a model's own routing of texts.

    python tools/expert_predictor.py MODEL TEXT... --out predictor.npz

The first 80 % of the tokens are what it is fitted to; of the rest it says how many of the experts that were used it
foresees, beside naming those that are used most.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from penstock import LLM, SamplingParams
from penstock.backends.native.experts.recorder import RoutingRecorder
from penstock.backends.native.experts.trained import fit
from penstock.base.bf16 import F32

_PIECE = 256
_HELD_OUT = 0.2


def record(runner: Any, serve: Any) -> RoutingRecorder:
    """What routers read and choose while `serve()` runs on a rank whose model was given expert_memory_bytes."""
    stops = runner._forward.stops  # a tool may look inside
    if stops is None:
        raise SystemExit("this model has no experts that native kernels run")
    bounds = stops.cache.bounds
    recorder = RoutingRecorder(np.diff(bounds).tolist())
    before, stops.predictor = stops.predictor, recorder
    serve()
    stops.predictor = before
    return recorder


def recall(likely: F32, used: F32, sizes: list[int]) -> float:
    """The share of used experts that are among as many named of their layer."""
    found = total = first = 0
    for size in sizes:
        own, truth = likely[:, first : first + size], used[:, first : first + size]
        top_k, first = int(truth.sum(axis=1).max(initial=0)), first + size
        if top_k:
            found += np.take_along_axis(truth, np.argsort(-own, axis=1)[:, :top_k], 1).sum()
            total += truth.sum()
    return float(found / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=8192, help="of all texts together")
    parser.add_argument("--memory", type=int, default=1 << 40, help="as --expert-memory-bytes, while it is recorded")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    llm = LLM(args.model, ops="native", expert_memory_bytes=args.memory, enable_prefix_caching=False)
    tokenizer = llm.get_tokenizer()
    pieces = []
    for path in args.texts:
        ids = tokenizer.encode(path.read_text(errors="replace")[: 8 * args.tokens])[: args.tokens // len(args.texts)]
        pieces += [ids[at : at + _PIECE] for at in range(0, len(ids), _PIECE)]
    prompts = [{"prompt_token_ids": piece} for piece in pieces]
    one = SamplingParams(temperature=0, max_tokens=1)
    executor: Any = llm.engine.core.executor
    recorder = record(executor._runner, lambda: llm.generate(prompts, one))
    rows, used = np.concatenate(recorder.rows[0]), recorder.used()
    cut = int(len(rows) * (1 - _HELD_OUT))
    found, mean = fit(rows[:cut], used[:cut])
    np.savez(args.out, map=found, mean=mean)
    likely = rows[cut:] @ found + mean
    usual = np.broadcast_to(mean, likely.shape)
    foreseen, most_used = (recall(guess, used[cut:], recorder.sizes) for guess in (likely, usual))
    print(f"{args.out}: {len(rows)} tokens, {used.shape[1]} experts; of those that held-out tokens used it foresees "
          f"{foreseen:.1%}; naming the most used alone, {most_used:.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
