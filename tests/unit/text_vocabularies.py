"""Real vocabularies for the tests of `text`, each built once."""

from __future__ import annotations

import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.text.tokenizer import Tokenizer
from tests.shared import shared

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PHI = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|im_sep|>", "<|tool|>", "<|/tool|>"]
OTHERS = [
    "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<s>", "</s>", "[INST]", "[/INST]", "<extra_id_0>", "<extra_id_1>", "<|start|>", "<|message|>",
    "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>", "<|turn>", "<turn|>", "<|think|>", "<|tool>", "<tool|>",
]  # fmt: skip
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def read_bin(*parts: str) -> list[tuple[bytes, float]]:
    """A llama2.c tokenizer file, read independently of `penstock.formats`."""
    raw = shared(*parts).read_bytes()
    at, out = 4, []
    while at < len(raw):
        score, size = struct.unpack_from("<fi", raw, at)
        out.append((raw[at + 8 : at + 8 + size], score))
        at += 8 + size
    return out


@cache
def stories512() -> Tokenizer:
    return Tokenizer.from_pieces(read_bin("models", "stories260K", "tok512.bin"), 1, 2)


@cache
def stories4096() -> Tokenizer:
    return Tokenizer.from_pieces(read_bin("data", "tokenizers", "stories", "tok4096.bin"), 1, 2)


@cache
def llama2() -> Tokenizer:
    return Tokenizer.from_pieces(read_bin("data", "tokenizers", "llama2", "tokenizer.bin"), 1, 2)


def llama2_json() -> dict[str, Any]:
    """Llama 2's tokenizer.json. The copy we have was damaged on its way: no-break spaces became spaces."""
    data = json.loads(shared("data", "tokenizers", "llama2", "tokenizer.json").read_text("utf-8"))
    vocab = data["model"]["vocab"]
    nbsp = "\u00a0"
    data["model"]["vocab"] = {piece.replace(" ", nbsp): i for piece, i in vocab.items()}
    damaged = {"   ": f"{nbsp} {nbsp}", "     ": f"{nbsp * 2} {nbsp * 2}", "\u2581  ": f"\u2581 {nbsp}"}
    data["model"]["merges"] = [damaged.get(merge, merge) for merge in data["model"]["merges"]]
    return data


def save(data: dict[str, Any]) -> Path:
    path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    path.write_text(json.dumps(data, ensure_ascii=False), "utf-8")
    return path


@cache
def llama2_hf() -> Tokenizer:
    return Tokenizer.from_hf(save(llama2_json()), {"bos_token": "<s>", "eos_token": {"content": "</s>"}})


@cache
def phi3() -> Tokenizer:
    return Tokenizer.from_hf(
        shared("data", "tokenizers", "phi-3-mini", "tokenizer.json"),
        json.loads(shared("data", "configs", "chat", "phi-3-mini.tokenizer_config.json").read_text("utf-8")),
    )


@cache
def t5() -> Tokenizer:
    return Tokenizer.from_hf(shared("data", "tokenizers", "t5-small", "tokenizer.json"), {"eos_token": "</s>"})


def gpt2_backend() -> tokenizers.Tokenizer:
    """GPT-2's tokenizer made of its two files."""
    folder = shared("data", "tokenizers", "gpt2")
    vocab = json.loads((folder / "vocab.json").read_text("utf-8"))
    lines = (folder / "merges.txt").read_text("utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


@cache
def gpt2_path() -> Path:
    path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    gpt2_backend().save(str(path))
    return path


@cache
def gpt2() -> Tokenizer:
    return Tokenizer.from_hf(gpt2_path(), {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})


@cache
def chat_path() -> Path:
    """GPT-2's vocabulary with the control tokens of many model families: stands in for the tokenizers we lack."""
    backend = gpt2_backend()
    backend.add_special_tokens(
        [tokenizers.AddedToken(t, normalized=False, special=True) for t in CHATML + PHI + OTHERS]
    )
    backend.add_tokens([tokenizers.AddedToken(t, normalized=False, special=False) for t in MARKERS])
    path = Path(tempfile.mkdtemp()) / "tokenizer.json"
    backend.save(str(path))
    return path


@cache
def chat() -> Tokenizer:
    return Tokenizer.from_hf(chat_path(), {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})


def golden_texts(name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's test texts of one vocabulary, with their ids."""
    folder = shared("data", "tokenizers", "golden")
    texts = (folder / f"llamacpp_{name}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / f"llamacpp_{name}.out").read_text("utf-8").splitlines()
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=False)]
