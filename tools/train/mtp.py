"""A head for multi-token prediction for a model that stays as it is, written with it as one checkpoint.

    PYTHONPATH=src:tools python -m train.mtp MODEL --texts FILE ... --out build/with-head
    penstock bench --model build/with-head --tokenizer MODEL --speculative-config '{"method": "mtp"}' ...

MODEL is any that Penstock opens and `train.interpreter` can say: Llama's shape, with biases of q, k and v or without.
The checkpoint has MiMo's layout, whose prediction layer is a layer of the model's own kind (biases that the model does
not have are zeros). The head learns the model's own distribution (`train.mtp_texts`), by cross-entropy over the tokens
that are likely somewhere in the batch and a sample of all others, which stands for them all; drafting goes on from the
head's own states, so training does too (`--unroll`). A sixteenth of the texts is held out, and what the head gets right
there is counted over all tokens. Everything follows from `--seed` and the number of threads.

Stopped, it goes on where it was when it is started again: `OUT/training` has the texts, the newest state and, line by
line, the losses. With another `--seed` it goes on with more texts, beside those that are there.

Source: `families.mtp`; Li et al., EAGLE, arXiv 2401.15077, section 3.2; sampled softmax: Jean et al., arXiv 1412.2007.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from penstock.core.model_spec import Attention, FeedForward, ModelSpec
from penstock.families.checkpoint import Checkpoint
from penstock.families.mtp import mtp_heads
from penstock.families.qwen import MiMo
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from train.interpreter import SpecModule
from train.mtp_texts import Texts, prepare

DECAY = 0.7
"""What a further pass of the head counts for, relative to the one before."""
HELD_OUT = 16
"""One of so many texts."""
WARM_UP = 30


def mimo_config(spec: ModelSpec) -> dict[str, Any]:
    """config.json in MiMo's layout. Raises ValueError for a model of another shape."""
    layer = spec.layers[0]
    m, f = layer.mixer, layer.ffn
    plain = isinstance(m, Attention) and m.rope is not None and isinstance(f, FeedForward) and f.gated
    if not plain or any(other != layer for other in spec.layers):
        raise ValueError("only layers of one kind, with rotary attention and a gated feed-forward, have such a layout")
    assert isinstance(m, Attention)
    assert m.rope is not None
    assert isinstance(f, FeedForward)
    return {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size, "intermediate_size": f.width, "num_hidden_layers": len(spec.layers),
        "num_attention_heads": m.num_heads, "num_key_value_heads": m.num_kv_heads, "head_dim": m.head_dim,
        "hidden_act": f.activation, "rms_norm_eps": layer.norm.eps, "rope_theta": m.rope.theta,
        "max_position_embeddings": spec.max_position, "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": spec.bos_token_id, "eos_token_id": list(spec.eos_token_ids), "torch_dtype": "bfloat16",
        "attention_bias": True, "num_nextn_predict_layers": 1,
    }  # fmt: skip


class Frozen:
    """What training needs of a model that does not change: its tables [V, E], one and the same where it ties them."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.embed = weights["embed"].float()
        self.output = self.embed if spec.tie_embeddings else weights["lm_head"].float()


def weights_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All weights of a model in bfloat16, by logical name."""
    loaded = load_weights(checkpoint, checkpoint.spec, "bfloat16")
    return {name: torch.from_numpy(np.array(w).view(np.int16)).view(torch.bfloat16) for name, w in loaded.items()}


def start(head: SpecModule, model: Frozen, weights: Mapping[str, Tensor]) -> None:
    """As the model's last layer and norm, reading the embedding and a little of the hidden state."""
    e, last = model.spec.hidden_size, f"layers.{len(model.spec.layers) - 1}."
    with torch.no_grad():
        for name, p in head.named_weights().items():
            own = name.replace("layers.0.", last)
            if name.startswith("layers.0.") or name == "final_norm":
                p.copy_(weights[own]) if own in weights else p.zero_()
        size = model.embed.square().mean().sqrt()
        head._w("embed_in").copy_(torch.cat([0.2 * size * torch.eye(e), size * torch.eye(e)], 1))  # the state first


