"""Special tokens of a GGUF file, and its tokenizer."""

from __future__ import annotations

from penstock.base.errors import ModelError
from penstock.families.chat_templates import gguf_templates
from penstock.families.checkpoint import TokenizerFiles
from penstock.families.gguf.header import section
from penstock.formats.files import quoted
from penstock.formats.gguf import Gguf


def special_tokens(gguf: Gguf, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """The token a text begins with, and those that end it: of a text, of a turn, of a message."""
    fields = section(gguf, "tokenizer.ggml.")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > vocab_size:
        raise ModelError(f"{quoted(gguf.path)} has more tokens than the {vocab_size} rows of its embedding")
    # Files of SentencePiece vocabularies may leave out what is always the same there.
    pieces = gguf.metadata.get("tokenizer.ggml.model") == "llama" and vocab_size > 2
    bos = fields.token_ids("bos_token_id", vocab_size, default=(1,) if pieces else ())
    ends: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ends += fields.token_ids(name, vocab_size, default=(2,) if pieces and name.startswith("eos") else ())
    return (bos[0] if bos else None), tuple(dict.fromkeys(ends))


_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Metadata general.sampling.* that llama.cpp's converter writes, and where it takes them from."""


def sampling_fields(gguf: Gguf) -> dict[str, object]:
    """What the file says of sampling, in the words of generation_config.json. Whether it can be is not looked at."""
    found = {theirs: gguf.metadata.get(f"general.sampling.{name}") for name, theirs in _SAMPLING.items()}
    # The file has float32: 0.95 is written 0.949999988.
    return {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in found.items() if v is not None}


def tokenizer_files(gguf: Gguf) -> TokenizerFiles:
    templates = gguf_templates(gguf.path, gguf.metadata)
    if not gguf.metadata.get("tokenizer.ggml.tokens"):
        return TokenizerFiles("none", reason=f"{quoted(gguf.path)} holds no tokenizer", **templates)
    return TokenizerFiles("gguf", gguf.path, **templates)
