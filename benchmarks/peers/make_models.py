"""Checkpoints in the shapes of real models with random weights: nothing to download, and the same work per token.

    python -m benchmarks.peers.make_models qwen2.5-0.5b llama-3.2-1b

Hugging Face's layout (config.json, model.safetensors in bfloat16, tokenizer.json), which every engine or its converter
reads. Weights are normal with a deviation of 0.02, norms are 1, so activations stay in the range of trained models.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.peers.engines import default_place

from penstock.base.bf16 import U16, narrow

DEVIATION = 0.02
_BOTH = {
    "hidden_act": "silu", "max_position_embeddings": 4096, "tie_word_embeddings": True, "attention_dropout": 0.0,
    "use_cache": True, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _BOTH | {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": 24,
    },
    "llama-3.2-1b": _BOTH | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
    },
    "llama-3.1-8b": _BOTH | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
        "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False, "max_position_embeddings": 131072,
    },
    "mha-0.5b": _BOTH | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 14, "intermediate_size": 4864, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": False, "mlp_bias": False,
    },
    "tiny-mha": _BOTH | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 1024,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 1024, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False,
    },
    "tiny": _BOTH | {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 1024,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 1024, "use_sliding_window": False,
        "sliding_window": None, "max_window_layers": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""`tiny` is for trying the harness. It has a head of its own: with two layers and a tied one it would repeat itself.
`mha`: with as many heads of keys and values as of queries; `mha-0.5b` is Qwen2.5-0.5B's shape but for that."""


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, in the order of the file."""
    e, f = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim", e // heads)
    yield "model.embed_tokens.weight", (config["vocab_size"], e)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, width in (("q", heads * d), ("k", kv_heads * d), ("v", kv_heads * d)):
            yield f"{p}self_attn.{name}_proj.weight", (width, e)
            if config["model_type"] == "qwen2":
                yield f"{p}self_attn.{name}_proj.bias", (width,)
        yield f"{p}self_attn.o_proj.weight", (e, heads * d)
        yield f"{p}mlp.gate_proj.weight", (f, e)
        yield f"{p}mlp.up_proj.weight", (f, e)
        yield f"{p}mlp.down_proj.weight", (e, f)
        yield f"{p}input_layernorm.weight", (e,)
        yield f"{p}post_attention_layernorm.weight", (e,)
    yield "model.norm.weight", (e,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], e)


def values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> U16:
    """One tensor as bfloat16 bits."""
    if name.endswith("norm.weight"):
        return narrow(np.ones(shape, np.float32))
    return narrow(rng.standard_normal(shape, np.float32) * np.float32(DEVIATION))


def write_safetensors(path: Path, tensors: Iterator[tuple[str, tuple[int, ...], str, Any]]) -> None:
    """`tensors`: (name, shape, type, function that makes the bytes). One tensor is in memory at a time."""
    listed, header, at = list(tensors), {}, 0
    for name, shape, kind, _ in listed:
        size = int(np.prod(shape)) * {"BF16": 2, "F16": 2, "F32": 4, "I8": 1, "I32": 4, "I64": 8}[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".part")
    with temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, _, make in listed:
            file.write(np.ascontiguousarray(make()).data)
        if file.tell() != 8 + len(text) + at:
            raise ValueError(f"{path}: the tensors do not have the sizes that they should have")
    temporary.replace(path)


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE in Hugging Face's format: bytes, pairs of small letters, and fill that no text becomes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    characters = [chr(b) for b in visible] + [chr(256 + i) for i in range(len(hidden))]
    pairs = [(a, b) for a in string.ascii_lowercase for b in string.ascii_lowercase]
    tokens = ["<|bos|>", "<|endoftext|>", *characters]
    pairs = pairs[: max(1, min(len(pairs), vocab_size - len(tokens)))]
    tokens += [a + b for a, b in pairs]
    tokens += [f"<|fill_{i}|>" for i in range(len(tokens), vocab_size)]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = [
        {"id": i, "content": tokens[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i in (0, 1)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)}, "merges": [f"{a} {b}" for a, b in pairs],
        },
    }  # fmt: skip


def make(name: str, folder: Path, seed: int = 0) -> Path:
    """The checkpoint `folder/name`. Equal seeds make equal bytes."""
    config, out = SHAPES[name], folder / name
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    write_safetensors(
        out / "model.safetensors",
        ((n, shape, "BF16", lambda n=n, shape=shape: values(n, shape, rng)) for n, shape in shapes(config)),
    )
    written = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False},
        "tokenizer.json": tokenizer(config["vocab_size"]),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|endoftext|>",
            "model_max_length": config["max_position_embeddings"],
        },
    }  # fmt: skip
    for file, content in written.items():
        (out / file).write_text(json.dumps(content, indent=1 if file != "tokenizer.json" else None) + "\n", "utf-8")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=default_place().models)
    for name in (args := parser.parse_args()).names:
        print(make(name, args.folder))


if __name__ == "__main__":
    main()
