"""What a fine-tuned model's difference to its base takes in few bits, and what it is worth when it is served.

    python -m benchmarks.engine.deltas decode GGUF BASE
    python -m benchmarks.engine.deltas pair GGUF BASE TUNED TEXT [--steps 150]
    python -m benchmarks.engine.deltas measure BASE TUNED TEXT --texts-by GGUF [--out FILE]

`decode` makes of a Llama in GGUF BASE, a folder of bfloat16; `pair` does, and trains all products of its layers with
torch, one thread, on the first nine tenths of a text: TUNED, float32. `measure` writes deltas of several kinds, as
`penstock quantize --delta-of` does, serves them over BASE beside each other in one batch, and compares with TUNED
served by itself: the perplexity of the last tenth of the text, and nats per token from what TUNED expects (of its 20
likeliest tokens and all others as one).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.bf16 import narrow
from penstock.families.checkpoint import stored_shapes
from penstock.families.registry import open_model
from penstock.formats.safetensors_out import write_safetensors
from penstock.launch.tokenizer import load_tokenizer
from penstock.weights.load import read_weight

KINDS = ((1, 0), (1, 64), (2, 64), (4, 64), (8, 0))
"""Bits, and inputs that share a scale."""
WINDOW, TOP = 256, 20
_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "q": "self_attn.q_proj",
    "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_WHOLE = {"embed": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}


def decode(gguf: str, folder: Path) -> None:
    checkpoint = open_model(Path(gguf))
    spec, shapes, tensors = checkpoint.spec, stored_shapes(checkpoint.spec), {}
    mixer: Any = spec.layers[0].mixer
    ffn: Any = spec.layers[0].ffn
    norm: Any = spec.layers[0].norm
    for name, ref in checkpoint.weights.items():
        x, last = read_weight(ref, shapes[name]), name.rpartition(".")[2]
        if last in ("q", "k") and mixer.rope.interleaved:  # pairs side by side become halves
            x = x.reshape(-1, mixer.head_dim // 2, 2, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
        module = _WHOLE.get(name) or f"model.layers.{name.split('.')[1]}.{_NAMES[last]}"
        tensors[f"{module}.weight"] = narrow(np.ascontiguousarray(x))
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": spec.hidden_size, "num_hidden_layers": len(spec.layers), "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads, "intermediate_size": ffn.width, "vocab_size": spec.vocab_size,
        "rms_norm_eps": norm.eps, "rope_theta": mixer.rope.theta, "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.max_position, "head_dim": mixer.head_dim,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def tokens_of(gguf: str, text: str) -> list[int]:
    checkpoint = open_model(Path(gguf))
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.spec)
    assert tokenizer is not None
    return list(tokenizer.encode_inner(Path(text).read_text()))


def pair(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    base, tuned = Path(options.base), Path(options.tuned)
    decode(options.model, base)
    ids = tokens_of(options.model, options.text)
    learnt = torch.tensor(ids[: len(ids) * 9 // 10])
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    net = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = [p for name, p in net.named_parameters() if p.ndim == 2 and ".layers." in name]
    for p in net.parameters():
        p.requires_grad_(False)
    for p in wanted:
        p.requires_grad_(True)
    how = torch.optim.AdamW(wanted, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0)
    rng, begun, losses = np.random.default_rng(options.seed), time.perf_counter(), []
    for step in range(options.steps):
        for group in how.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / options.steps)
        at = int(rng.integers(0, len(learnt) - options.window))
        window = learnt[None, at : at + options.window]
        loss = net(window, labels=window).loss
        loss.backward()
        how.step()
        how.zero_grad()
        losses.append(float(loss))
        if step % 10 == 9:
            print(step + 1, f"{np.mean(losses[-10:]):.3f}", f"{time.perf_counter() - begun:.0f} s", flush=True)
    tuned.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().numpy() for n, p in net.named_parameters() if n != "lm_head.weight"}
    write_safetensors(tuned / "model.safetensors", tensors, {"format": "pt"})
    (tuned / "config.json").write_text((base / "config.json").read_text().replace("bfloat16", "float32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    decoding = commands.add_parser("decode")
    decoding.add_argument("model")
    decoding.add_argument("base")
    decoding.set_defaults(run=lambda given: decode(given.model, Path(given.base)))
    making = commands.add_parser("pair")
    making.add_argument("model")
    making.set_defaults(run=pair)
    measuring = commands.add_parser("measure")
    measuring.set_defaults(run=measure)
    for one in (making, measuring):
        one.add_argument("base")
        one.add_argument("tuned")
        one.add_argument("text")
    making.add_argument("--steps", type=int, default=150)
    making.add_argument("--rate", type=float, default=1e-4)
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("--window", type=int, default=192)
    measuring.add_argument("--texts-by", required=True, metavar="GGUF", help="whose tokenizer reads the text")
    measuring.add_argument("--windows", type=int, default=8)
    measuring.add_argument("--threads", type=int, default=1)
    measuring.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.run(options)


def expected(llm: Any, windows: list[list[int]], adapter: Any = None) -> list[list[dict[int, float]]]:
    """Of each window, what is expected at each position but the first: of the likeliest tokens and the text's own."""
    from penstock import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in windows]
    outs = llm.generate(prompts, params, **({} if adapter is None else {"lora_request": adapter}))
    return [[{t: found.logprob for t, found in each.items()} for each in out.prompt_logprobs[1:]] for out in outs]