def states(head: SpecModule, hidden: Tensor, embeddings: Tensor) -> Tensor:
    """[B, T, E] the head's states of pairs. Shapes: hidden and embeddings [B, T, E]."""
    pair = head.spec.pair
    assert pair is not None
    assert pair.hidden_first
    x = torch.cat([head._norm(hidden, "hidden_norm", pair.norm), head._norm(embeddings, "token_norm", pair.norm)], -1)
    assert head.spec.final_norm is not None
    return head._norm(head._layer(head._linear(x, "embed_in"), "layers.0.", head.spec.layers[0]), "final_norm",
                      head.spec.final_norm)  # fmt: skip


class Batch:
    """Some texts as tensors: see `Texts`. `before`: the hidden states that stand in the pairs of the first pass.

    Slot i holds token i and the state before it, as in `drafters.mtp`; nothing stands before the first.
    """

    def __init__(self, texts: Texts, rows: Any, model: Frozen) -> None:
        self.best = torch.from_numpy(texts.best[rows]).long()
        self.probs = torch.from_numpy(texts.probs[rows]).float()
        self.embeddings = F.embedding(torch.from_numpy(texts.tokens[rows]).long(), model.embed) * model.spec.embed_scale
        self.before = F.pad(torch.from_numpy(texts.hidden[rows]).float()[:, :-1], (0, 0, 1, 0))


def loss_of(
    model: Frozen, head: SpecModule, batch: Batch, passes: int, others: int, products: Any
) -> tuple[Tensor, list[float]]:  # fmt: skip
    """(loss, share of each pass's drafts that are the model's first choice among the tokens looked at).

    `products`: a context in which matrices are multiplied.
    """
    near = torch.unique(batch.best)
    vocab = len(model.output)
    ids = torch.cat([near, torch.randint(vocab, (others,))])
    table = model.output[ids] * model.spec.logit_scale
    # Each of the sample stands for as many as there are to one of it. One that is among the near ones is left out.
    shift = torch.zeros(len(ids))
    shift[len(near) :] = math.log(max(1, vocab - len(near)) / others)
    shift[len(near) :][torch.isin(ids[len(near) :], near)] = -math.inf
    want = torch.searchsorted(near, batch.best)
    before, total, weight, right = batch.before, torch.zeros(()), 0.0, []
    for s in range(passes):
        with products():
            found = states(head, before, batch.embeddings)
            logits = F.linear(found[:, s + 1 :], table)
        found, logits = found.float(), logits.float() + shift
        losses = logits.logsumexp(-1) - (logits.gather(-1, want[:, s + 1 :]) * batch.probs[:, s + 1 :]).sum(-1)
        total, weight = total + DECAY**s * losses.mean(), weight + DECAY**s
        right.append((logits.argmax(-1) == want[:, s + 1 :, 0]).float().mean().item())
        before = F.pad(found[:, :-1], (0, 0, 1, 0))
    return total / weight, right


@torch.no_grad()
def held_out(model: Frozen, head: SpecModule, texts: Texts, rows: Any, passes: int) -> list[float]:
    """Share of each pass's drafts that are the model's first choice, of all tokens; every fourth place."""
    right = [0.0] * passes
    for row in rows:
        batch = Batch(texts, [row], model)
        before = batch.before
        for s in range(passes):
            found = states(head, before, batch.embeddings)
            best = F.linear(found[0, s + 1 :: 4], model.output).argmax(-1)
            right[s] += (best == batch.best[0, s + 1 :: 4, 0]).float().mean().item() / len(rows)
            before = F.pad(found[:, :-1], (0, 0, 1, 0))
    return right


