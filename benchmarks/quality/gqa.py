"""A multi-head model converted to grouped-query attention: what mean pooling costs, what a short uptraining gives back
(catalogue row C03).

One model with a key-value head for every query head is trained. Its key and value heads are averaged in groups, and the
result goes on training for a twentieth and for a tenth of the steps (Ainslie et al., GQA, arXiv 2305.13245, section 2).
As a control the multi-head model goes on for as long. All read the same held-out prose; the gap is that of the
perplexity just after pooling to that of the multi-head model.

`PYTHONPATH=.:tools python benchmarks/quality/gqa.py --data build/corpus --corpus CORPUS` (some ten minutes).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from tokenizers import Tokenizer

from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Rope
from train.corpus import Mixture
from train.export import export
from train.interpreter import SpecModule
from train.pool_heads import pooled
from train.recipes import NORM, VOCAB
from train.text import held_out_prose
from train.train import loss_of, optimisers, rate

LENGTH, HEADS = 128, 8


def shape(kv_heads: int) -> ModelSpec:
    """1.1 million parameters; only the number of key-value heads differs."""
    mixer = Attention(num_heads=HEADS, num_kv_heads=kv_heads, head_dim=16, rope=Rope(dim=16))
    layers = (Layer(mixer=mixer, ffn=FeedForward(width=352), norm=NORM),) * 3
    return ModelSpec(
        family="llama", vocab_size=VOCAB, hidden_size=128, layers=layers, final_norm=NORM, tie_embeddings=True,
        max_position=LENGTH, bos_token_id=0, eos_token_ids=(0, 2), dtype="bfloat16",
    )  # fmt: skip


def go_on(model: SpecModule, rows: Iterator[Any], n_rows: int, steps: int, lr: float, what: str) -> SpecModule:
    """`steps` more steps with fresh optimisers, a warm-up and a cool-down."""
    optims = optimisers(model, lr)
    base = [group["lr"] for o in optims for group in o.param_groups]
    for step in track(range(steps), description=what):
        made = [next(rows) for _ in range(n_rows)]
        tokens = torch.from_numpy(np.stack([t for t, _ in made]).astype(np.int64))
        weights = torch.from_numpy(np.stack([w for _, w in made]))
        for group, lr_of in zip((g for o in optims for g in o.param_groups), base, strict=True):
            group["lr"] = lr_of * rate(step / steps, 0.4)
        loss, _ = loss_of(model, tokens[:, :-1], tokens[:, 1:], weights)
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


def converted(model: SpecModule, kv_heads: int) -> SpecModule:
    target = shape(kv_heads)
    weights = {name: p.detach().float().numpy() for name, p in model.named_weights().items()}
    out = SpecModule(target, LENGTH)
    out.load(pooled(weights, model.spec, target))
    return out


def measured(args: argparse.Namespace, seed: int, texts: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(seed)
    started = time.time()
    rows = Mixture(args.data, LENGTH, 0.0, seed).rows()
    multi = go_on(SpecModule(shape(HEADS), LENGTH), rows, args.rows, args.steps, args.lr, "multi-head")
    best = perplexity(multi, texts)
    out: dict[str, Any] = {
        "seed": seed, "steps": args.steps, "tokens_per_step": args.rows * LENGTH,
        "parameters": multi.spec.num_params, "multi-head": round(best, 2), "converted": {},
    }  # fmt: skip
    extra = {share: max(1, round(args.steps * share)) for share in (0.05, 0.1)}

    def onward(model: SpecModule, share: float, what: str) -> float:
        """The perplexity after so much more training, on rows that the first did not have, the same for all."""
        more = Mixture(args.data, LENGTH, 0.0, seed + 1000).rows()
        return perplexity(go_on(model, more, args.rows, extra[share], args.uptrain_lr, what), texts)

    control = {share: onward(copy.deepcopy(multi), share, "control") for share in extra}
    out["multi-head, as long again"] = {str(share): round(p, 2) for share, p in control.items()}
    for kv_heads in args.kv_heads:
        pooled_only = perplexity(converted(multi, kv_heads), texts)
        line: dict[str, Any] = {"pooled": round(pooled_only, 2)}
        for share in extra:
            model = converted(multi, kv_heads)
            after = onward(model, share, f"{kv_heads} kv heads, {share:.0%}")
            line[str(share)] = {
                "perplexity": round(after, 2),
                "gap_recovered": round((pooled_only - after) / (pooled_only - best), 4),
                "gap_recovered_of_the_control": round((pooled_only - after) / (pooled_only - control[share]), 4),
            }
        if args.export is not None:
            export(model, args.data, args.export / f"gqa-{kv_heads}")
        out["converted"][str(kv_heads)] = line
    out["seconds"] = round(time.time() - started)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=32, help="of 128 tokens, in a step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--uptrain-lr", type=float, default=0.01)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--export", type=Path, help="folder for the models that were converted")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gqa.json"))
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    ids = tokenizer.encode(held_out_prose(args.corpus)).ids
    starts = np.linspace(0, len(ids) - LENGTH - 2, args.texts).astype(int)
    texts = torch.tensor([ids[s : s + LENGTH + 1] for s in starts])
    runs = []
    for seed in args.seeds:
        runs.append(measured(args, seed, texts))
        print(json.dumps(runs[-1]))
        args.out.write_text(json.dumps({"texts": args.texts, "runs": runs}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
