"""Tiny encoders with random weights and a WordPiece vocabulary, written as files, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = [
    "the",
    "mill",
    "stands",
    "by",
    "river",
    "a",
    "fox",
    "sea",
    "where",
    "does",
    "water",
    "turn",
    "##s",
    "wheel",
    ".",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_tokenizer(folder: Path) -> None:
    vocab = {word: i for i, word in enumerate([*SPECIAL, *WORDS, *"abcdefghijklmnopqrstuvwxyz"])}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_truncation(8)  # which servers must not follow
    made.enable_padding(length=8)
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def write_encoder(folder: Path, *, labels: int = 0, seed: int = 0, width: int = 32, **more: Any) -> Path:
    """A BERT of two layers, with a classifier's head if it has labels. `more`: further fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, vocab, wide = np.random.default_rng(seed), 60, 48
    config: dict[str, Any] = {
        "architectures": ["BertForSequenceClassification" if labels else "BertModel"], "model_type": "bert",
        "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": wide, "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, **more,
    }  # fmt: skip
    if labels:
        config.setdefault("id2label", {str(i): f"class {i}" for i in range(labels)})
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Any] = {}

    def add(name: str, *shape: int) -> None:
        spread = 0.3 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        weights = rng.normal(size=shape, scale=spread).astype(np.float32)
        tensors[name] = weights + np.float32(1.0) if "LayerNorm.weight" in name else weights

    def linear(name: str, out: int, of: int) -> None:
        add(name + ".weight", out, of)
        add(name + ".bias", out)

    def norm(name: str) -> None:
        add(name + ".weight", width)
        add(name + ".bias", width)

    outer = "bert." if labels else ""
    for name, rows in (("word", vocab), ("position", 64), ("token_type", 2)):
        add(f"{outer}embeddings.{name}_embeddings.weight", rows, width)
    norm(f"{outer}embeddings.LayerNorm")
    for i in range(2):
        at = f"{outer}encoder.layer.{i}"
        for name in ("query", "key", "value"):
            linear(f"{at}.attention.self.{name}", width, width)
        linear(f"{at}.attention.output.dense", width, width)
        norm(f"{at}.attention.output.LayerNorm")
        linear(f"{at}.intermediate.dense", wide, width)
        linear(f"{at}.output.dense", width, wide)
        norm(f"{at}.output.LayerNorm")
    linear(f"{outer}pooler.dense", width, width)
    if labels:
        linear("classifier", labels, width)
    save_file(tensors, folder / "model.safetensors")
    write_tokenizer(folder)
    return folder


def add_modules(
    folder: Path, mode: str = "mean", *, dense: int = 0, normalize: bool = True, max_tokens: int | None = None,
    prompts: dict[str, str] | None = None, width: int = 32,
) -> Path:  # fmt: skip
    """What sentence-transformers writes beside a model."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    modules = []
    for i, kind in enumerate(kinds):
        path = f"{i}_{kind}" if i else ""
        modules.append({"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir(exist_ok=True)
        if kind == "Pooling":
            told = {"word_embedding_dimension": width, f"pooling_mode_{mode}": True, "pooling_mode_cls_token": False}
            (folder / path / "config.json").write_text(json.dumps({**told, f"pooling_mode_{mode}": True}))
        if kind == "Dense":
            rng = np.random.default_rng(5)
            told = {"in_features": width, "out_features": dense, "bias": True,
                    "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
            (folder / path / "config.json").write_text(json.dumps(told))
            weights = {"linear.weight": rng.normal(size=(dense, width), scale=0.2).astype(np.float32),
                       "linear.bias": rng.normal(size=dense).astype(np.float32)}  # fmt: skip
            save_file(weights, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    if max_tokens is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return folder
