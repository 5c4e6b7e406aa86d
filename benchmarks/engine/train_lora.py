"""A LoRA trained on a real model, on one thread, and served: held-out loss, and Penstock's numbers beside torch's.

    python -m benchmarks.engine.train_lora base GGUF - MODEL
    python -m benchmarks.engine.train_lora train MODEL JSONL FOLDER --texts-by GGUF [--steps 120] [--rank 16]
    python -m benchmarks.engine.train_lora check MODEL JSONL FOLDER --texts-by GGUF [--out FILE]

`base` decodes a Qwen2 in GGUF to a folder of bfloat16, MODEL, which torch reads as well. JSONL: lines with question and
answer; answers are learnt. `train` reads the first lines, in an order that `--seed` says, and writes FOLDER as PEFT
would, with held-out losses in FOLDER/training.json. `check` serves held-out lines by Penstock, float32, each once with
the adapter and once without, all in one batch, and compares log-probabilities of every token with those of
transformers' model with the adapter merged into its weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.bf16 import narrow
from penstock.core.model_spec import Attention, FeedForward
from penstock.core.training import Recipe, TrainingExample
from penstock.families.checkpoint import stored_shapes
from penstock.families.registry import open_model
from penstock.formats.safetensors_out import write_safetensors
from penstock.launch.tokenizer import load_tokenizer
from penstock.weights.load import read_weight

HELD_OUT = 16


_NAMES = {
    "attn_norm": "input_layernorm.weight", "ffn_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight", "k": "self_attn.k_proj.weight", "v": "self_attn.v_proj.weight",
    "q.bias": "self_attn.q_proj.bias", "k.bias": "self_attn.k_proj.bias", "v.bias": "self_attn.v_proj.bias",
    "o": "self_attn.o_proj.weight", "gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}  # fmt: skip


def base(options: argparse.Namespace) -> None:
    checkpoint, folder = open_model(Path(options.model)), Path(options.folder)
    spec, shapes = checkpoint.spec, stored_shapes(checkpoint.spec)
    tensors = {}
    for name, ref in checkpoint.weights.items():
        whole = {
            "embed": "model.embed_tokens.weight",
            "final_norm": "model.norm.weight",
            "lm_head": "lm_head.weight",
        }.get(name)
        if whole is None:
            _, n, part = name.split(".", 2)
            whole = f"model.layers.{n}.{_NAMES[part]}"
        tensors[whole] = narrow(read_weight(ref, shapes[name]))
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    layer = spec.layers[0]
    mixer, ffn = layer.mixer, layer.ffn
    assert isinstance(mixer, Attention)
    assert isinstance(ffn, FeedForward)
    assert mixer.rope is not None
    assert layer.norm is not None
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "torch_dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": spec.hidden_size, "num_hidden_layers": len(spec.layers), "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads, "intermediate_size": ffn.width, "vocab_size": spec.vocab_size,
        "rms_norm_eps": layer.norm.eps, "rope_theta": mixer.rope.theta, "tie_word_embeddings": spec.tie_embeddings,
        "max_position_embeddings": spec.max_position, "use_sliding_window": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def examples_of(model: str, path: str, limit: int) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """For training, and the last HELD_OUT lines of the file."""
    checkpoint = open_model(Path(model))
    tokenizer = load_tokenizer(checkpoint.tokenizer, checkpoint.spec)
    assert tokenizer is not None
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    made = []
    for line in [*lines[: 4 * limit], *lines[-HELD_OUT:]]:
        asked = tokenizer.encode_inner(line["question"] + "\n")
        answer = tokenizer.encode_inner(line["answer"] + "\n\n")
        made.append(TrainingExample(asked + answer, [False] * len(asked) + [True] * len(answer)))
    short = [one for one in made[:-HELD_OUT] if len(one.token_ids) <= 192]
    return short[:limit], made[-HELD_OUT:]


def train(options: argparse.Namespace) -> None:
    from penstock.backends.gpu.train.open import open_trainer

    examples, held = examples_of(options.texts_by or options.model, options.jsonl, options.steps)
    recipe = Recipe(
        targets=tuple(options.targets), rank=options.rank, alpha=2.0 * options.rank, learning_rate=options.rate,
        epochs=1, slice_tokens=96, seed=options.seed,
    )  # fmt: skip
    trainer, trained = open_trainer(open_model(Path(options.model)), examples, recipe)

    def held_out() -> float:
        found = [trainer.loss_of(one) for one in held]
        return sum(total for total, _ in found) / sum(count for _, count in found)

    curve = [{"step": 0, "held_out": held_out()}]
    print(curve[-1], flush=True)
    begun, done = time.perf_counter(), 0
    for _ in trainer.work():
        if trainer.step > done and (trainer.step % options.every == 0 or trainer.step == options.stop):
            done = trainer.step
            recent = [loss.value for loss in trainer.losses[-options.every :]]
            curve.append({"step": done, "train": float(np.mean(recent)), "held_out": held_out()})
            print(curve[-1], f"{time.perf_counter() - begun:.0f} s", flush=True)
            if done == options.stop:
                break
    if curve[-1]["step"] != trainer.step:
        curve.append({"step": trainer.step, "held_out": held_out()})
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "adapter_model.safetensors", trained.tensors())
    config = trained.config() | {"base_model_name_or_path": Path(options.model).name}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    result = {
        "model": Path(options.model).name, "text": Path(options.jsonl).name, "examples": len(examples),
        "tokens": trainer.num_tokens, "rank": recipe.rank, "targets": recipe.targets, "rate": recipe.learning_rate,
        "seconds": time.perf_counter() - begun, "curve": curve,
    }  # fmt: skip
    (folder / "training.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


def torch_logprobs(model: str, folder: Path, held: list[TrainingExample]) -> dict[str, list[np.ndarray[Any, Any]]]:
    """Of each token of each text, given those before it: of the model, and with the adapter merged into its weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def all_of() -> list[np.ndarray[Any, Any]]:
        out = []
        for one in held:
            ids = torch.tensor([one.token_ids])
            with torch.no_grad():
                found = torch.log_softmax(net(ids).logits[0, :-1].double(), dim=-1)
            out.append(found.gather(1, ids[0, 1:, None])[:, 0].numpy())
        return out

    plain = all_of()
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                b = tensors[name.replace("lora_A", "lora_B")]
                low = (config["lora_alpha"] / config["r"]) * (b.double() @ a.double())
                weight = net.get_submodule(module).weight
                weight.copy_((weight.double() + low).float())
    return {"base": plain, "adapter": all_of()}


