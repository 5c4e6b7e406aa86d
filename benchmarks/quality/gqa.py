"""A multi-head model converted to grouped-query attention: what mean pooling costs, what a short uptraining gives back
(catalogue row C03).

pico, which has a key-value head for every query head, gets its key and value heads averaged into one (Ainslie et al.,
GQA, arXiv 2305.13245, section 2) and goes on training for a few steps. All read the same held-out prose. The gap is
that of the perplexity just after pooling to that of pico, or of pico gone on for as long, whichever is the better.

`PYTHONPATH=.:tools python benchmarks/quality/gqa.py --data build/corpus --corpus CORPUS` (some minutes). `--data` has
to be prepared with the model's own tokenizer:
`PYTHONPATH=tools python -m train.corpus CORPUS build/corpus --tokenizer src/penstock/bundled/pico`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from penstock.core.model_spec import Attention, ModelSpec
from penstock.launch.bundled import bundled_model
from train.corpus import Mixture
from train.export import export, read_weights
from train.interpreter import SpecModule
from train.pool_heads import pooled
from train.recipes import RECIPES
from train.text import held_out_prose
from train.train import loss_of, optimisers, rate

LENGTH = 256
Weights = dict[str, npt.NDArray[np.float32]]


def with_kv_heads(spec: ModelSpec, kv_heads: int) -> ModelSpec:
    mixers = [layer.mixer for layer in spec.layers]
    assert all(isinstance(m, Attention) for m in mixers)
    changed = [msgspec.structs.replace(m, num_kv_heads=kv_heads) for m in mixers]  # type: ignore[type-var]
    layers = [msgspec.structs.replace(layer, mixer=m) for layer, m in zip(spec.layers, changed, strict=True)]
    return msgspec.structs.replace(spec, layers=tuple(layers))


def trained(spec: ModelSpec, weights: Weights, steps: int, args: argparse.Namespace, seed: int) -> SpecModule:
    """`steps` more, with a warm-up and a cool-down, on the same rows in the same order for all who share a seed."""
    model = SpecModule(spec, LENGTH)
    model.load(weights)
    rows = Mixture(args.data, LENGTH, 0.0, seed).rows()
    optims = optimisers(model, args.lr)
    base = [group["lr"] for o in optims for group in o.param_groups]
    for step in range(steps):
        made = [next(rows) for _ in range(args.rows)]
        tokens = torch.from_numpy(np.stack([t for t, _ in made]).astype(np.int64))
        parts = torch.from_numpy(np.stack([w for _, w in made]))
        for group, lr in zip((g for o in optims for g in o.param_groups), base, strict=True):
            group["lr"] = lr * rate(step / steps, 0.6)
        loss, _ = loss_of(model, tokens[:, :-1], tokens[:, 1:], parts)
        loss.backward()
        for optimiser in optims:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
    return model


@torch.no_grad()
def perplexity(model: SpecModule, texts: torch.Tensor) -> float:
    """Of texts [N, T+1], every token but the first of each."""
    total = 0.0
    for part in texts.split(8):
        logits = model(part[:, :-1]).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / texts[:, 1:].numel())


def measured(args: argparse.Namespace, seed: int, steps: Sequence[int], texts: torch.Tensor) -> dict[str, Any]:
    started = time.process_time()
    source = RECIPES[args.recipe]
    target = with_kv_heads(source, args.kv_heads)
    weights = read_weights(args.model or bundled_model(args.recipe), source)
    fewer = pooled(weights, source, target)
    before = perplexity(trained(source, weights, 0, args, seed), texts)
    just_pooled = perplexity(trained(target, fewer, 0, args, seed), texts)
    out: dict[str, Any] = {
        "model": args.recipe, "kv_heads": f"{source.layers[0].mixer.num_kv_heads} to {args.kv_heads}",  # type: ignore[union-attr]
        "seed": seed, "tokens_per_step": args.rows * LENGTH, "multi-head": round(before, 2),
        "pooled": round(just_pooled, 2), "after": [],
    }  # fmt: skip
    for n in steps:
        uptrained = trained(target, fewer, n, args, seed)
        after = perplexity(uptrained, texts)
        control = perplexity(trained(source, weights, n, args, seed), texts)
        line = {
            "steps": n, "perplexity": round(after, 2), "multi-head as long": round(control, 2),
            "recovered": round((just_pooled - after) / (just_pooled - min(before, control)), 4),
        }  # fmt: skip
        out["after"].append(line)
        print(seed, line, flush=True)
        if args.export is not None:
            export(uptrained, args.data, args.export)
    out["cpu_seconds"] = round(time.process_time() - started)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--recipe", default="pico", choices=[n for n in RECIPES if bundled_model(n) is not None])
    parser.add_argument("--model", type=Path, help="weights of the recipe, if not those in the package")
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--rows", type=int, default=8, help=f"of {LENGTH} tokens, in a step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--export", type=Path, help="folder for the last model that was converted")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gqa.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    ids = tokenizer.encode(held_out_prose(args.corpus)).ids
    starts = np.linspace(0, len(ids) - LENGTH - 2, args.texts).astype(int)
    texts = torch.tensor([ids[s : s + LENGTH + 1] for s in starts])
    runs = []
    for seed in args.seeds:
        runs.append(measured(args, seed, args.steps, texts))
        args.out.write_text(json.dumps({"texts": args.texts, "tokens": LENGTH, "runs": runs}, indent=1) + "\n", "utf-8")
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
