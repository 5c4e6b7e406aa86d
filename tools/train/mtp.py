"""A head for multi-token prediction for a model that stays as it is, written with it as one checkpoint.

    PYTHONPATH=tools python -m train.mtp MODEL --texts FILE ... --out build/with-head
    penstock bench --model build/with-head --tokenizer MODEL --speculative-config '{"method": "mtp"}' ...

MODEL is any that Penstock opens and `train.interpreter` can say: Llama's shape, with biases of q, k and v or without.
The checkpoint has MiMo's layout, whose prediction layer is a layer of the model's own kind (biases that the model does
not have are zeros). The head learns from texts that the model writes itself behind beginnings of the files, by
cross-entropy against the model's own distribution; drafting goes on from the head's own states, so training does too
(`--unroll`). Everything follows from `--seed`. Source: `families.mtp`; Li et al., EAGLE, arXiv 2401.15077, section 3.2.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from penstock import LLM, SamplingParams
from penstock.core.model_spec import Attention, FeedForward, ModelSpec
from penstock.families.mtp import mtp_head
from penstock.families.qwen import MiMo
from penstock.families.registry import open_model
from penstock.weights.load import load_weights
from train.heads import logits_of
from train.interpreter import SpecModule

DECAY = 0.7
"""What a further pass of the head counts for, relative to the one before."""


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


def start(head: SpecModule, model: SpecModule) -> None:
    """As the model's last layer and norm, reading the embedding and a little of the hidden state."""
    e, last = model.spec.hidden_size, f"layers.{len(model.spec.layers) - 1}."
    with torch.no_grad():
        for name, p in head.named_weights().items():
            own = name.replace("layers.0.", last)
            if name.startswith("layers.0.") or name == "final_norm":
                p.copy_(model._w(own)) if model._has(own) else p.zero_()
        size = model._w("embed").square().mean().sqrt()
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


def loss_of(model: SpecModule, head: SpecModule, tokens: Tensor, passes: int, every: int) -> tuple[Tensor, Tensor]:
    """(loss, share of each pass's drafts that are the model's first choice). Shapes: tokens [B, T]."""
    assert model.spec.final_norm is not None
    with torch.no_grad():
        hidden = model._norm(model.hidden(tokens), "final_norm", model.spec.final_norm)
        embeddings = model._w("embed")[tokens] * model.spec.embed_scale
    # Slot i holds token i and the state before it, as in `drafters.mtp`; nothing stands before the first.
    before = F.pad(hidden[:, :-1], (0, 0, 1, 0))
    total, weight, right = torch.zeros(()), 0.0, []
    for s in range(passes):
        found = states(head, before, embeddings)
        at = torch.arange(s + 1 + int(torch.randint(every, ())), tokens.shape[1], every)
        with torch.no_grad():
            want = torch.softmax(logits_of(model, hidden[:, at]), -1)
        logits = logits_of(model, found[:, at])
        cross = F.cross_entropy(logits.flatten(0, 1), want.flatten(0, 1))
        total, weight = total + DECAY**s * cross, weight + DECAY**s
        right.append((logits.argmax(-1) == want.argmax(-1)).float().mean().detach())
        before = F.pad(found[:, :-1], (0, 0, 1, 0))
    return total / weight, torch.stack(right)


def own_texts(model: str, files: list[Path], count: int, length: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """What the model writes behind beginnings taken from the files; half greedily, half at temperature 0.8."""
    llm, rng = LLM(model, max_model_len=length), random.Random(seed)
    every = [llm.get_tokenizer().encode(path.read_text("utf-8")) for path in files]
    prompts = []
    for _ in range(count):
        ids = rng.choice(every)
        at = rng.randrange(max(1, len(ids) - length // 4))
        prompts.append(ids[at : at + length // 4])
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=length - len(p), ignore_eos=True, detokenize=False)
        for i, p in enumerate(prompts)
    ]
    written = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    return [np.array([*p, *w.outputs[0].token_ids], np.int64) for p, w in zip(prompts, written, strict=True)]


def save(model: SpecModule, head: SpecModule, config: dict[str, Any], out: Path) -> None:
    family = MiMo()
    spec = family.spec(config)
    found = mtp_head(family, spec)
    assert found is not None
    tensors: dict[str, Tensor] = {}
    for module, places in ((model, family.weight_map(spec)), (head, found.places)):
        have = module.named_weights()
        for name, place in places.items():
            rows = have.get(name)
            if rows is None:  # a bias that the model does not have
                rows = torch.zeros(have[name.removesuffix(".bias")].shape[0])
            tensors[str(place)] = rows.detach().to("cpu", torch.bfloat16).contiguous()
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--own", type=int, default=256, help="texts that the model writes beforehand")
    parser.add_argument("--unroll", type=int, default=2, help="passes that each place is trained for")
    parser.add_argument("--every", type=int, default=4, help="every so many places only: the output matrix costs most")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    from penstock.launch.hub import local_path

    checkpoint = open_model(local_path(args.model))
    config = mimo_config(checkpoint.spec)
    texts = own_texts(args.model, args.texts, args.own, args.length, args.seed)
    model = SpecModule(checkpoint.spec, args.length)
    model.load(load_weights(checkpoint, checkpoint.spec, "float32"))
    model.requires_grad_(False)
    family = MiMo()
    found = mtp_head(family, family.spec(config))
    assert found is not None
    head = SpecModule(found.spec, args.length)
    start(head, model)
    optimiser = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    rng, console, began = random.Random(args.seed), Console(stderr=True), time.monotonic()
    shown = torch.zeros(args.unroll)
    for step in range(args.steps):
        for group in optimiser.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 20, (args.steps - step) / args.steps / 0.5)
        tokens = torch.from_numpy(np.stack([rng.choice(texts) for _ in range(args.rows)]))
        loss, right = loss_of(model, head, tokens, args.unroll, args.every)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        shown += right
        if (step + 1) % 25 == 0:
            shares = ", ".join(f"{s:.1%}" for s in (shown / 25).tolist())
            minutes = (time.monotonic() - began) / 60
            console.print(f"{minutes:.1f} min, step {step + 1}: loss {loss.item():.3f}, right drafts {shares}")
            shown.zero_()
    save(model, head, config, args.out)


if __name__ == "__main__":
    main()
