"""GPT-2's pair of files and tiktoken's ranks: golden encodings, and a naive encoder that works from the ranks."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.base.errors import ModelError, PenstockError, UnsupportedError
from penstock.formats import vocab_files
from penstock.formats.vocab_files import read_bpe, read_tiktoken
from penstock.text.byte_bpe import bpe_tokenizer, byte_bpe, merges_of_ranks, tiktoken_tokenizer
from penstock.text.split_patterns import PATTERNS
from penstock.text.token_bytes import byte_level, byte_level_piece
from tests.shared import shared
from tests.unit.text import text_vocabularies as vocabularies

TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text(st.sampled_from("aAbe tsTdlLvVrRm'0129 \n\r\t.,-=_*/!éΩ中🦙\u0301\u00a0\u3000"), max_size=60),
)
GOLDEN = {"gpt-2": "gpt2_pair", "llama-bpe": "llama3"}
UNCHECKED = {"falcon", "qwen2", "deepseek-coder", "command-r"}
"""Golden encodings of llama.cpp whose vocabularies are not there."""


def golden(file: str):
    return json.loads(shared("data", "tokenizers", "golden", file).read_text("utf-8"))


def test_golden_files_are_all_known():
    files = shared("data", "tokenizers", "golden").glob("llamacpp_*.out")
    names = {path.stem.removeprefix("llamacpp_") for path in files}
    assert names == set(GOLDEN) | UNCHECKED | {"llama-spm", "phi-3"}


@pytest.mark.parametrize(("file", "name"), GOLDEN.items())
def test_golden_texts_of_llama_cpp(file, name):
    tokenizer, cases = getattr(vocabularies, name)(), vocabularies.golden_texts(file)
    assert len(cases) == 46
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("file", "name"), [("swift_gpt2_encoded_tokens.json", "gpt2_pair"), ("swift_llama_3.2_encoded.json", "llama3")]
)
def test_golden_text_of_swift_transformers(file, name):
    data, tokenizer = golden(file), getattr(vocabularies, name)()
    assert tokenizer.encode(data["text"]) == data["token_ids"]
    assert tokenizer.decode(data["token_ids"], skip_special_tokens=False) == data["decoded_text"]


@pytest.mark.parametrize(
    ("key", "name"), [("distilgpt2", "gpt2_pair"), ("pcuenq/Llama-3.2-1B-Instruct-tokenizer", "llama3")]
)
def test_edge_cases_of_swift_transformers(key, name):
    cases, tokenizer = golden("swift_tokenizer_tests.json")[key], getattr(vocabularies, name)()
    assert len(cases) == 18
    for case in cases:
        ids = case["encoded"]["input_ids"]
        assert tokenizer.encode(case["input"]) == ids, case["input"]
        # These expect `clean_up_tokenization_spaces`, which takes spaces away before punctuation; we never do.
        cleaned = tokenizer.decode(ids).replace(" !", "!")
        assert cleaned == case["decoded_without_special"].replace(" !", "!")


@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_the_pair_is_what_tokenizer_json_is(text):
    if "<|endoftext|>" not in text:
        ids = vocabularies.gpt2_pair().encode(text)
        assert ids == vocabularies.gpt2().encode(text)
        assert vocabularies.gpt2_pair().decode(ids) == text


def naive(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule: a word that is a token is that; else join the neighbours of the lowest rank, leftmost first."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([b]) for b in word]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


@settings(max_examples=400, deadline=None)
@given(text=TEXT)
@example(text="A'LL'll don'T 12345  \n\n  x\r\n\r\n\t\ty")
@example(text="-" * 300 + " " * 200 + "=" * 77 + "aAaAaAaAaAa" * 5)
def test_cl100k_is_the_naive_encoding(text):
    regex = pytest.importorskip("regex")
    ranks, tokenizer = vocabularies.cl100k_ranks(), vocabularies.cl100k()
    # Letters of newer versions of Unicode than one of the two knows are split in different ways.
    text = "".join(c for c in text if ord(c) < 0x2000 or c in "中🦙\u3000")
    text = "".join(c for c in text if c.isprintable() or c.isspace())
    expected = [i for word in regex.findall(CL100K, text) for i in naive(word.encode(), ranks)]
    ids = tokenizer.encode_plain(text)
    assert ids == expected
    assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_cl100k_words_are_merged_by_rank(text):
    """Whatever the words are: every character there is."""
    ranks, tokenizer = vocabularies.cl100k_ranks(), vocabularies.cl100k()
    words = [word for word, _ in tokenizer._plain.pre_tokenizer.pre_tokenize_str(text)]
    assert b"".join(map(byte_level, words)) == text.encode()
    assert tokenizer.encode_plain(text) == [i for word in words for i in naive(byte_level(word), ranks)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ranks_encode_as_the_naive_rule(data):
    """Ranks that no training gives: tokens that cannot be reached, that overlap, that are better than their parts."""
    tokens = data.draw(st.lists(st.text("abc", min_size=2, max_size=6), unique=True, max_size=25))
    order = data.draw(st.permutations(range(len(tokens))))
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {token.encode(): 256 + place for token, place in zip(tokens, order, strict=True)}
    tokenizer = tiktoken_tokenizer(ranks, "cl100k_base")
    for text in data.draw(st.lists(st.text("abc", max_size=14), max_size=12)):
        assert tokenizer.encode(text) == (naive(text.encode(), ranks) if text else [])


def test_special_tokens_of_cl100k():
    tokenizer = vocabularies.cl100k()
    assert (tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.bos_id) == (100277, (100257,), None)
    assert tokenizer.encode("a<|endoftext|>b<|endofprompt|>") == [64, 100257, 65, 100276]
    assert 100257 not in tokenizer.encode_plain("a<|endoftext|>b")
    assert tokenizer.decode(tokenizer.encode_plain("a<|endoftext|>b")) == "a<|endoftext|>b"
    assert tokenizer.decode([64, 100257, 100260, 65]) == "ab"
    assert tokenizer.decode([64, 100260, 65], skip_special_tokens=False) == "a<|fim_suffix|>b"
    assert len(merges_of_ranks(vocabularies.cl100k_ranks())) == 100000


def small() -> dict[str, int]:
    return {byte_level_piece(bytes([b])): b for b in range(256)} | {"ab": 256, "Ġab": 257, "ĠĠ": 258}


SMALL_MERGES = [("a", "b"), ("Ġ", "ab"), ("Ġ", "Ġ")]


def test_bytes_that_only_control_characters_have_may_lack_tokens():
    """SmolLM2's vocabulary lacks eight: texts are encoded without them, as `tokenizers` does. A letter is needed."""
    lacking = bytes([4, 6, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2])
    vocab = {piece: i for piece, i in small().items() if piece not in {byte_level_piece(bytes([b])) for b in lacking}}
    backend = byte_bpe(vocab, SMALL_MERGES, "smollm")
    assert backend.encode("a\x04 ab\x1d.").ids == [ord("a"), 257, ord(".")]
    whole = byte_bpe(small(), SMALL_MERGES, "smollm")
    text = "a na\u00efve \U0001f600 line\n\ttab \U000f0000"
    assert backend.encode(text).ids == whole.encode(text).ids
    for byte in (*b"e\n\t ", 0x80, 0xC3, 0xF0):
        fewer = {piece: i for piece, i in vocab.items() if piece != byte_level_piece(bytes([byte]))}
        with pytest.raises(ModelError, match=f"no token for 1 of the bytes of UTF-8, first {byte}"):
            byte_bpe(fewer, [], "smollm")


