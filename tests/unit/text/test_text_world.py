"""RWKV's World vocabulary against a naive search for the longest token."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.base.errors import ModelError, PenstockError
from penstock.formats.vocab_files import read_rwkv_vocab
from penstock.text.world import byte_tokenizer, unescaped, world_tokenizer
from tests.shared import shared
from tests.unit.text import text_vocabularies as vocabularies

TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text(st.sampled_from("aeithn tsTd'09 \n\t.,-=_*/!éя中国的🦙\u0301\u3000"), max_size=80),
)


@cache
def world_ids() -> dict[bytes, int]:
    return {token: i for i, token in vocabularies.world_tokens().items()}


def naive(data: bytes, ids: dict[bytes, int]) -> list[int]:
    longest = 128
    out: list[int] = []
    while data:
        size = next(n for n in range(min(longest, len(data)), 0, -1) if data[:n] in ids)
        out.append(ids[data[:size]])
        data = data[size:]
    return out


@settings(max_examples=300, deadline=None)
@given(text=TEXT)
@example(text="#" * 200 + "-" * 161 + " " * 300)
@example(text="User: Hi!\n\nAssistant: 你好，世界。\r\n\r\n")
def test_encoding_is_the_longest_match(text):
    tokenizer = vocabularies.world()
    ids = tokenizer.encode(text)
    assert ids == tokenizer.encode_plain(text) == naive(text.encode(), world_ids())
    assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_vocabulary(data):
    longer = data.draw(st.lists(st.text("abc", min_size=2, max_size=6), unique=True, max_size=20))
    tokens = {i + 1: bytes([i]) for i in range(256)} | {257 + i: t.encode() for i, t in enumerate(longer)}
    tokenizer = world_tokenizer(tokens)
    for text in data.draw(st.lists(st.text("abc", max_size=15), max_size=8)):
        assert tokenizer.encode(text) == naive(text.encode(), {token: i for i, token in tokens.items()})


def test_a_book():
    text = sorted(shared("data", "corpus", "novels").iterdir())[0].read_text("utf-8", errors="replace")[:30_000]
    assert vocabularies.world().encode(text) == naive(text.encode(), world_ids())


def test_attributes():
    tokenizer, tokens = vocabularies.world(), vocabularies.world_tokens()
    assert len(tokens) == 65529
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (65530, None, (0,))
    assert tokenizer.special_ids == {0}
    assert tokenizer.special_literals == frozenset()
    assert tokenizer.added_literals == {}
    assert tokenizer.decode([33155, 0, 33155]) == tokenizer.decode([33155, 0, 33155], False) == "HelloHello"
    assert tokenizer.id_to_piece(33155) == "Hello"
    assert tokenizer.piece_to_id("Hello") == 33155
    assert tokenizer.id_to_piece(0) == tokenizer.id_to_piece(65530) == ""
    assert tokenizer.encode_inner("Hello") == [33155]
    assert tokenizer.table is not None
    for token_id, token in tokens.items():
        assert tokenizer.table[token_id] == token


def test_bytes_as_tokens():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.decode([0, 97, 0xC3, 0xA9])) == (256, (), "\0aé")


def test_spellings_in_gguf_files():
    for token in vocabularies.world_tokens().values():
        assert unescaped(repr(token)[2:-1]) == token
    for text in ("\\", "\\x1", "\\q", "\\xZZ", "\u0100", "中"):
        with pytest.raises(ModelError, match="is not spelled as bytes"):
            unescaped(text)


GOOD = "".join(f"{i + 1} {bytes([i])!r} 1\n" for i in range(256))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "has no tokens"),
        ("1 'a' 2\n", "says 2 bytes, but its token has 1"),
        ("1 'é' 1\n", "says 1 bytes, but its token has 2"),
        ("0 'a' 1\n", "the id 0, which is taken or out of range"),
        ("1 'a' 1\n1 'b' 1\n", "line 2 of"),
        ("99999999 'a' 1\n", "out of range"),
        ("1 'a'\n", "line 1 of"),
        ("x 'a' 1\n", "line 1 of"),
        ("1 a 1\n", "line 1 of"),
        ("1 '' 0\n", "line 1 of"),
        ("1 '''a 1\n", "line 1 of"),
        ("1 __import__('os') 1\n", "line 1 of"),
        ("1 '%s' % ('a') 1\n", "line 1 of"),
        ("1 'a'*99999999 1\n", "line 1 of"),
        ("1 'a'.join('bc') 1\n", "line 1 of"),
        ("1 f'{1}' 1\n", "line 1 of"),
        ("1 '\\ud800' 3\n", "line 1 of"),
        ("1 b'é' 2\n", "line 1 of"),
        (f"1 '{'(' * 9000}' 9000\n", "9009 characters"),
        (f"1 '{'a' * 2000}' 2000\n", "says 2000 bytes"),
        ("1 'a' 1\n", "no token for 255 of the 256 bytes, first 0"),
    ],
)  # fmt: skip
def test_broken_files_are_model_errors_in_one_line(tmp_path: Path, lines, message):
    path = tmp_path / "rwkv_vocab_v20230424.txt"
    path.write_text(lines, "utf-8")
    with pytest.raises(ModelError) as caught:
        world_tokenizer(read_rwkv_vocab(path))
    assert message in str(caught.value)
    one_line(caught.value)


def one_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 400


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_files_raise_nothing_else(tmp_path_factory, data):
    raw = bytearray((GOOD + "257 'ab' 2\n258 ' \\u4e2d' 4\n").encode())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path = tmp_path_factory.getbasetemp() / "rwkv_vocab_v20230424.txt"
    path.write_bytes(raw)
    try:
        tokenizer = world_tokenizer(read_rwkv_vocab(path))
        assert tokenizer.decode(tokenizer.encode("ab 中")) == "ab 中"
    except PenstockError as error:
        one_line(error)
