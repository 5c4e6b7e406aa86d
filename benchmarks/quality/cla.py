"""Layers that share keys and values: what it costs to train so, and to go over to it (catalogue rows C10, C13, C19).

C10: a grouped-query model and its twin in which every second layer reads the keys and values of the one before (CLA2;
Brandon et al., arXiv 2405.12981), with wider feed-forwards, so that both have equally many parameters, are trained on
the same rows in the same order. C19: so is a third one, whose lower half has windows, and whose upper half reads the
keys and values that its first layer makes of what the lower half gives (YOCO; Sun et al., arXiv 2405.05254).

C13: the first of them goes over to fewer keys and values and on training for some steps: multi-query attention (a head
for each layer), CLA2, and both (MLKV; Zuhri et al., arXiv 2406.09297: heads of layers, too, become their mean). So does
itself, as the point that costs nothing. All read the same held-out prose.

`PYTHONPATH=.:src:tools python benchmarks/quality/cla.py --data build/corpus --corpus CORPUS` (20 minutes of a core).
`--data` has to be prepared with pico's tokenizer: see `benchmarks/quality/gqa.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.quality.gqa import LENGTH, Weights, perplexity, trained
from tokenizers import Tokenizer

from penstock.core.model_spec import Attention, FeedForward, Layer, ModelSpec, Rope, cache_groups
from train.interpreter import SpecModule
from train.recipes import CONTEXT, NORM, THETA, VOCAB
from train.text import held_out_prose

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, WINDOW = 6, 96, 6, 3, 16, 256, 64
CONVERSIONS = (("gqa", KV_HEADS, 1), ("mqa", 1, 1), ("cla2", KV_HEADS, 2), ("mlkv", 1, 2), ("mlkv3", 1, 3))
"""Name, kv heads of a layer that keeps some, layers that share."""


def decoder(mixers: Sequence[Attention], widths: Sequence[int]) -> ModelSpec:
    layers = tuple(
        Layer(mixer=m, ffn=FeedForward(width=w), norm=NORM) for m, w in zip(mixers, widths, strict=True)
    )  # fmt: skip
    return ModelSpec(
        family="llama", vocab_size=VOCAB, hidden_size=HIDDEN, final_norm=NORM, tie_embeddings=True, bos_token_id=0,
        max_position=CONTEXT, layers=layers,
    )  # fmt: skip


def model(kv_heads: int = KV_HEADS, share: int = 1, widths: Sequence[int] = (WIDTH,) * LAYERS) -> ModelSpec:
    """`share`: so many layers read the keys and values of the first of them."""
    rope = Rope(dim=DIM, theta=THETA)
    mixers = [
        Attention(
            num_heads=HEADS, num_kv_heads=kv_heads, head_dim=DIM, rope=rope,
            kv_from=None if n % share == 0 else n - n % share,
        )
        for n in range(LAYERS)
    ]  # fmt: skip
    return decoder(mixers, widths)


def yoco(widths: Sequence[int] = (WIDTH,) * LAYERS) -> ModelSpec:
    """Windows below, one cache of all tokens above."""
    half, rope = LAYERS // 2, Rope(dim=DIM, theta=THETA)
    mixers = [
        Attention(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rope=rope, window=WINDOW if n < half else None,
            kv_from=half if n > half else None,
        )
        for n in range(LAYERS)
    ]  # fmt: skip
    return decoder(mixers, widths)


def as_large(make: Callable[[Sequence[int]], ModelSpec]) -> ModelSpec:
    """As many parameters as the plain model: what keys and values no longer take goes to the feed-forwards."""
    missing = model().num_params - make((WIDTH,) * LAYERS).num_params
    more, rest = divmod(missing // (3 * HIDDEN), LAYERS)
    made = make([WIDTH + more + (n < rest) for n in range(LAYERS)])
    assert made.num_params == model().num_params
    return made


def kv_bytes(spec: ModelSpec) -> int:
    """That a token of a long context takes, bfloat16: what windows hold does not grow with it."""
    return sum(group.token_bytes(16) for group in cache_groups(spec, "bfloat16") if group.spec.window is None)


def converted(weights: Weights, kv_heads: int, share: int) -> Weights:
    """Keys and values of neighbouring heads, and of the layers that share, become their mean."""
    out = {name: a for name, a in weights.items() if name.rsplit(".", 1)[-1] not in ("k", "v")}
    for n in range(0, LAYERS, share):
        for name in ("k", "v"):
            of_layers = np.mean([weights[f"layers.{i}.{name}"] for i in range(n, n + share)], axis=0)
            heads = of_layers.reshape(kv_heads, KV_HEADS // kv_heads, DIM, HIDDEN).mean(axis=1)
            out[f"layers.{n}.{name}"] = heads.reshape(-1, HIDDEN).astype(np.float32)
    return out


def fresh(spec: ModelSpec, seed: int) -> Weights:
    made = SpecModule(spec, LENGTH)
    made.initialise(seed)
    return weights_of(made)


def weights_of(module: SpecModule) -> Weights:
    return {name: p.detach().numpy().copy() for name, p in module.named_weights().items()}


def measured(args: argparse.Namespace, seed: int, texts: torch.Tensor) -> dict[str, Any]:
    started = time.process_time()
    plain = model()
    twins = {"cla2": as_large(lambda widths: model(share=2, widths=widths)), "yoco": as_large(yoco)}
    out: dict[str, Any] = {
        "seed": seed, "params": plain.num_params, "tokens": args.steps * args.rows * LENGTH, "trained": [],
        "converted": [],
    }  # fmt: skip
    kept: Weights = {}
    for name, spec in (("gqa", plain), *twins.items()):
        found = trained(spec, fresh(spec, seed), args.steps, args, seed)
        kept = kept or weights_of(found)
        line = {"model": name, "kv_bytes": kv_bytes(spec), "perplexity": round(perplexity(found, texts), 2)}
        out["trained"].append(line)
        print(seed, line, flush=True)
    for name, kv_heads, share in CONVERSIONS:
        spec, weights = model(kv_heads, share), converted(kept, kv_heads, share)
        just = perplexity(trained(spec, weights, 0, args, seed), texts)
        after = perplexity(trained(spec, weights, args.more, args, seed + 100), texts)
        line = {
            "model": name, "kv_bytes": kv_bytes(spec), "converted": round(just, 2), "perplexity": round(after, 2),
        }  # fmt: skip
        out["converted"].append(line)
        print(seed, line, flush=True)
    out["cpu_seconds"] = round(time.process_time() - started)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--more", type=int, default=80, help="steps after a conversion")
    parser.add_argument("--rows", type=int, default=4, help=f"of {LENGTH} tokens, in a step")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 8])
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cla.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    ids = tokenizer.encode(held_out_prose(args.corpus)).ids
    starts = np.linspace(0, len(ids) - LENGTH - 2, args.texts).astype(int)
    texts = torch.tensor([ids[s : s + LENGTH + 1] for s in starts])
    runs = []
    for seed in args.seeds:
        runs.append(measured(args, seed, texts))
        args.out.write_text(json.dumps({"texts": args.texts, "length": LENGTH, "runs": runs}, indent=1) + "\n", "utf-8")
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