def save(weights: Mapping[str, Tensor], head: SpecModule, config: dict[str, Any], out: Path) -> None:
    """One checkpoint of the model and its head, in bfloat16; biases that the model does not have are zeros."""
    family = MiMo()
    spec = family.spec(config)
    (found,) = mtp_heads(family, spec, 1)
    own = {name: p.detach().to(torch.bfloat16) for name, p in head.named_weights().items()}
    tensors: dict[str, Tensor] = {}
    for have, places in ((weights, family.weight_map(spec)), (own, found.places)):
        for name, place in places.items():
            if name in have:
                tensors[str(place)] = have[name].contiguous()
            else:
                tensors[str(place)] = torch.zeros(len(have[name.removesuffix(".bias")]), dtype=torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


class Training:
    """A head and how far it is; `folder` keeps it."""

    def __init__(self, head: SpecModule, lr: float, folder: Path) -> None:
        self.head, self.lr, self.step, self.seconds = head, lr, 0, 0.0
        self.optimiser = torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._state, self._log = folder / "state.pt", folder / "log.jsonl"

    def resume(self) -> bool:
        """Whether there was something to go on from."""
        if not self._state.exists():
            return False
        kept = torch.load(self._state, weights_only=True)
        self.head.load_state_dict(kept["head"])
        self.optimiser.load_state_dict(kept["optimiser"])
        self.step, self.seconds = kept["step"], kept["seconds"]
        return True

    def keep(self) -> None:
        new = self._state.with_suffix(".new")
        own = {"head": self.head.state_dict(), "optimiser": self.optimiser.state_dict()}
        torch.save(own | {"step": self.step, "seconds": self.seconds}, new)
        new.replace(self._state)

    def advance(self, loss: Tensor, steps: int) -> None:
        """The rate rises at first and falls to nothing in the last third of `steps`."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.lr * min(1.0, (self.step + 1) / WARM_UP, 3 * (steps - self.step) / steps)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1

    def write(self, **line: Any) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop for now behind so many, unfinished")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--own", type=int, default=256, help="texts that the model writes beforehand")
    parser.add_argument("--read", type=int, default=256, help="texts out of the files")
    parser.add_argument("--unroll", type=int, default=2, help="passes that each place is trained for")
    parser.add_argument("--others", type=int, default=4096, help="tokens that stand for those that are nowhere likely")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--bfloat16", action="store_true", help="products in bfloat16, where a processor has instructions for them"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from penstock.launch.hub import local_path

    console, folder = Console(stderr=True, highlight=False), args.out / "training"
    checkpoint = open_model(local_path(args.model))
    config = mimo_config(checkpoint.spec)
    prepare(
        args.model, args.texts, folder / f"texts-{args.seed}.npz", own=args.own, read=args.read, length=args.length,
        seed=args.seed, threads=args.threads, say=console.print,
    )  # fmt: skip
    texts = Texts.joined(sorted(folder.glob("texts-*.npz")))
    apart = list(range(0, len(texts), HELD_OUT))
    taught = np.setdiff1d(np.arange(len(texts)), apart)
    family = MiMo()
    (found,) = mtp_heads(family, family.spec(config), 1)
    weights = weights_of(checkpoint)
    model, head = Frozen(checkpoint.spec, weights), SpecModule(found.spec, args.length)
    training = Training(head, args.lr, folder)
    if not training.resume():
        start(head, model, weights)
    del weights
    products = partial(torch.autocast, "cpu", torch.bfloat16, enabled=args.bfloat16)
    began, before = time.monotonic(), training.seconds
    shown: list[Any] = []
    while training.step < args.steps and (time.monotonic() - began) / 60 < args.minutes:
        seeds = np.random.default_rng((args.seed, training.step))
        torch.manual_seed(int(seeds.integers(1 << 31)))
        rows = seeds.choice(taught, args.rows, replace=False)
        loss, right = loss_of(model, head, Batch(texts, rows, model), args.unroll, args.others, products)
        training.advance(loss, args.steps)
        shown.append([loss.item(), *right])
        training.seconds = before + time.monotonic() - began
        if training.step % 25 == 0 or training.step == args.steps:
            mean, line = np.mean(shown, axis=0), {"step": training.step, "minutes": round(training.seconds / 60, 2)}
            line |= {"loss": round(float(mean[0]), 4), "right": [round(float(x), 4) for x in mean[1:]]}
            shown.clear()
            if training.step % 100 == 0 or training.step == args.steps:
                line |= {"held_out": [round(x, 4) for x in held_out(model, head, texts, apart, args.unroll)]}
                training.keep()
            training.write(**line)
            console.print(str(line))
    training.keep()
    save(weights_of(checkpoint), head, config, args.out)


if __name__ == "__main__":
    main()
