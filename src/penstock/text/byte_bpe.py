"""Byte-level BPE from its own files: GPT-2's vocabulary and merges, tiktoken's ranks.

Source: Radford et al., GPT-2 (2019), and github.com/openai/gpt-2 `encoder.py`; github.com/openai/tiktoken `lib.rs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from penstock.base.errors import ModelError, UnsupportedError
from penstock.text.piece_backend import added_tokens
from penstock.text.split_patterns import pre_tokenizer, split_pattern
from penstock.text.token_bytes import byte_level_piece
from penstock.text.tokenizer import Tokenizer, guarded

_CLASSES = {
    "GPT2Tokenizer": "gpt-2",
    "CodeGenTokenizer": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
    "QWenTokenizer": "qwen",
}
"""`tokenizer_class` -> split pattern, for classes that have only one."""

_TIKTOKEN: dict[str, tuple[str, dict[str, int]]] = {
    "r50k_base": ("gpt-2", {"<|endoftext|>": 50256}),
    "p50k_base": ("gpt-2", {"<|endoftext|>": 50256}),
    "cl100k_base": ("cl100k", {
        "<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260,
        "<|endofprompt|>": 100276,
    }),
    "o200k_base": ("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}  # fmt: skip
"""File name -> split pattern and special tokens. Source: tiktoken's `openai_public.py`."""

_TEXT_BYTES = [*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1), 0xF3, 0xF4]
"""Bytes of UTF-8, but for control characters and the first bytes of planes without characters.

Real vocabularies that were learnt from a text lack some of those (SmolLM2 lacks eight). Texts with such a byte are
encoded without it, as `tokenizers` and llama.cpp do.
"""

_MAX_SPLIT_WORK = 1 << 28
"""Steps for finding the last merge of every token; real vocabularies need about 2^23."""


def bpe_tokenizer(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], config: Mapping[str, Any] | None = None,
    split: str | None = None, name: str = "vocab.json",
) -> Tokenizer:  # fmt: skip
    """The tokenizer of GPT-2's pair of files (`vocab.json` and `merges.txt`); `config` is `tokenizer_config.json`.

    `split` names the pattern that cuts texts into words. Without it, `split_pattern` of the configuration, else its
    `tokenizer_class` decides; a pair without a class is GPT-2's, whose format it is.
    Raises: ModelError if pieces or merges do not fit together; UnsupportedError for a class without a known pattern.
    """
    settings = dict(config or {})

    def build() -> Tokenizer:
        chosen = split or _chosen(settings) or "gpt-2"
        added = added_tokens(settings.get("added_tokens_decoder"))
        backend = byte_bpe(vocab, merges, chosen, added, bool(settings.get("add_prefix_space")))
        if str(settings.get("tokenizer_class", "")).startswith("Qwen2Tokenizer"):
            backend.normalizer = normalizers.NFC()
        return Tokenizer.from_backend(backend, settings, prepend_bos=bool(settings.get("add_bos_token")))

    return guarded(name, build)


