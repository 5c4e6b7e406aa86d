"""Train a recipe on prose and exercises.

`PYTHONPATH=tools python -m train.train nano --data build/corpus --out build/nano`. Resumable from weights alone
(`--resume FOLDER`): the optimiser's state is built up again in a short warm-up. Writes a model folder that Penstock
opens (bfloat16), a loss curve as JSON lines, and samples.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from penstock.config import ModelConfig
from penstock.families.stretch import stretched
from train.corpus import Mixture
from train.export import export, read_weights
from train.induction import plant, plantable, planted_weights, token_dims
from train.interpreter import SpecModule
from train.muon import Muon, fast_bfloat16
from train.recipes import RECIPES

SAMPLES = ("Once upon a time", "The little girl looked at the", '"I am not afraid," said')


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("--data", type=Path, required=True, help="folder that train.corpus wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="model folder to go on from")
    parser.add_argument(
        "--rope-scaling", metavar="JSON",
        help="go on with other positions (linear, ntk, yarn); the folder that is written needs the same switch to run",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="end earlier: the schedule follows the clock instead of steps")
    parser.add_argument("--rows", type=int, default=16, help="sequences per step, of the first length")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument(
        "--lengths", type=phases, default=None, metavar="N:PART,...",
        help="instead of --length: sequences grow as training goes on; 256:0.5,2048:0.5 is half of the run at each. "
        "Every step has as many tokens as the first",
    )  # fmt: skip
    parser.add_argument("--mixed", action="store_true", help="draw each step's length, instead of one after another")
    parser.add_argument(
        "--plain-start",
        action="store_true",
        help="begin without the heads for looking back that train.induction plants",
    )
    parser.add_argument(
        "--protect", type=float, default=0.4,
        help="part of the run in which planted heads learn slowly: the first lessons of prose would trample them",
    )  # fmt: skip
    parser.add_argument("--exits", type=int, nargs="*", default=[], help="layers behind which the head is trained too")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--share", type=float, default=0.35, help="part of the rows that are exercises")
    parser.add_argument("--repeats", type=float, default=0.2, help="part of the exercises that are repeated stretches")
    parser.add_argument("--lr", type=float, default=0.02, help="of Muon; AdamW's is a seventh of it")
    parser.add_argument("--cooldown", type=float, default=0.4, help="last part of the run, in which rates fall to zero")
    parser.add_argument("--save-every", type=float, default=10.0, help="minutes between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that make exercises beside the training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def phases(text: str) -> list[tuple[int, float]]:
    """ "256:0.5,2048:0.5" -> [(256, 0.5), (2048, 1.0)]: lengths, and the part of the run at which each ends."""
    out, end = [], 0.0
    for part in text.split(","):
        length, share = part.split(":")
        end += float(share)
        out.append((int(length), end))
    if abs(end - 1.0) > 1e-6:
        raise argparse.ArgumentTypeError(f"the parts add up to {end:g}, not 1")
    return out


class Rows(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of a mixture; every worker process draws its own, from its own seed."""

    def __init__(self, args: argparse.Namespace, length: int) -> None:
        self._args = args
        self._length = length

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        a, worker = self._args, get_worker_info()
        seed = a.seed * 1000 + (0 if worker is None else worker.id) + self._length * 1_000_003
        for tokens, weights in Mixture(a.data, self._length, a.share, seed, a.repeats).rows():
            yield torch.from_numpy(tokens.astype(np.int32)), torch.from_numpy(weights)