def test_which_pattern_splits_texts():
    text = "1234's ÀB ab\n\n x"
    by_class = {
        None: "gpt-2", "GPT2Tokenizer": "gpt-2", "GPT2TokenizerFast": "gpt-2", "Qwen2Tokenizer": "qwen2",
        "Qwen2TokenizerFast": "qwen2", "QWenTokenizer": "qwen", "CodeGenTokenizer": "gpt-2",
    }  # fmt: skip
    for name, pattern in by_class.items():
        config = {} if name is None else {"tokenizer_class": name}
        chosen = bpe_tokenizer(small(), SMALL_MERGES, config)
        direct = byte_bpe(small(), SMALL_MERGES, pattern)
        assert chosen.encode(text) == direct.encode(text).ids
        assert [w for w, _ in chosen._backend.pre_tokenizer.pre_tokenize_str(text)] == [
            w for w, _ in direct.pre_tokenizer.pre_tokenize_str(text)
        ]
    for config in ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "LlamaTokenizer"}):
        with pytest.raises(UnsupportedError, match="does not say how texts are split"):
            bpe_tokenizer(small(), SMALL_MERGES, config)
        assert bpe_tokenizer(small(), SMALL_MERGES, config | {"split_pattern": "tekken"}).vocab_size == 259
    with pytest.raises(UnsupportedError, match="'nonsense', which is not known; known are"):
        bpe_tokenizer(small(), SMALL_MERGES, {"split_pattern": "nonsense"})
    with pytest.raises(UnsupportedError, match="name the file as one of"):
        tiktoken_tokenizer({byte_level(p): i for p, i in small().items()}, "my")


