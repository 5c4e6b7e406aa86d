"""Tokenizers from GGUF metadata: llama.cpp's own vocabulary files and golden encodings."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.errors import ModelError, PenstockError, UnsupportedError
from penstock.formats.gguf import read_gguf
from penstock.formats.sentencepiece import parse_sentencepiece, read_sentencepiece
from penstock.text.gguf import tokenizer_from_gguf
from penstock.text.tokenizer import Tokenizer
from tests.shared import shared
from tests.unit.text import text_vocabularies as vocabularies

KEY = "tokenizer.ggml."
REPLACEMENT = "\ufffd".encode()


def prefixed(**values: object) -> dict[str, object]:
    return {KEY + name: value for name, value in values.items()}


@pytest.fixture(scope="module")
def gpt2_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama.cpp's GPT-2 vocabulary. The copy we have was read as UTF-8 on its way: nine bytes became U+FFFD.

    They are a float (1e-5) and lengths that everything else determines.
    """
    parts = shared("data", "tokenizers", "gguf-vocab", "ggml-vocab-gpt-2.gguf").read_bytes().split(REPLACEMENT)
    lost = [0xAC, 0xC5, 0xC4, 0x80, 0xC4, 0xC3, 0x81, 0xC4, 0xC4]
    assert len(parts) == len(lost) + 1
    path = tmp_path_factory.mktemp("gguf") / "gpt-2.gguf"
    path.write_bytes(b"".join(part + bytes([b]) for part, b in zip(parts, lost, strict=False)) + parts[-1])
    return path


def salvaged(name: str) -> dict[str, object]:
    """Tokens and types of another damaged file, which lie in undamaged stretches. The scores did not survive."""
    raw = shared("data", "tokenizers", "gguf-vocab", f"ggml-vocab-{name}.gguf").read_bytes()
    at = raw.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    (count,) = struct.unpack_from("<Q", raw, at)
    at += 8
    tokens = []
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", raw, at)
        tokens.append(raw[at + 8 : at + 8 + size].decode())
        at += 8 + size
    at = raw.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 16
    types = list(struct.unpack_from(f"<{count}i", raw, at))
    model = read_sentencepiece(shared("data", "tokenizers", "llama2", "tokenizer.model"))
    assert tokens[:32000] == model.pieces
    return prefixed(
        model="llama", pre="default", tokens=tokens, token_type=types,
        scores=model.scores + [-1000.0] * (count - 32000), bos_token_id=1, unknown_token_id=0,
        eos_token_id=2 if count == 32000 else 32000, add_bos_token=True, add_eos_token=False,
    )  # fmt: skip


@cache
def llama3_metadata() -> dict[str, object]:
    vocab, merges = vocabularies.pair("llama3.2")
    tokens = [piece for piece, _ in sorted(vocab.items(), key=lambda item: item[1])]
    return prefixed(
        model="gpt2", pre="llama-bpe", tokens=[*tokens, "<|begin_of_text|>", "<|eot_id|>", "<tool>", "<|other|>"],
        token_type=[1] * 128000 + [3, 3, 4, 3], merges=[" ".join(merge) for merge in merges],
        bos_token_id=128000, eos_token_id=128001,
    )  # fmt: skip


def world_metadata() -> dict[str, object]:
    tokens = ["<s>", *(repr(token)[2:-1] for _, token in sorted(vocabularies.world_tokens().items()))]
    padding = [f"[PAD{i}]" for i in range(65530, 65536)]
    return prefixed(model="rwkv", tokens=tokens + padding, token_type=[3] + [1] * 65529 + [5] * 6)


def golden(tokenizer: Tokenizer, name: str) -> None:
    cases = vocabularies.golden_texts(name)
    assert len(cases) == 46
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


def test_gpt2(gpt2_file):
    metadata = read_gguf(gpt2_file).metadata
    tokenizer = tokenizer_from_gguf(metadata)
    golden(tokenizer, "gpt-2")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (50257, 50256, (50256,))
    assert tokenizer.special_literals == {"<|endoftext|>"}
    assert tokenizer.encode("a<|endoftext|>") == [64, 50256]
    assert 50256 not in tokenizer.encode_plain("a<|endoftext|>")