def perplexity(found: list[list[dict[int, float]]], windows: list[list[int]]) -> float:
    own = [each[t] for rows, ids in zip(found, windows, strict=True) for each, t in zip(rows, ids[1:], strict=True)]
    return math.exp(-float(np.mean(own)))


def divergence(wanted: list[list[dict[int, float]]], found: list[list[dict[int, float]]]) -> float:
    """Nats per token, of the tokens that both name and all others as one: at most the whole divergence."""
    out = []
    for rows, others in zip(wanted, found, strict=True):
        for p, q in zip(rows, others, strict=True):
            both = sorted(set(p) & set(q))
            a, b = (np.exp([each[t] for t in both]) for each in (p, q))
            rest = max(1e-9, 1 - a.sum()), max(1e-9, 1 - b.sum())
            out.append(float((a * np.log(a / b)).sum() + rest[0] * np.log(rest[0] / rest[1])))
    return float(np.mean(out))


def measure(options: argparse.Namespace) -> None:
    from penstock import LLM, LoRARequest
    from penstock.model.adapted import adaptable
    from penstock.weights.adapters import model_sites
    from penstock.weights.delta import write_delta

    ids = tokens_of(options.texts_by, options.text)
    held = ids[len(ids) * 9 // 10 :]
    windows = [held[i * WINDOW : (i + 1) * WINDOW] for i in range(options.windows)]
    small: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 512, "threads": options.threads, "skip_tokenizer_init": True,
        "max_num_seqs": 16,
    }  # fmt: skip
    base, tuned = open_model(Path(options.base)), open_model(Path(options.tuned))
    sites = model_sites(base.weights, base.spec, adaptable(base.spec))
    llm = LLM(options.tuned, **small)
    wanted = expected(llm, windows)
    del llm
    gc.collect()
    whole = 2 * sum(
        s.inputs * (len(s.rows) if s.rows is not None else s.outputs) for own in sites.values() for s in own
    )
    rows: list[dict[str, Any]] = [
        {"kind": "fine-tuned model", "bytes": whole, "perplexity": perplexity(wanted, windows), "kl": 0.0}
    ]
    with tempfile.TemporaryDirectory() as scratch:
        asked, written = [], []
        for i, (bits, group) in enumerate(KINDS):
            folder = Path(scratch) / f"{bits}-{group}"
            written.append(write_delta(base, tuned, sites, folder, bits=bits, group=group))
            asked.append(LoRARequest(folder.name, i + 1, str(folder)))
            print(folder.name, written[-1], flush=True)
        llm = LLM(options.base, enable_lora=True, max_loras=len(KINDS), lora_memory=2.0, **small)
        plain = expected(llm, windows)
        rows.append({"kind": "base", "bytes": 0, "perplexity": perplexity(plain, windows),
                     "kl": divergence(wanted, plain)})  # fmt: skip
        many = [ids for ids in windows for _ in asked]
        together = expected(llm, many, asked * len(windows))
        for i, ((bits, group), own) in enumerate(zip(KINDS, written, strict=True)):
            found = together[i :: len(asked)]
            rows.append({
                "kind": f"delta of {bits} bits, " + (f"a scale per {group}" if group else "a scale per output"),
                "bytes": own.num_bytes, "squared_difference_lost": own.lost,
                "perplexity": perplexity(found, windows), "kl": divergence(wanted, found),
            })  # fmt: skip
    result = {"base": Path(options.base).name, "text": Path(options.text).name, "tokens": len(windows) * (WINDOW - 1),
              "of_bytes": whole, "rows": rows}  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
