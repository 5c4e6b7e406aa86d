"""The tokenizer that a GGUF file describes in its metadata.

Source: the GGUF specification (github.com/ggml-org/ggml `docs/gguf.md`, "Tokenizer") and, for the defaults it leaves
open, `llama-vocab.cpp` of github.com/ggml-org/llama.cpp. SentencePiece vocabularies are encoded as SentencePiece does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.base.errors import ModelError, UnsupportedError
from penstock.text.byte_bpe import byte_bpe
from penstock.text.sentencepiece import (
    BPE,
    BYTE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    ScoredPieces,
    sentencepiece_tokenizer,
)
from penstock.text.split_patterns import split_pattern
from penstock.text.token_bytes import SPACE_MARK
from penstock.text.tokenizer import Tokenizer, guarded
from penstock.text.world import END_OF_TEXT, unescaped, world_tokenizer

MAX_TOKENS = 1 << 20
MAX_TOKEN_CHARS = 2048
MAX_MERGES = 1 << 21

_KEY = "tokenizer.ggml."

T = TypeVar("T")


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of a GGUF file's metadata: key -> value, arrays as lists.

    Reads the models "llama" (SentencePiece BPE), "t5" (Unigram), "gpt2" (byte-level BPE), "rwkv" (World) and "bert"
    (WordPiece).
    Raises: ModelError if the metadata is incomplete, broken or contradicts itself; UnsupportedError, by name, for
    another model or an unknown `tokenizer.ggml.pre`.
    """
    model = metadata.get(_KEY + "model")
    builders = {"llama": _scored, "t5": _scored, "gpt2": _byte_level, "rwkv": _world, "bert": _word_pieces}
    if not isinstance(model, str):
        raise ModelError("the GGUF file holds no tokenizer: tokenizer.ggml.model is missing")
    if model not in builders:
        raise UnsupportedError(
            f"the GGUF file has a tokenizer of the kind {model[:60]!r}; {', '.join(sorted(builders))} are read"
        )
    return guarded("the GGUF file's tokenizer", lambda: builders[model](metadata))


def _scored(metadata: Mapping[str, object]) -> Tokenizer:
    tokens = _tokens(metadata)
    types = _array(metadata, "token_type", int, len(tokens))
    if types is None:
        raise ModelError("tokenizer.ggml.token_type is missing")
    is_t5 = metadata[_KEY + "model"] == "t5"
    scores = _array(metadata, "scores", float, len(tokens))
    if scores is None:
        raise ModelError("tokenizer.ggml.scores is missing")
    bad = next((i for i, score in enumerate(scores) if not -3.5e38 < score < 3.5e38), None)
    if bad is not None:
        raise ModelError(f"the score of token {bad} is not finite")
    charsmap = metadata.get(_KEY + "precompiled_charsmap") or []
    if not isinstance(charsmap, list | bytes) or not all(isinstance(b, int) and -128 <= b < 256 for b in charsmap):
        raise ModelError("tokenizer.ggml.precompiled_charsmap is not a list of bytes")
    # Converters write spaces into user-defined pieces, which the model has with the mark that stands for a space.
    pieces = [t.replace(" ", SPACE_MARK) if k == USER_DEFINED else t for t, k in zip(tokens, types, strict=True)]
    vocab = ScoredPieces(
        pieces, scores, types,
        model_type=UNIGRAM if is_t5 else BPE,
        byte_fallback=BYTE in types,
        charsmap=bytes(b & 0xFF for b in charsmap),
        add_dummy_prefix=_flag(metadata, "add_space_prefix", True),
        remove_extra_whitespaces=_flag(metadata, "remove_extra_whitespaces", False),
    )  # fmt: skip
    bos = _token_id(metadata, "bos", len(tokens), None if is_t5 else 1)
    eos = _token_id(metadata, "eos", len(tokens), 1 if is_t5 else 2)
    for token_id in (bos, eos):
        # Some converters forget to say that these are control tokens.
        if token_id is not None and types[token_id] == NORMAL:
            types[token_id] = CONTROL
    config = {
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": None if eos is None else tokens[eos],
        "add_bos_token": _flag(metadata, "add_bos_token", not is_t5),
        "add_eos_token": _flag(metadata, "add_eos_token", is_t5),
    }
    return sentencepiece_tokenizer(vocab, config, "its vocabulary")


