"""Real vocabularies for the tests of `text`, each built once."""

from __future__ import annotations

import base64
import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.formats.sentencepiece import parse_sentencepiece, read_sentencepiece
from penstock.formats.vocab_files import read_bpe, read_rwkv_vocab, read_tiktoken
from penstock.text.byte_bpe import bpe_tokenizer, tiktoken_tokenizer
from penstock.text.sentencepiece import ScoredPieces, sentencepiece_tokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.text.world import world_tokenizer
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


# Vocabularies in their own formats, read by the package's readers.


@cache
def sentencepiece(*parts: str) -> Tokenizer:
    return sentencepiece_tokenizer(ScoredPieces(**vars(read_sentencepiece(shared(*parts)))))


def stories512_spm() -> Tokenizer:
    return sentencepiece("models", "stories260K", "tok512.model")


def llama2_spm() -> Tokenizer:
    return sentencepiece("data", "tokenizers", "llama2", "tokenizer.model")


def mistral1() -> Tokenizer:
    return sentencepiece("data", "tokenizers", "mistral", "tokenizer.model.v1")


def mistral3() -> Tokenizer:
    return sentencepiece("data", "tokenizers", "mistral", "mistral_instruct_tokenizer_240323.model.v3")


def _number(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | float | bytes) -> bytes:
    """One protobuf field."""
    if isinstance(value, float):
        return _number(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    return _number(number << 3 | 2) + _number(len(value)) + value


def model_proto(
    pieces: list[tuple[str, float, int]], trainer: dict[int, Any] | None = None, normal: dict[int, Any] | None = None
) -> bytes:
    """A SentencePiece model: (piece, score, type) by id, and fields of its two specifications by number."""
    out = b"".join(field(1, field(1, p.encode()) + field(2, s) + field(3, t)) for p, s, t in pieces)
    for number, settings in ((2, trainer), (3, normal)):
        out += field(number, b"".join(field(n, value) for n, value in (settings or {}).items()))
    return out


@cache
def t5_proto() -> bytes:
    """T5's `spiece.model`, put together from its tokenizer.json (without the sentinels, which are added tokens)."""
    data = json.loads(shared("data", "tokenizers", "t5-small", "tokenizer.json").read_text("utf-8"))
    types = {0: 3, 1: 3, 2: 2}
    pieces = [(p, float(s), types.get(i, 1)) for i, (p, s) in enumerate(data["model"]["vocab"][:32000])]
    return model_proto(pieces, {3: 1}, {2: base64.b64decode(data["normalizer"]["precompiled_charsmap"])})


@cache
def t5_spm() -> Tokenizer:
    vocab = ScoredPieces(**vars(parse_sentencepiece(t5_proto())))
    return sentencepiece_tokenizer(vocab, {"tokenizer_class": "T5Tokenizer"})


def pair(folder: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    names = {"gpt2": ("vocab.json", "merges.txt"), "llama3.2": ("encoder.json", "vocab.bpe")}[folder]
    vocab, merges = (shared("data", "tokenizers", folder, name) for name in names)
    return read_bpe(vocab, merges)


@cache
def gpt2_pair() -> Tokenizer:
    return bpe_tokenizer(*pair("gpt2"), {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})


LLAMA3_CONFIG = {
    "split_pattern": "llama-bpe", "add_bos_token": True, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
    "added_tokens_decoder": {
        "128000": {"content": "<|begin_of_text|>", "special": True},
        "128009": {"content": "<|eot_id|>", "special": True},
    },
}  # fmt: skip


@cache
def llama3() -> Tokenizer:
    return bpe_tokenizer(*pair("llama3.2"), LLAMA3_CONFIG)


@cache
def cl100k_ranks() -> dict[bytes, int]:
    return read_tiktoken(shared("data", "tokenizers", "cl100k", "cl100k_base.tiktoken"))


@cache
def cl100k() -> Tokenizer:
    return tiktoken_tokenizer(cl100k_ranks(), "cl100k_base")


@cache
def world_tokens() -> dict[int, bytes]:
    return read_rwkv_vocab(shared("data", "tokenizers", "rwkv", "rwkv_vocab_v20230424.txt"))


@cache
def world() -> Tokenizer:
    return world_tokenizer(world_tokens())