def batches(
    args: argparse.Namespace, done: Callable[[], float]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(inputs [rows, length], targets, weights) on the device; made by `--workers` processes beside the training.

    `done` says how much of the run is over; lengths follow it.
    """
    sized = {n: max(1, args.rows * args.lengths[0][0] // n) for n, _ in args.lengths}
    if args.mixed:
        parts = [
            end - start for (_, end), start in zip(args.lengths, [0.0, *(e for _, e in args.lengths)], strict=False)
        ]
        sources = {n: _batches(args, rows, n) for n, rows in sized.items()}
        rng = random.Random(args.seed)
        while done() < 1.0:
            yield next(sources[rng.choices(list(sized), parts)[0]])
        return
    for length, end in args.lengths:
        for batch in _batches(args, sized[length], length):
            if done() >= end:
                break
            yield batch


def _batches(
    args: argparse.Namespace, rows: int, length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    loader = DataLoader(Rows(args, length), batch_size=rows, num_workers=args.workers)
    for tokens, weights in loader:
        tokens, weights = tokens.to(args.device, non_blocking=True).long(), weights.to(args.device, non_blocking=True)
        yield tokens[:, :-1], tokens[:, 1:], weights


def loss_of(
    model: SpecModule, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, exits: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weighted mean loss to descend, sum of losses of fully weighted tokens and their number) in nats.

    `exits`: the head is also trained to read the residual behind these many layers, at 0.3 of the weight, much as in
    Elhoushi et al., LayerSkip, 2024, section 4.1.
    """
    with torch.autocast(x.device.type, torch.bfloat16, enabled=fast_bfloat16(x.device)):
        *early, last = model.residuals(x, (*exits, len(model.spec.layers)))
        # Every fourth place is enough for the exits: the head costs more than a layer.
        drafts = [model.head(residual[:, 3::4]) for residual in early]
        logits = model.head(last)
    total = torch.zeros((), device=x.device)
    for out in drafts:
        total = total + 0.3 * _mean(_each(out, y[:, 3::4]), w[:, 3::4])
    each = _each(logits, y)
    return total + _mean(each, w), torch.stack([(each * (w >= 1)).sum(), (w >= 1).sum()]).detach()


def _each(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def _mean(each: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (each * w).sum() / w.sum().clamp(min=1e-6)


def optimisers(model: SpecModule, lr: float, planted: Sequence[str] = ()) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, AdamW for the rest. Groups of `planted` weights are marked as such."""
    weights = model.named_weights()
    matrices = {n: p for n, p in weights.items() if p.ndim == 2 and n.startswith("layers.") and "norm" not in n}
    others = [p for n, p in weights.items() if n not in matrices]
    groups = [
        {"params": [p for n, p in matrices.items() if (n in planted) == marked], "planted": marked}
        for marked in (False, True)
    ]
    return [
        Muon([g for g in groups if g["params"]], lr=lr, weight_decay=0.01),
        torch.optim.AdamW([{"params": others, "planted": False}], lr=lr / 7, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def patience(done: float, protect: float) -> float:
    """What the rate of planted weights is multiplied by: a twentieth for half of `protect`, then rising to 1."""
    if protect <= 0:
        return 1.0
    return 0.05 + 0.95 * min(1.0, max(0.0, (done / protect - 0.5) * 2))


def rate(done: float, cooldown: float) -> float:
    """Warm-up over the first hundredth, then flat, then linearly down. `done`: part of the run, 0 to 1."""
    return min(1.0, done / 0.01 + 0.02, max(0.0, (1.0 - done) / cooldown))


@torch.no_grad()
def sample(model: SpecModule, tokenizer: Tokenizer, prompt: str, n: int = 60, seed: int = 0) -> str:
    """`prompt` and `n` tokens after it, at temperature 0.8."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    device = model.tensors["embed"].device
    ids = [0, *tokenizer.encode(prompt).ids]
    for _ in range(n):
        logits = model(torch.tensor([ids], device=device))[0, -1].float().cpu()
        ids.append(int(torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=generator)))
    return str(tokenizer.decode(ids[1:]))


def main() -> None:
    args = arguments()
    console = Console()
    torch.manual_seed(args.seed)
    args.lengths = args.lengths or [(args.length, 1.0)]
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    spec = RECIPES[args.recipe]
    changed = stretched(spec, ModelConfig(model=args.recipe, rope_scaling=args.rope_scaling))
    changed = msgspec.structs.replace(spec, layers=changed.layers)
    model = SpecModule(changed, max(512, *(length for length, _ in args.lengths)))
    if args.resume is not None:
        model.load(read_weights(args.resume, spec))
    planted = planted_weights(spec) if plantable(spec) and not args.plain_start else ()
    if args.resume is None and planted:
        plant(model, args.seed)
    kept = token_dims(spec) if planted else spec.hidden_size
    model.to(args.device)
    # The loss is compiled with the model: on a CPU most of the time is in what stands between the products.
    # It is compiled once per layer and length, which is more than torch does before it gives up.
    torch._dynamo.config.recompile_limit = 128
    descend = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    optims = optimisers(model, args.lr, planted)
    base = [group["lr"] for o in optims for group in o.param_groups]
    embed = model.named_weights()["embed"]
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "loss.jsonl").open("a", encoding="utf-8")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    start = saved = time.monotonic()
    sums = torch.zeros(2, device=args.device)
    with log, Progress(*columns, console=console) as progress:
        task = progress.add_task(args.recipe, total=1.0)
        step, tokens, fresh, since = -1, 0, 0, start

        def over() -> float:
            minutes = (time.monotonic() - start) / 60
            return (step + 1) / args.steps if args.minutes is None else minutes / args.minutes

        for x, y, w in batches(args, over):
            step, done = step + 1, over()
            for group, lr in zip((g for o in optims for g in o.param_groups), base, strict=True):
                slow = patience(done, args.protect) if group["planted"] else 1.0
                group["lr"] = lr * rate(done, args.cooldown) * slow
            loss, counted = descend(model, x, y, w, tuple(args.exits))
            loss.backward()
            slow = patience(done, args.protect)
            reserved = embed[:, kept:].detach().clone() if slow < 1 else None
            for optimiser in optims:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            if reserved is not None:  # AdamW's steps do not shrink with the gradient, so they are undone in part
                with torch.no_grad():
                    embed[:, kept:].lerp_(reserved, 1 - slow)
            sums += counted
            fresh += x.numel()
            if step % 20 == 19:
                mean = float(sums[0] / sums[1])
                sums.zero_()
                speed = fresh / (time.monotonic() - since)
                tokens, fresh, since = tokens + fresh, 0, time.monotonic()
                log.write(json.dumps({"step": step + 1, "tokens": tokens, "loss": round(mean, 4)}) + "\n")
                log.flush()
                progress.update(task, completed=done, description=f"step {step + 1} loss {mean:.3f} {speed:,.0f} tok/s")
                if not math.isfinite(mean):
                    raise SystemExit("the loss is not finite: lower --lr")
            if (time.monotonic() - saved) / 60 > args.save_every:
                export(model, args.data, args.out)
                saved = time.monotonic()
                console.print(sample(model, tokenizer, SAMPLES[0]))
    export(model, args.data, args.out)
    for prompt in SAMPLES:
        console.print("---\n" + sample(model, tokenizer, prompt))


if __name__ == "__main__":
    main()