def words(pattern: str, text: str) -> list[str]:
    backend = byte_bpe(small(), SMALL_MERGES, pattern)
    return [byte_level(word).decode() for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_no_pattern_loses_text(text):
    for name in PATTERNS:
        assert "".join(words(name, text)) == text


def test_patterns_split_as_they_are_known_to():
    text = "I've 1234 x'S  y\n\n\nZé-.."
    for name in ("llama-bpe", "cl100k", "dbrx"):
        assert words(name, text) == ["I", "'ve", " ", "123", "4", " x", "'S", " ", " y", "\n\n\n", "Zé", "-.."]
    for name in ("qwen2", "qwen"):
        assert words(name, text) == ["I", "'ve", " ", "1", "2", "3", "4", " x", "'S", " ", " y", "\n\n\n", "Zé", "-.."]
    assert words("gpt-2", text) == ["I", "'ve", " 1234", " x", "'", "S", " ", " y", "\n\n", "\n", "Zé", "-.."]
    assert words("starcoder", text)[2:7] == [" ", "1", "2", "3", "4"]
    assert words("gpt-4o", text) == ["I've", " ", "123", "4", " x'S", " ", " y", "\n\n\n", "Zé", "-.."]
    assert words("o200k", text) == words("gpt-4o", text)
    assert words("tekken", text)[:4] == ["I", "'ve", " ", "1"]
    assert words("default", text) == [
        "I", "'", "ve", " ", "123", "4", " x", "'", "S", " ", " y", "\n\n", "\n", "Zé", "-..",
    ]  # fmt: skip
    assert words("deepseek-v3", "中文ab 12345") == ["中文", "ab", " ", "123", "45"]


@pytest.mark.parametrize(("name", "text", "found"), [
    ("deepseek-llm", "Ab 12 你好, x_y!\n日", ["Ab", " ", "12", " ", "你好", ",", " x", "_", "y", "!", "\n", "日"]),
    ("deepseek-coder", "Ab 123 你好, x!\n", ["Ab", " ", "1", "2", "3", " ", "你好", ",", " x", "!", "\n"]),
    ("bloom", "Hi there, friend. 12", ["Hi", " there", ",", " friend", ".", " 12"]),
    ("viking", "Hi there, 12", ["Hi", " there", ",", " ", "1", "2"]),
    ("seed-coder", "it's x!\r\n12", ["it", "'s", " x", "!", "\r\n", "1", "2"]),
    ("bailingmoe", "it's DON'T 12!\n\nx", ["it", "'s", " DON", "'T", " ", "1", "2", "!\n\n", "x"]),
    ("kimi-k2", "汉字 camelCase it's 1234!!\n", ["汉字", " camel", "Case", " it's", " ", "123", "4", "!!\n"]),
])  # fmt: skip
def test_words_of_less_common_patterns(name: str, text: str, found: list[str]) -> None:
    """The same words as llama.cpp's: compared on texts in many scripts with the merges of a large vocabulary."""
    assert words(name, text) == found


def test_lines_that_are_no_merges(tmp_path: Path):
    (tmp_path / "vocab.json").write_text(json.dumps(small() | {"##": 259}))
    for text in ("#version: 0.2\n# #\n", "# #\r\n\r\n", "# #"):
        (tmp_path / "merges.txt").write_text(text)
        vocab, merges = read_bpe(tmp_path / "vocab.json", tmp_path / "merges.txt")
        assert merges == [("#", "#")]
        assert bpe_tokenizer(vocab, merges).encode("##") == [259]


def test_added_tokens_keep_their_ids():
    entries = {"300": {"content": "<|x|>", "special": True}, "290": {"content": "<tool>"}, "256": {"content": "ab"}}
    config = {"added_tokens_decoder": entries, "eos_token": "<|x|>"}
    tokenizer = bpe_tokenizer(small(), SMALL_MERGES, config)
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (301, (300,))
    assert tokenizer.encode("c<|x|>d<tool>") == [99, 300, 100, 290]
    assert tokenizer.special_literals == {"<|x|>"}
    assert set(tokenizer.added_literals) == {"<|x|>", "<tool>", "ab"}
    assert {300, 290}.isdisjoint(tokenizer.encode_plain("c<|x|>d<tool>"))
    assert tokenizer.decode([99, 300, 290, 295]) == "c<tool>"
    for clash in ({"97": {"content": "zz"}}, {"400": {"content": "ab"}}):
        with pytest.raises(ModelError, match="which is another token's"):
            bpe_tokenizer(small(), SMALL_MERGES, {"added_tokens_decoder": clash})
    for broken in ([], {"x": {"content": "a"}}, {"5": "a"}, {"5": {"content": ""}}, {"9" * 30: {"content": "a"}}):
        with pytest.raises(ModelError, match="added_tokens_decoder"):
            bpe_tokenizer(small(), SMALL_MERGES, {"added_tokens_decoder": broken})


def test_prefix_space_and_composed_characters():
    spaced = bpe_tokenizer(small(), SMALL_MERGES, {"add_prefix_space": True})
    plain = bpe_tokenizer(small(), SMALL_MERGES)
    assert spaced.encode("ab ab") == plain.encode(" ab ab") == [257, 257]
    assert spaced.encode(" ab") == [257]
    assert spaced.encode("") == []
    with pytest.raises(UnsupportedError, match="add_prefix_space"):
        bpe_tokenizer(small(), SMALL_MERGES, {"add_prefix_space": True, "split_pattern": "tekken"})
    qwen = bpe_tokenizer(small(), SMALL_MERGES, {"tokenizer_class": "Qwen2Tokenizer"})
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"
    assert plain.decode(plain.encode("e\u0301")) == "e\u0301"


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        (b"", b"", "is not JSON"),
        (b"[]", b"", "must hold a JSON object"),
        (b"{}", b"", "has 0 tokens"),
        (b'{"a": 0, "a": 1}', b"", "gives the key 'a' twice"),
        (b'{"a": 0, "b": 0}', b"", "several tokens the same id"),
        (b'{"a": -1}', b"", "the id '-1'"),
        (b'{"a": 1e3}', b"", "the id '1000.0'"),
        (b'{"a": true}', b"", "the id 'True'"),
        (b'{"a": 99999999999}', b"", "the id '99999999999'"),
        (b'{"a": 0}', b"a b c\n", "line 1 of"),
        (b'{"a": 0}', b"ok ok\na\n", "line 2 of"),
        (b'{"a": 0}', b"\xff\xfe", "not UTF-8"),
        (b'{"a": 0}', b"a " + b"x" * 9000, "9002 characters"),
        (b'{"' + b"x" * 2000 + b'": 0}', b"", "2000 characters"),
        (b'{"a": 0}', b"", "no token for 210 of the bytes"),
        (json.dumps(small()).encode(), b"a q\n", "not a usable tokenizer"),
        (b"[" * 100000, b"", "is not JSON"),
    ],
)  # fmt: skip
def test_broken_pairs_are_model_errors_in_one_line(tmp_path: Path, vocab, merges, message):
    (tmp_path / "vocab.json").write_bytes(vocab)
    (tmp_path / "merges.txt").write_bytes(merges)
    with pytest.raises(ModelError) as caught:
        bpe_tokenizer(*read_bpe(tmp_path / "vocab.json", tmp_path / "merges.txt"))
    assert message in str(caught.value)
    one_line(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no tokens"),
        (b"YQ== 0\nYQ== 1\n", "line 2 of"),
        (b"YQ== 0\nYg== 0\n", "the same rank"),
        (b"YQ== -1\n", "line 1 of"),
        (b"YQ== 0x1\n", "line 1 of"),
        (b"YQ==\n", "line 1 of"),
        (b" 5\n", "line 1 of"),
        (b"Y?== 5\n", "line 1 of"),
        (b"YQ== 999999999\n", "line 1 of"),
        ("YQ== ५\n".encode(), "line 1 of"),
        (b"\xff\xff 1\n", "not UTF-8"),
        (base64.b64encode(bytes(2000)) + b" 1\n", "line 1 of"),
        (b"YQ== 0\n", "no token for 210 of the bytes"),
    ],
)
def test_broken_rank_files_are_model_errors_in_one_line(tmp_path: Path, data, message):
    path = tmp_path / "cl100k_base.tiktoken"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        tiktoken_tokenizer(read_tiktoken(path), path.stem)
    assert message in str(caught.value)
    one_line(caught.value)