def check(options: argparse.Namespace) -> None:
    from penstock import LLM, LoRARequest, SamplingParams

    folder = Path(options.folder)
    _, held = examples_of(options.texts_by or options.model, options.jsonl, 1)
    held = held[: options.texts]
    wanted = torch_logprobs(options.model, folder, held)
    gc.collect()
    llm = LLM(
        options.model, enable_lora=True, dtype="float32", max_num_seqs=2 * len(held), max_model_len=512, threads=1,
        skip_tokenizer_init=True,
    )  # fmt: skip
    adapter = LoRARequest("trained", 1, str(folder))
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": one.token_ids} for one in held]
    outs = llm.generate(
        [p for p in prompts for _ in range(2)], params, lora_request=[x for _ in held for x in (None, adapter)]
    )  # fmt: skip
    table: dict[str, Any] = {}
    for k, kind in enumerate(("base", "adapter")):
        worst, total, count, apart = 0.0, 0.0, 0, []
        for i, one in enumerate(held):
            found = outs[2 * i + k].prompt_logprobs
            assert found is not None
            own = np.array([found[t][one.token_ids[t]].logprob for t in range(1, len(one.token_ids))])
            apart.append(np.abs(own - wanted[kind][i]))
            worst = max(worst, float(apart[-1].max()))
            chosen = np.array(one.targets[1:])
            total, count = total - float(own[chosen].sum()), count + int(chosen.sum())
        table[kind] = {"loss": total / count, "perplexity": math.exp(total / count), "tokens": count,
                       "worst_difference_to_torch": worst,
                       "mean_difference_to_torch": float(np.concatenate(apart).mean())}  # fmt: skip
    result = {"model": Path(options.model).name, "texts": len(held), "one_batch": 2 * len(held), **table}
    training = folder / "training.json"
    if training.exists():
        result["training"] = json.loads(training.read_text())
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    assert table["adapter"]["worst_difference_to_torch"] < 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("base", "train", "check"))
    parser.add_argument("model")
    parser.add_argument("jsonl")
    parser.add_argument("folder")
    parser.add_argument("--texts-by", metavar="MODEL", help="whose tokenizer reads texts")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--stop", type=int, help="end after so many of the steps")
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=int, default=HELD_OUT, help="held-out lines that `check` serves")
    parser.add_argument("--targets", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    {"base": base, "train": train, "check": check}[options.what](options)


if __name__ == "__main__":
    main()