@pytest.mark.parametrize(("name", "size", "eos"), [("llama-spm", 32000, 2), ("phi-3", 32064, 32000)])
def test_sentencepiece_vocabularies(name, size, eos):
    tokenizer = tokenizer_from_gguf(salvaged(name))
    golden(tokenizer, name)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (size, 1, (eos,))
    assert tokenizer.encode("Hello") == [1, 15043]
    assert {"<s>", "<unk>"} <= tokenizer.special_literals
    assert ("</s>" in tokenizer.special_literals) == (name == "llama-spm")  # Phi-3 calls it user-defined
    assert 2 not in tokenizer.encode_plain("</s>")
    if name == "phi-3":
        assert tokenizer.encode("<|user|>Hi<|end|>")[:2] == [1, 32010]
        assert 32010 not in tokenizer.encode_plain("<|user|>")


def test_llama3():
    tokenizer = tokenizer_from_gguf(llama3_metadata())
    golden(tokenizer, "llama-bpe")
    assert tokenizer.encode("Hi<|eot_id|><tool>") == [128000, 13347, 128001, 128002]
    assert tokenizer.special_literals == {"<|begin_of_text|>", "<|eot_id|>", "<|other|>"}
    assert tokenizer.encode("<|other|>") == [128000, 128003]
    assert set(tokenizer.added_literals) == tokenizer.special_literals | {"<tool>"}
    off = tokenizer_from_gguf(llama3_metadata() | prefixed(add_bos_token=False, add_eos_token=True))
    assert off.encode("Hi") == [13347, 128001]
    data = json.loads(shared("data", "tokenizers", "golden", "swift_llama_3.2_encoded.json").read_text("utf-8"))
    assert tokenizer.encode(data["text"]) == data["token_ids"]


def test_rwkv():
    tokenizer, world = tokenizer_from_gguf(world_metadata()), vocabularies.world()
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (65530, (0,))
    for text in ("User: \"Hi\" 'x' \\ \n\n\t", "中文🦙", "\0\x7f"):
        assert tokenizer.encode(text) == world.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unigram():
    model = parse_sentencepiece(vocabularies.t5_proto())
    metadata = prefixed(
        model="t5", tokens=model.pieces, scores=model.scores, token_type=model.types, eos_token_id=1,
        add_space_prefix=True, remove_extra_whitespaces=True,
        precompiled_charsmap=[b - 256 if b > 127 else b for b in model.charsmap],
    )  # fmt: skip
    tokenizer = tokenizer_from_gguf(metadata)
    for text in ("Hello  world", " \ufb01 e\u0301 中", ""):
        assert tokenizer.encode(text) == vocabularies.t5_spm().encode(text)


def small(**changes: object) -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "a", "\u2581a"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1]
    scores = [0.0] * 259 + [-2.0, -3.0, -1.0]
    return prefixed(model="llama", tokens=tokens, token_type=types, scores=scores) | prefixed(**changes)


@cache
def first_merges() -> tuple[list[str], list[str]]:
    """GPT-2's first 300 tokens, and the merges that make them."""
    vocab, merges = vocabularies.pair("gpt2")
    ids = {piece: i for piece, i in vocab.items() if i < 300}
    return sorted(ids, key=ids.__getitem__), [" ".join(m) for m in merges if "".join(m) in ids]


def bpe_like(**changes: object) -> dict[str, object]:
    tokens, merges = first_merges()
    return prefixed(model="gpt2", pre="gpt-2", tokens=tokens, merges=merges) | prefixed(**changes)


