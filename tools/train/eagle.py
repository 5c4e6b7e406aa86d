"""The head of EAGLE for a model that stays as it is.

    PYTHONPATH=tools python -m train.eagle src/penstock/bundled/nano nano --data build/corpus --out build/nano-eagle

The head (`penstock.drafters.eagle_head` says what it computes) predicts the model's next hidden state from the last one
and the token behind it. Loss: cross-entropy against the model's own distribution, plus smooth L1 between the hidden
states (Li et al., EAGLE, arXiv 2401.15077, section 3.2). Drafting goes on from predicted states, so training does too
(`--unroll`): a further pass reads what the one before has predicted (Zhang et al., HASS, arXiv 2408.15766, section
3.2). In a part of each second row the states are taken away, as those of prompts are when drafting. Rows are those of
`train.heads`, texts that the model has written among them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.drafters.eagle_head import EPS
from penstock.weights.load import fingerprint
from train.corpus import Mixture
from train.export import read_weights
from train.heads import hidden_states, logits_of, own_texts, rows_of
from train.interpreter import SpecModule
from train.muon import Muon
from train.recipes import RECIPES

DECAY = 0.7
"""What a further pass of the head counts for, relative to the one before."""


class EagleModule(nn.Module):
    """The head with trainable weights: names and shapes of `EagleHead`.

    It begins with what stands at the bottom of the model, the token's embedding (of `size` on average), and a little of
    the feature.
    """

    def __init__(self, hidden: int, num_heads: int, window: int, width: int, size: float) -> None:
        super().__init__()
        e = hidden
        self.fc = _matrix(e, 2 * e)
        self.absent = nn.Parameter(torch.zeros(e))
        self.norms = nn.Parameter(torch.ones(2, e))
        self.qkv = _matrix(3 * e, e)
        self.o = nn.Parameter(torch.zeros(e, e))
        self.distance = nn.Parameter(torch.zeros(num_heads, window))
        self.gate_up = _matrix(2 * width, e)
        self.down = nn.Parameter(torch.zeros(e, width))
        with torch.no_grad():
            self.fc *= 0.2
            self.fc[:, e:] = torch.eye(e) * size

    def forward(self, features: Tensor, known: Tensor, embeddings: Tensor, passes: int) -> list[Tensor]:
        """What each of `passes` passes predicts: entry s [B, T, E] holds at slot i the feature behind it, from the
        model's features of slots up to i - s and its own predictions since; slots i < s of it mean nothing.

        Shapes: features [B, T, E] of slots, known [B, T], embeddings [B, T, E] of the tokens behind them.
        """
        out: list[Tensor] = []
        sources: list[tuple[Tensor, Tensor]] = []
        for s in range(passes):
            if s:
                features, known = F.pad(out[-1], (0, 0, 1, 0))[:, :-1], torch.ones_like(known)
            own = torch.where(known[..., None], _normed(features), self.absent)
            x = torch.cat([own, _normed(embeddings)], -1) @ self.fc.T
            q, k, v = ((_normed(x) * self.norms[0]) @ self.qkv.T).chunk(3, -1)
            sources.append((self._split(k), self._split(v)))
            x = x + self._attend(self._split(q), sources) @ self.o.T
            gate, up = ((_normed(x) * self.norms[1]) @ self.gate_up.T).chunk(2, -1)
            out.append(x + (F.silu(gate) * up) @ self.down.T)
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, E] -> [B, H, T, D]."""
        return x.unflatten(-1, (len(self.distance), -1)).transpose(1, 2)

    def _attend(self, q: Tensor, sources: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Slot i sees, s passes on, verified slots up to i - s, and slot i - s + r as pass r has made it."""
        s, window, t = len(sources) - 1, self.distance.shape[1], q.shape[2]
        q = q * q.shape[-1] ** -0.5
        at = torch.arange(t)
        gap = at[:, None] - at[None, :]
        scores = q @ sources[0][0].mT + self.distance[:, gap.clamp(0, window - 1)]
        parts = [scores.masked_fill((gap < s) | (gap >= window), float("-inf"))]
        shifted = [tuple(_later(part, s - r) for part in sources[r]) for r in range(1, s + 1)]
        parts += [
            (q * key).sum(-1, keepdim=True) + self.distance[:, s - r, None, None]
            for r, (key, _) in enumerate(shifted, 1)
        ]
        weights = torch.softmax(torch.cat(parts, -1), -1)
        found = weights[..., :t] @ sources[0][1]
        for r, (_, value) in enumerate(shifted):
            found = found + weights[..., t + r, None] * value
        return found.transpose(1, 2).flatten(2)


def _later(x: Tensor, by: int) -> Tensor:
    """[B, H, T, D] moved `by` slots back in time: entry i is what was at i - by."""
    return F.pad(x, (0, 0, by, 0))[:, :, : x.shape[2]]


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, EPS)


def without_prompts(shape: torch.Size, longest: int) -> Tensor:
    """[B, T] which slots have a known feature: in every second row a stretch of `longest` at most has none."""
    batch, length = shape
    at = torch.arange(length)
    start = torch.randint(-longest // 2, length, (batch, 1))
    size = torch.randint(1, longest + 1, (batch, 1)) * (torch.rand(batch, 1) < 0.5)
    return (at < start) | (at >= start + size)


def loss_of(model: SpecModule, head: EagleModule, tokens: Tensor, passes: int, smooth: float) -> tuple[Tensor, Tensor]:
    """(loss, share of each pass's drafts that are the model's first choice [passes]). Shapes: tokens [B, T]."""
    (features,) = hidden_states(model, tokens, (len(model.spec.layers),))
    embeddings = model._w("embed")[tokens[:, 1:]]
    known = without_prompts(features[:, :-1].shape[:2], head.distance.shape[1] + 8)
    predicted = head(features[:, :-1], known, embeddings, passes)
    with torch.no_grad():
        want = torch.softmax(logits_of(model, features[:, 1:]), -1)
        choice = want.argmax(-1)
    total, weight, right = torch.zeros(()), 0.0, []
    for s, found in enumerate(predicted):
        logits = logits_of(model, found[:, s:])
        cross = F.cross_entropy(logits.flatten(0, 1), want[:, s:].flatten(0, 1))
        apart = F.smooth_l1_loss(found[:, s:], features[:, 1 + s :])
        total, weight = total + DECAY**s * (cross + smooth * apart), weight + DECAY**s
        right.append((logits.argmax(-1) == choice[:, s:]).float().mean())
    return total / weight, torch.stack(right)


def optimisers(head: EagleModule, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for vectors and distances."""
    vectors = [head.absent, head.norms, head.distance]
    matrices = [p for p in head.parameters() if all(p is not v for v in vectors)]
    return [Muon(matrices, lr), torch.optim.AdamW(vectors, lr / 4, betas=(0.9, 0.95), weight_decay=0.0)]


def train(model: SpecModule, head: EagleModule, rows: Iterator[np.ndarray], args: argparse.Namespace) -> None:
    console, began = Console(stderr=True), time.monotonic()
    every = optimisers(head, args.lr)
    rates = [[group["lr"] for group in optimiser.param_groups] for optimiser in every]
    shown = torch.zeros(args.unroll)
    for step in range(args.steps):
        share = min(1.0, (step + 1) / 20, (args.steps - step) / args.steps / 0.5)
        for optimiser, own in zip(every, rates, strict=True):
            for group, rate in zip(optimiser.param_groups, own, strict=True):
                group["lr"] = rate * share
        tokens = torch.from_numpy(np.stack([next(rows)[:-1] for _ in range(args.rows)]))
        loss, right = loss_of(model, head, tokens, args.unroll, args.smooth)
        head.zero_grad()
        loss.backward()
        for optimiser in every:
            optimiser.step()
        shown += right
        if (step + 1) % 50 == 0:
            shares = ", ".join(f"{s:.1%}" for s in (shown / 50).tolist())
            minutes = (time.monotonic() - began) / 60
            console.print(f"{minutes:.1f} min, step {step + 1}: loss {loss.item():.3f}, right drafts {shares}")
            shown.zero_()


def save(head: EagleModule, out: Path, base: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    config = {"kind": "eagle", "base": base, "hidden_size": len(head.absent)}
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in head.named_parameters()}
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--data", type=Path, required=True, help="folder that train.corpus has written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", type=int, default=6, help="attention heads")
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--width", type=int, default=512, help="of the feed-forward")
    parser.add_argument("--unroll", type=int, default=2, help="passes that each place is trained for")
    parser.add_argument("--smooth", type=float, default=0.5, help="weight of the smooth L1 loss")
    parser.add_argument("--steps", type=int, default=340)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.2, help="part of the rows that are exercises")
    parser.add_argument("--own", type=int, default=256, help="texts that the model writes itself beforehand")
    parser.add_argument("--lr", type=float, default=0.007)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    spec = RECIPES[args.recipe]
    weights = read_weights(args.model, spec)
    model = SpecModule(spec, max(512, args.length))
    model.load(weights)
    model.requires_grad_(False)
    size = float(np.sqrt(np.square(weights["embed"]).mean()))
    head = EagleModule(spec.hidden_size, args.heads, args.window, args.width, size)
    mixture = Mixture(args.data, args.length, args.share, args.seed)
    own = own_texts(args.model, mixture, args.own, args.length) if args.own else []
    train(model, head, rows_of(mixture, own, args.seed), args)
    save(head, args.out, fingerprint(weights))


if __name__ == "__main__":
    main()
