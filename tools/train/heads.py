"""Heads that draft further ahead (Medusa), or an adapter behind an early exit, for a model that stays as it is.

    PYTHONPATH=tools python -m train.heads src/penstock/bundled/nano nano --data build/corpus --out build/nano-medusa
    PYTHONPATH=tools python -m train.heads ... --exit 2 --out build/nano-adapter

Medusa: head k reads the model's last hidden state behind the final norm and predicts the token k places behind the
next one, through residual blocks x + silu(A x + b) and the model's own output matrix. Loss: cross-entropy, head k
weighted by 0.8^k (Medusa-1 of Cai et al., arXiv 2401.10774). Rows are prose and exercises as for the model itself, and
texts that the model has written (self-distillation, ibid.): drafts follow what the model says.

Adapter: reads what stands behind the first layers, through the final norm, and learns the whole model's distribution
(cross-entropy against it, as Kangaroo, Liu et al., arXiv 2404.18911); blocks as above, so it keeps no cache.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock import LLM, SamplingParams
from penstock.weights.load import fingerprint
from train.corpus import Mixture
from train.export import read_weights
from train.interpreter import SpecModule
from train.recipes import RECIPES

DECAY = 0.8
PROMPT = 32


class MedusaHeads(nn.Module):
    """K heads (an adapter: one) of N blocks. They begin as the model's own head: the blocks' matrices are zero."""

    def __init__(self, num_heads: int, num_blocks: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, num_blocks, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(num_heads, num_blocks, hidden))

    def forward(self, h: Tensor) -> Tensor:
        """[P, E] -> [K, P, E]."""
        x = h.expand(len(self.weight), *h.shape)
        for n in range(self.weight.shape[1]):
            x = x + F.silu(x @ self.weight[:, n].transpose(1, 2) + self.bias[:, n, None])
        return x


def hidden_states(model: SpecModule, tokens: Tensor, stops: Sequence[int]) -> list[Tensor]:
    """Behind each of `stops` layers and the final norm: what the engine gives to drafters. [B, T] -> [B, T, E]."""
    norm = model.spec.final_norm
    with torch.no_grad():
        found = model.residuals(tokens, stops)
        return found if norm is None else [model._norm(x, "final_norm", norm) for x in found]


def logits_of(model: SpecModule, x: Tensor) -> Tensor:
    table = model._w("embed" if model.spec.tie_embeddings else "lm_head")
    return F.linear(x, table) * model.spec.logit_scale


def loss_of(model: SpecModule, heads: MedusaHeads, tokens: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """(loss, share of right first drafts per head [K]); `every`-th place only: the output matrix costs most."""
    k = len(heads.weight)
    (hidden,) = hidden_states(model, tokens[:, : -k - 1], (len(model.spec.layers),))
    at = torch.arange(int(torch.randint(every, ())), hidden.shape[1], every)
    h = hidden[:, at].flatten(0, 1)
    out = heads(h)
    total = torch.zeros(())
    right = []
    for i in range(k):
        logits = logits_of(model, out[i])
        want = tokens[:, at + i + 2].flatten()
        total = total + DECAY ** (i + 1) * F.cross_entropy(logits, want)
        right.append((logits.argmax(-1) == want).float().mean())
    return total, torch.stack(right)


def adapter_loss(
    model: SpecModule, adapter: MedusaHeads, tokens: Tensor, every: int, stop: int
) -> tuple[Tensor, Tensor]:
    """The same for an adapter behind `stop` layers; right is the whole model's first choice."""
    early, last = hidden_states(model, tokens[:, :-1], (stop, len(model.spec.layers)))
    at = torch.arange(int(torch.randint(every, ())), early.shape[1], every)
    with torch.no_grad():
        want = torch.softmax(logits_of(model, last[:, at].flatten(0, 1)), -1)
    logits = logits_of(model, adapter(early[:, at].flatten(0, 1))[0])
    right = (logits.argmax(-1) == want.argmax(-1)).float().mean()
    return F.cross_entropy(logits, want), right[None]


def own_texts(model: Path, mixture: Mixture, count: int, length: int) -> list[np.ndarray]:
    """What the model writes behind beginnings of rows; half greedily, half at temperature 0.8."""
    rows = mixture.rows()
    prompts = [next(rows)[0][:PROMPT].tolist() for _ in range(count)]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=length + 1 - PROMPT, ignore_eos=True, detokenize=False
        )
        for i in range(count)
    ]
    written = LLM(model).generate([{"prompt_token_ids": p} for p in prompts], params)
    return [np.array([*p, *w.outputs[0].token_ids], np.int64) for p, w in zip(prompts, written, strict=True)]


def rows_of(mixture: Mixture, own: list[np.ndarray], seed: int) -> Iterator[np.ndarray]:
    """Every second row one of its own, if there are any."""
    rng, fresh = random.Random(seed), mixture.rows()
    while True:
        yield next(fresh)[0].astype(np.int64)
        if own:
            yield rng.choice(own)


def save(heads: MedusaHeads, out: Path, base: str, stop: int | None) -> None:
    out.mkdir(parents=True, exist_ok=True)
    num_heads, num_blocks, hidden, _ = heads.weight.shape
    config = {"kind": "medusa" if stop is None else "adapter", "base": base, "hidden_size": hidden}
    config |= {"num_heads": num_heads, "num_blocks": num_blocks}
    config |= {} if stop is None else {"exit_layer": stop}
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in heads.named_parameters()}
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def train(model: SpecModule, heads: MedusaHeads, rows: Iterator[np.ndarray], args: argparse.Namespace) -> None:
    console = Console(stderr=True)
    optimiser = torch.optim.AdamW(heads.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    began, step, shown = time.monotonic(), 0, torch.zeros(len(heads.weight))
    while (done := (time.monotonic() - began) / 60 / args.minutes) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20, (1.0 - done) / 0.4)
        tokens = torch.from_numpy(np.stack([next(rows) for _ in range(args.rows)]))
        if args.exit is None:
            loss, right = loss_of(model, heads, tokens, args.every)
        else:
            loss, right = adapter_loss(model, heads, tokens, args.every, args.exit)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        step += 1
        shown += right
        if step % 50 == 0:
            shares = ", ".join(f"{share:.1%}" for share in (shown / 50).tolist())
            console.print(f"{done:.0%} step {step}: loss {loss.item():.3f}, right first drafts {shares}")
            shown.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--data", type=Path, required=True, help="folder that train.corpus has written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--exit", type=int, help="an adapter behind so many layers, instead of Medusa heads")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.2, help="part of the rows that are exercises")
    parser.add_argument("--own", type=int, default=256, help="texts that the model writes itself beforehand")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    spec = RECIPES[args.recipe]
    weights = read_weights(args.model, spec)
    model = SpecModule(spec, max(512, args.length))
    model.load(weights)
    model.requires_grad_(False)
    heads = MedusaHeads(args.heads if args.exit is None else 1, args.blocks, spec.hidden_size)
    mixture = Mixture(args.data, args.length, args.share, args.seed)
    own = own_texts(args.model, mixture, args.own, args.length) if args.own else []
    train(model, heads, rows_of(mixture, own, args.seed), args)
    save(heads, args.out, fingerprint(weights), args.exit)


if __name__ == "__main__":
    main()