def one_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 400


def test_limits_on_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = {bytes([b]): b for b in range(256)} | {bytes([65 + n % 26]) * 1000 + bytes([n]): 256 + n for n in range(256)}
    monkeypatch.setattr("penstock.text.byte_bpe._MAX_SPLIT_WORK", 1 << 27)
    with pytest.raises(ModelError, match="longer than those of any real vocabulary"):
        tiktoken_tokenizer(long, "cl100k_base")
    path = tmp_path / "x.tiktoken"
    path.write_text("\n" * 50)
    monkeypatch.setattr(vocab_files, "MAX_TOKENS", 20)
    with pytest.raises(ModelError, match="more than 40 lines"):
        read_tiktoken(path)
    path.write_bytes(b"x" * 2000)
    monkeypatch.setattr(vocab_files, "LIMIT_BYTES", 1000)
    with pytest.raises(ModelError, match="at most 1000"):
        read_tiktoken(path)


def mutated(raw: bytes, data: st.DataObject) -> bytes:
    out = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(out)))
        out[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    return bytes(out[: data.draw(st.one_of(st.none(), st.integers(0, len(out))))])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_files_raise_nothing_else(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    files = {
        "vocab.json": json.dumps(small(), ensure_ascii=data.draw(st.booleans())).encode(),
        "merges.txt": "\n".join(map(" ".join, SMALL_MERGES)).encode(),
        "cl100k_base.tiktoken": b"".join(
            base64.b64encode(byte_level(p)) + b" %d\n" % i for p, i in small().items()
        ),
    }  # fmt: skip
    chosen = data.draw(st.sampled_from(sorted(files)))
    files[chosen] = mutated(files[chosen], data)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        if chosen.endswith(".tiktoken"):
            tokenizer = tiktoken_tokenizer(read_tiktoken(folder / chosen), "cl100k_base")
        else:
            tokenizer = bpe_tokenizer(*read_bpe(folder / "vocab.json", folder / "merges.txt"))
        assert tokenizer.decode(tokenizer.encode("ab ab 🦙")) is not None
    except PenstockError as error:
        one_line(error)