def test_runs_of_spaces_are_pieces_of_their_own():
    """Converters write the space into user-defined pieces as it is, not as its mark; Gemma has runs of up to 31."""
    letters = [f"{mark}{letter}" for letter in "ab" for mark in ("", "\u2581")]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "\n", "\u2581", *letters]
    metadata = prefixed(
        model="llama", tokens=pieces, scores=[-float(i) for i in range(len(pieces))],
        token_type=[3, 3, 3, 2, 4, 4, 4, 1, 1, 1, 1, 1], bos_token_id=2, eos_token_id=1, add_space_prefix=False,
        unknown_token_id=3,
    )  # fmt: skip
    tokenizer = tokenizer_from_gguf(metadata)
    ids = [pieces.index(piece) for piece in ("a", "  ", "b", "\n", "   ", "a", "\u2581b")]
    assert tokenizer.encode("a  b\n   a b", add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == "a  b\n   a b"


def test_flags_and_defaults():
    assert tokenizer_from_gguf(small()).encode("a a") == [1, 261, 261]
    assert tokenizer_from_gguf(small(add_space_prefix=False)).encode("a a") == [1, 260, 261]
    assert tokenizer_from_gguf(small(remove_extra_whitespaces=True)).encode(" a  a ") == [1, 261, 261]
    assert tokenizer_from_gguf(small(add_bos_token=False, add_eos_token=True)).encode("a") == [261, 2]
    types = small()[KEY + "token_type"]
    assert isinstance(types, list)
    # A file that calls its BOS and EOS ordinary: they still cannot be spelled.
    forgetful = tokenizer_from_gguf(small(token_type=[2, 1, 1, *types[3:]]))
    assert forgetful.special_literals == {"<unk>", "<s>", "</s>"}
    assert 1 not in forgetful.encode_plain("<s>")
    assert tokenizer_from_gguf(bpe_like()).encode("the") == tokenizer_from_gguf(bpe_like(pre="phi-2")).encode("the")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "tokenizer.ggml.model is missing"),
        (prefixed(model=3), "tokenizer.ggml.model is missing"),
        (prefixed(model="llama"), "not a list of 1 to"),
        (small(tokens=[]), "not a list of 1 to"),
        (small(tokens=["a", 3]), "token 1 is not a text"),
        (small(tokens=["x" * 5000]), "token 0 is not a text"),
        (small(scores=None), "scores is missing"),
        (small(scores=[0.0]), "scores is not a list of 262 numbers"),
        (small(scores=[float("nan")] * 262), "score of token 0"),
        (small(token_type=None), "token_type is missing"),
        (small(token_type=["1"] * 262), "token_type is not a list of 262"),
        (small(token_type=[1] * 262), "neither byte pieces"),
        (small(token_type=[2, 3, 3] + [6] * 259), "byte piece 259"),
        (small(token_type=[2, 3, 3] + [6] * 255 + [1] * 4), "only 255 of the 256"),
        (small(bos_token_id=300), "bos_token_id is 300, but there are 262"),
        (small(bos_token_id=-1), "bos_token_id is -1"),
        (small(eos_token_id="2"), "eos_token_id is '2'"),
        (small(precompiled_charsmap="x"), "not a list of bytes"),
        (small(precompiled_charsmap=[1, 2, 3]), "rules are broken"),
    ],
)  # fmt: skip
def test_broken_metadata_is_a_model_error_in_one_line(metadata, message):
    with pytest.raises(ModelError) as caught:
        tokenizer_from_gguf(metadata)
    assert message in str(caught.value)
    one_line(caught.value)


def one_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 900


def test_broken_byte_level_metadata():
    for changes, message in (
        ({"merges": None}, "not a list of at most"),
        ({"merges": ["ab"]}, "the merge 'ab' is not two tokens"),
        ({"merges": ["a b c"]}, "is not two tokens"),
        ({"merges": [3]}, "is not two tokens"),
        ({"merges": ["nothing like"]}, "not a usable tokenizer"),
        ({"pre": 3}, "pre is not a text"),
        ({"tokens": ["a", "a"]}, "token 1 is the same as token 0"),
        ({"tokens": ["a", "b"], "merges": []}, "no token for"),
        ({"token_type": [1]}, "token_type is not a list of 300"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            tokenizer_from_gguf(bpe_like(**changes))
        one_line(caught.value)


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"kind 'plamo2'; bert, gpt2, llama, rwkv, t5 are read"):
        tokenizer_from_gguf(prefixed(model="plamo2"))
    with pytest.raises(UnsupportedError, match=r"pattern 'new-thing', which is not known"):
        tokenizer_from_gguf(bpe_like(pre="new-thing"))


def test_broken_world_metadata():
    for changes, message in (
        ({"tokens": ["<s>", "\\q"]}, "not spelled as bytes"),
        ({"tokens": ["<s>", ""]}, "an empty token"),
        ({"tokens": ["a", "b"], "token_type": [1, 1]}, "text for token 0"),
        ({"tokens": ["<s>", "b"]}, "no token for 255"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            tokenizer_from_gguf(prefixed(model="rwkv", **changes))
        one_line(caught.value)


VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5),
    st.lists(st.one_of(st.integers(-5, 300), st.floats(), st.text(max_size=3)), max_size=5),
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_mutated_metadata_raises_nothing_else(data):
    metadata = dict(data.draw(st.sampled_from([small, bpe_like]))())
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(
            st.sampled_from([*sorted(metadata), *(KEY + n for n in ("bos_token_id", "eos_token_id", "merges"))])
        )
        value = metadata.get(key)
        if isinstance(value, list) and value and data.draw(st.booleans()):
            value = list(value)
            value[data.draw(st.integers(0, len(value) - 1))] = data.draw(VALUES)
            metadata[key] = value
        else:
            metadata[key] = data.draw(VALUES)
    try:
        tokenizer = tokenizer_from_gguf(metadata)
        tokenizer.decode(tokenizer.encode("the a 🦙"))
    except PenstockError as error:
        one_line(error)