def _byte_level(metadata: Mapping[str, object]) -> Tokenizer:
    tokens = _tokens(metadata)
    types = _array(metadata, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    lines = metadata.get(_KEY + "merges")
    if not isinstance(lines, list) or len(lines) > MAX_MERGES:
        raise ModelError(f"tokenizer.ggml.merges is not a list of at most {MAX_MERGES} merges")
    name = metadata.get(_KEY + "pre", "default")
    if not isinstance(name, str):
        raise ModelError("tokenizer.ggml.pre is not a text")
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if vocab.setdefault(token, i) != i:
            raise ModelError(f"token {i} is the same as token {vocab[token]}")
    bos, eos = _token_id(metadata, "bos", len(tokens)), _token_id(metadata, "eos", len(tokens))
    special = {i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)} | ({bos, eos} - {None})
    added = {
        i: AddedToken(tokens[i], special=i in special, normalized=False)
        for i, kind in enumerate(types)
        if tokens[i] and (i in special or kind == USER_DEFINED)
    }
    backend = byte_bpe(vocab, [_merge(line) for line in lines], name, added)
    return Tokenizer(
        backend, bos_id=bos, eos_ids=[] if eos is None else [eos],
        prepend_bos=_flag(metadata, "add_bos_token", split_pattern(name).begins_with_bos),
        append_eos=_flag(metadata, "add_eos_token", False),
    )  # fmt: skip


def _world(metadata: Mapping[str, object]) -> Tokenizer:
    tokens = _tokens(metadata)
    types = _array(metadata, "token_type", int, len(tokens)) or [CONTROL, *[NORMAL] * (len(tokens) - 1)]
    ordinary = {i: unescaped(token) for i, token in enumerate(tokens) if types[i] == NORMAL}
    if END_OF_TEXT in ordinary or not all(ordinary.values()):
        raise ModelError("it has an empty token, or text for token 0, which ends a text")
    eos = _token_id(metadata, "eos", len(tokens), END_OF_TEXT)
    return world_tokenizer(ordinary, END_OF_TEXT if eos is None else eos)


def _word_pieces(metadata: Mapping[str, object]) -> Tokenizer:
    """Files have a mark before what begins a word, where the vocabulary has "##" before what goes on with one. Whether
    a text is made lower case is not said: it is where no word of the vocabulary has an upper case letter."""
    tokens = _tokens(metadata)
    types = _array(metadata, "token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    pieces = [
        token if kind != NORMAL else token.removeprefix(SPACE_MARK) if token.startswith(SPACE_MARK) else "##" + token
        for token, kind in zip(tokens, types, strict=True)
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if len(vocab) < len(pieces):
        raise ModelError("its vocabulary has a piece twice")
    size = len(tokens)
    cls = _token_id(metadata, "cls", size, _token_id(metadata, "bos", size, 101))
    sep = _token_id(metadata, "seperator", size, _token_id(metadata, "eos", size, 102))
    unknown = _token_id(metadata, "unknown", size, 100)
    if cls is None or sep is None or unknown is None:
        raise ModelError("it names no tokens that begin and end a text, or none for what is unknown")
    lower = not any(
        kind == NORMAL and piece.isalpha() and piece != piece.lower() for piece, kind in zip(pieces, types, strict=True)
    )
    backend = Backend(models.WordPiece(vocab, unk_token=pieces[unknown]))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([pieces[i] for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)])
    begin, end = f"{pieces[cls]}", f"{pieces[sep]}"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", pair=f"{begin} $A {end} $B:1 {end}:1", special_tokens=[(begin, cls), (end, sep)]
    )
    return Tokenizer(backend, bos_id=cls, eos_ids=[sep])


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    found = metadata.get(_KEY + "tokens")
    if not isinstance(found, list) or not 0 < len(found) <= MAX_TOKENS:
        raise ModelError(f"tokenizer.ggml.tokens is not a list of 1 to {MAX_TOKENS} tokens")
    for i, token in enumerate(found):
        if not isinstance(token, str) or len(token) > MAX_TOKEN_CHARS:
            raise ModelError(f"token {i} is not a text of at most {MAX_TOKEN_CHARS} characters")
    return found


def _array(metadata: Mapping[str, object], name: str, kind: type[T], size: int) -> list[T] | None:
    found = metadata.get(_KEY + name)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != size or not all(type(value) is kind for value in found):
        raise ModelError(f"tokenizer.ggml.{name} is not a list of {size} numbers")
    return list(found)


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    return bool(metadata.get(_KEY + name, default))


def _token_id(metadata: Mapping[str, object], name: str, size: int, default: int | None = None) -> int | None:
    found: Any = metadata.get(f"{_KEY}{name}_token_id", default)
    if found is None or (found == default and not found < size):
        return None
    if type(found) is not int or not 0 <= found < size:
        raise ModelError(f"tokenizer.ggml.{name}_token_id is {repr(found)[:40]}, but there are {size} tokens")
    return found


def _merge(line: object) -> tuple[str, str]:
    left, _, right = line.partition(" ") if isinstance(line, str) else ("", "", "")
    if not left or not right or " " in right:
        raise ModelError(f"the merge {str(line)[:40]!r} is not two tokens")
    return left, right