def tiktoken_tokenizer(ranks: Mapping[bytes, int], stem: str, config: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of a `.tiktoken` file named `stem`; ranks are ids.

    The name (`cl100k_base` and the like) or `config` says how texts are split and which special tokens there are: the
    file does not. Raises: ModelError; UnsupportedError if neither says it.
    """
    settings = dict(config or {})

    def build() -> Tokenizer:
        known, special = _TIKTOKEN.get(stem, ("", {}))
        chosen = _chosen(settings) or known
        if not chosen:
            raise UnsupportedError(
                f"nothing says how it splits texts; name the file as one of {', '.join(sorted(_TIKTOKEN))}, or put "
                '"split_pattern" (cl100k, for example) into tokenizer_config.json'
            )
        pieces = {byte_level_piece(token): rank for token, rank in ranks.items()}
        added = added_tokens(settings.get("added_tokens_decoder")) or {
            i: AddedToken(text, special=True, normalized=False) for text, i in special.items()
        }
        backend = byte_bpe(pieces, merges_of_ranks(ranks), chosen, added)
        if special and "eos_token" not in settings:
            settings["eos_token"] = "<|endoftext|>"
        return Tokenizer.from_backend(backend, settings, prepend_bos=bool(settings.get("add_bos_token")))

    return guarded(f"{stem}.tiktoken", build)


def _chosen(config: Mapping[str, Any]) -> str | None:
    """The split pattern that a configuration names. Raises: UnsupportedError for classes that may have any."""
    explicit = config.get("split_pattern")
    if explicit is not None:
        return str(explicit)
    if config.get("tokenizer_class") is None:
        return None
    name = str(config["tokenizer_class"])
    found = _CLASSES.get(name) or _CLASSES.get(name.removesuffix("Fast"))
    if found is None:
        raise UnsupportedError(
            f"the tokenizer class {name[:60]!r} does not say how texts are split; add the tokenizer.json, or put "
            '"split_pattern" (gpt-2, llama-bpe, ...) into tokenizer_config.json'
        )
    return found


def byte_bpe(
    vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], split: str,
    added: Mapping[int, AddedToken] | None = None, add_prefix_space: bool = False,
) -> tokenizers.Tokenizer:  # fmt: skip
    """A `tokenizers` tokenizer of these pieces. Added tokens keep the ids they are given.

    `add_prefix_space`: a text that does not begin with a space gets one.

    Raises: ModelError if an added token has the id of another piece, or a byte that texts may have is no piece;
    UnsupportedError for an unknown pattern.
    """
    pattern = split_pattern(split)
    missing = [b for b in _TEXT_BYTES if byte_level_piece(bytes([b])) not in vocab]
    if missing:
        raise ModelError(f"it has no token for {len(missing)} of the bytes of UTF-8, first {missing[0]}")
    pieces = dict(vocab)
    by_id = {i: piece for piece, i in vocab.items()}
    for token_id, token in (added or {}).items():
        taken = by_id.get(token_id, token.content)
        if taken != token.content or pieces.setdefault(token.content, token_id) != token_id:
            raise ModelError(f"the added token {token.content[:40]!r} has the id {token_id}, which is another token's")
    model = models.BPE(vocab=pieces, merges=list(merges), ignore_merges=pattern.whole_words)
    backend = tokenizers.Tokenizer(model)
    if add_prefix_space and pattern is not split_pattern("gpt-2"):
        raise UnsupportedError(f"add_prefix_space goes with the split pattern 'gpt-2' only, not {split[:60]!r}")
    backend.pre_tokenizer = pre_tokenizers.ByteLevel() if add_prefix_space else pre_tokenizer(pattern)
    backend.decoder = decoders.ByteLevel()
    tokens = list((added or {}).values())
    backend.add_special_tokens([t for t in tokens if t.special])
    backend.add_tokens([t for t in tokens if not t.special])
    return backend


def merges_of_ranks(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """The merge list that encodes as tiktoken does, which joins the neighbours whose joined bytes have the lowest rank.

    A token is always made of the same two parts: those that tiktoken's procedure leaves last when it is given the
    token's own bytes. (As long as nothing is joined across the ends of these bytes, what happens within them does not
    depend on what lies around.) Tokens that are never left with two parts can only be words as they stand.
    Raises: ModelError if tokens are too long to be looked at.
    """
    if sum(len(token) ** 2 for token in ranks) > _MAX_SPLIT_WORK:
        raise ModelError("its tokens are longer than those of any real vocabulary")
    found = (_last_parts(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1)
    return [(byte_level_piece(parts[0]), byte_level_piece(parts[1])) for parts in found if parts is not None]


def _last_parts(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    if len(token) == 2:
        return token[:1], token[1:]
    parts = [token[i : i + 1] for i in range(len(token))]
    worst = 1 << 62
    joint = [ranks.get(parts[i] + parts[i + 1], worst) for i in range(len(parts) - 1)]
    while len(parts) > 2:
        best = min(joint)
        if best == worst:
            return None
        at = joint.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joint[at]
        if at < len(joint):
            joint[at] = ranks.get(parts[at] + parts[at + 1], worst)
        if at:
            joint[at - 1] = ranks.get(parts[at - 1] + parts[at], worst)
    return parts[0], parts[1]
