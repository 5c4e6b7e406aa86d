"""Tokenizers against SentencePiece, llama2.c's rule, llama.cpp's and swift-transformers' golden encodings."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers

from penstock.base.errors import InputError, ModelError
from penstock.text.tokenizer import Tokenizer
from tests.shared import shared
from tests.unit.text import text_vocabularies as vocabularies

TEXT = st.text(st.one_of(st.sampled_from(" \n\tabcthe.,'ß½🦙\u3000\u00a0中"), st.characters(exclude_categories=["Cs"])),
               max_size=60)  # fmt: skip
SPM = [
    ("stories512", ("models", "stories260K", "tok512.model")),
    ("llama2", ("data", "tokenizers", "llama2", "tokenizer.model")),
]


def processor(parts):
    sentencepiece = pytest.importorskip("sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_file=str(shared(*parts)))


def naive_llama2c(pieces, text):
    """llama2.c's `encode`, by its rule: join the neighbours whose joint piece has the best score, leftmost first."""
    table = {}
    for i, (raw, _) in enumerate(pieces):
        table.setdefault(raw, i)
    ids = [table[b" "]] if text else []
    for char in text:
        raw = char.encode()
        ids += [table[raw]] if raw in table else [b + 3 for b in raw]
    while True:
        best = None
        for at in range(len(ids) - 1):
            joint = table.get(pieces[ids[at]][0] + pieces[ids[at + 1]][0])
            if joint is not None and (best is None or pieces[joint][1] > best[0]):
                best = pieces[joint][1], at, joint
        if best is None:
            return ids
        ids[best[1] : best[1] + 2] = [best[2]]


@pytest.mark.parametrize(("name", "parts"), SPM)
@settings(max_examples=150, deadline=None)
@given(text=TEXT)
@example(text=" " * 37 + "x" + " " * 5)
@example(text="aaaaaaaaaaaaaaaaaaa----------------------======")
def test_pieces_encode_and_decode_like_sentencepiece(name, parts, text):
    tokenizer, oracle = getattr(vocabularies, name)(), processor(parts)
    if any(literal in text for literal in tokenizer.special_literals):
        return  # see the test of differences
    if name == "stories512":
        text = re.sub("[ \u2581]+", " ", text).strip(" ")  # likewise
    ids = oracle.encode(text)
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == oracle.decode(ids) == text.replace("\u2581", " ")


@pytest.mark.parametrize("file", ["novels", "code", "qa"])
def test_pieces_encode_a_book_like_sentencepiece(file):
    path = sorted(shared("data", "corpus", file).iterdir())[0]
    text = path.read_text("utf-8", errors="replace")[:40_000]
    for name, parts in SPM:
        text = re.sub(" +", " ", text).strip(" ") if name == "stories512" else text
        ids = processor(parts).encode(text)
        assert getattr(vocabularies, name)().encode(text)[1:] == ids


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_pieces_encode_by_llama2c_s_rule(text):
    for name, parts in [
        ("stories512", ("models", "stories260K", "tok512.bin")),
        ("stories4096", ("data", "tokenizers", "stories", "tok4096.bin")),
        ("llama2", ("data", "tokenizers", "llama2", "tokenizer.bin")),
    ]:
        tokenizer = getattr(vocabularies, name)()
        if "\u2581" in text or any(literal in text for literal in tokenizer.special_literals):
            continue
        assert tokenizer.encode(text, add_special_tokens=False) == naive_llama2c(PIECES[name](parts), text)


class _Pieces(dict):
    def __missing__(self, name):
        def read(parts, cache=[]):  # noqa: B006
            if not cache:
                cache.append(vocabularies.read_bin(*parts))
            return cache[0]

        self[name] = read
        return read


PIECES = _Pieces()


def test_differences_from_llama2c_and_sentencepiece():
    """What differs, and why. Nothing else is known to."""
    pieces = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    pieces += [(f"<0x{b:02X}>".encode(), 0.0) for b in range(256)] + [(b" ", -9.0), (b"b", -9.0), (b"ab", -1.0)]
    made = Tokenizer.from_pieces(pieces, 1, 2)
    # 1. Control tokens have a text form, as in Hugging Face tokenizers; llama2.c and SentencePiece read it as text.
    assert vocabularies.llama2().encode("<s>", add_special_tokens=False) == [1]
    assert vocabularies.llama2().encode_plain("<s>") == processor(SPM[1][1]).encode("<s>")
    # 2. SentencePiece joins characters that are no pieces themselves; llama2.c and merge lists cannot.
    assert made.encode_plain("ab") == naive_llama2c(pieces, "ab") == [259, ord("a") + 3, 260]
    # 3. U+2581 in a text is a space, as in SentencePiece; llama2.c, whose file has spaces, writes its bytes.
    assert vocabularies.llama2().encode("a\u2581b") == vocabularies.llama2().encode("a b")
    assert processor(SPM[1][1]).encode("a\u2581b") == processor(SPM[1][1]).encode("a b")
    # 4. The unknown token decodes to nothing or its name; SentencePiece writes U+2047.
    assert vocabularies.llama2().decode([0]) == ""
    assert processor(SPM[1][1]).decode([0]) == " \u2047 "
    # 5. A NUL character: SentencePiece keeps it, llama2.c's C string ends there. We keep it.
    assert vocabularies.llama2().decode(vocabularies.llama2().encode("a\0b")) == "a\0b"
    # 6. The SentencePiece model of stories260K drops extra spaces; its llama2.c file does not say so, and keeps them.
    assert processor(SPM[0][1]).encode(" a  b ") == processor(SPM[0][1]).encode("a b")
    kept = vocabularies.stories512().encode(" a  b ", add_special_tokens=False)
    assert kept == naive_llama2c(vocabularies.read_bin("models", "stories260K", "tok512.bin"), " a  b ")
    assert vocabularies.stories512().decode(kept) == " a  b "
    # 7. llama2.c strips the space behind BOS only; a text decoded from its first generated token loses it here.
    assert vocabularies.llama2().decode([1, 15043]) == vocabularies.llama2().decode([15043]) == "Hello"


def test_broken_bytes_become_one_replacement_character_each_as_in_sentencepiece():
    tokenizer, oracle = vocabularies.llama2(), processor(SPM[1][1])
    for ids in ([229, 133, 171, 200, 229, 133], [229, 133, 15043], [200], [243, 162, 162], [230, 132, 15043, 132]):
        assert tokenizer.decode(ids) == oracle.decode(ids)
    # `tokenizers` gives up the whole run, valid characters and all.
    backend = tokenizers.Tokenizer.from_file(str(shared("data", "tokenizers", "phi-3-mini", "tokenizer.json")))
    assert backend.decode([229, 133, 171, 200]) == "\ufffd" * 4
    assert vocabularies.phi3().decode([229, 133, 171, 200]) == "₨\ufffd"


@pytest.mark.parametrize(
    ("golden", "name"), [("llama-spm", "llama2"), ("llama-spm", "llama2_hf"), ("phi-3", "phi3"), ("gpt-2", "gpt2")]
)
def test_golden_texts_of_llama_cpp(golden, name):
    tokenizer = getattr(vocabularies, name)()
    cases = vocabularies.golden_texts(golden)
    assert len(cases) > 40
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("file", "name"), [("swift_llama_encoded.json", "llama2"), ("swift_gpt2_encoded_tokens.json", "gpt2")]
)
def test_golden_text_of_swift_transformers(file, name):
    data = json.loads(shared("data", "tokenizers", "golden", file).read_text("utf-8"))
    tokenizer = getattr(vocabularies, name)()
    ids = data.get("token_ids") or data.get("encoded_ids") or [tokenizer.piece_to_id(t) for t in data["encoded_text"]]
    assert len(ids) > 100
    assert tokenizer.encode(data["text"])[-len(ids) :] == ids


@pytest.mark.parametrize("name", ["llama2", "llama2_hf"])
def test_edge_cases_of_swift_transformers(name):
    data = json.loads(shared("data", "tokenizers", "golden", "swift_tokenizer_tests.json").read_text("utf-8"))
    cases = data["coreml-projects/Llama-2-7b-chat-coreml"]
    tokenizer = getattr(vocabularies, name)()
    for case in cases:
        ids = case["encoded"]["input_ids"]
        assert tokenizer.encode(case["input"]) == ids, case["input"]
        assert tokenizer.decode(ids) == case["decoded_without_special"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded_with_special"]


def test_pieces_and_tokenizer_json_of_llama2_agree():
    ours, hf = vocabularies.llama2(), vocabularies.llama2_hf()
    assert ours.vocab_size == hf.vocab_size == 32000
    assert (ours.bos_id, ours.eos_ids, ours.special_ids) == (hf.bos_id, hf.eos_ids, hf.special_ids)
    assert (ours.bos_id, ours.eos_ids, ours.bos_token, ours.eos_token) == (1, (2,), "<s>", "</s>")
    assert [ours.id_to_piece(i) for i in range(32000)] == [hf.id_to_piece(i) for i in range(32000)]
    assert ours.id_to_piece(3 + 10) == "<0x0A>"
    assert ours.id_to_piece(32000) == ours.id_to_piece(-1) == ""
    assert (ours.special_literals, set(ours.added_literals)) == ({"<s>", "</s>", "<unk>"}, {"<s>", "</s>", "<unk>"})


def test_attributes_of_a_hugging_face_vocabulary():
    phi = vocabularies.phi3()
    assert phi.vocab_size == 32011
    assert phi.bos_id == 1
    assert phi.eos_ids == (32000,)
    assert phi.piece_to_id("<|end|>") == 32007 in phi.special_ids
    assert "<|end|>" in phi.special_literals
    assert "</s>" in phi.added_literals
    assert "</s>" not in phi.special_literals  # the file says it is not special
    assert phi.encode("Hi")[0] != 1  # its post-processor adds no BOS
    gpt2 = vocabularies.gpt2()  # <|endoftext|> is in its vocabulary, and only the configuration makes it special
    assert gpt2.encode("a<|endoftext|>") == [64, 50256]
    assert gpt2.special_ids == {50256}
    assert vocabularies.t5().encode("Hello") == [8774, 1]


def test_ids_of_a_configuration_beat_its_names():
    made = Tokenizer.from_hf(
        vocabularies.gpt2_path(), {"eos_token": "<|endoftext|>", "eos_token_id": [50256, 0], "bos_token_id": 5}
    )
    assert made.eos_ids == (50256, 0)
    assert made.bos_id == 5
    assert made.special_ids == {50256, 0, 5}


@pytest.mark.parametrize("name", ["stories512", "llama2", "llama2_hf", "phi3", "gpt2", "chat", "t5"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_plain_encoding_never_yields_a_control_token(name, data):
    tokenizer = getattr(vocabularies, name)()
    literals = sorted(tokenizer.added_literals)
    bits = st.one_of(st.sampled_from(literals), st.sampled_from(["<", "|", ">", "s", "im_", "end", " "]), TEXT)
    text = "".join(data.draw(st.lists(bits, max_size=6)))
    ids = tokenizer.encode_plain(text)
    unknown = {"t5": {2}}.get(name, set())
    assert not (tokenizer.special_ids - unknown) & set(ids)
    assert not (set(tokenizer.added_literals.values()) - unknown) & set(ids)
    if name not in ("t5",):  # which normalises
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("\u2581", " ")


def test_a_merge_list_that_spells_a_control_token_cannot_be_used_to_write_it():
    vocab = {c: i for i, c in enumerate("<s>ab")} | {"<s": 5, "<s>": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    made = Tokenizer(backend)
    assert made.encode("a<s>b") == [3, 6, 4]
    assert made.encode_plain("a<s>b") == [3, 0, 1, 2, 4]
    only = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    only.add_special_tokens([AddedToken("a", normalized=False)])
    assert Tokenizer(only).encode_plain("b") == [1]
    with pytest.raises(InputError, match="special token"):
        Tokenizer(only).encode_plain("ba")


def test_inner_text_gets_no_dummy_prefix():
    for name in ("llama2", "phi3"):
        tokenizer = getattr(vocabularies, name)()
        assert tokenizer.id_to_piece(tokenizer.encode("Hello", add_special_tokens=False)[0]) == "▁Hello"
        assert [tokenizer.id_to_piece(i) for i in tokenizer.encode_inner("Hello")] == ["Hello"]
    assert vocabularies.gpt2().encode_inner("Hello") == vocabularies.gpt2().encode("Hello")
    assert vocabularies.llama2().encode_inner("") == []


def test_spaces_between_special_tokens_matter_where_tokens_are_joined_by_spaces():
    backend = tokenizers.Tokenizer(
        models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "[X]": 3, "[Y]": 4}, unk_token="[UNK]")
    )
    backend.add_special_tokens(["[X]", "[Y]"])
    made = Tokenizer(backend)
    assert made.table is None
    ids = [3, 4, 1, 2, 3]
    assert made.decode(ids) == "a b"
    assert made.decode(ids, skip_special_tokens=False) == "[X] [Y] a b [X]"
    assert made.decode(ids, False, False) == "[X][Y] a b [X]"
    assert vocabularies.chat().decode([50257, 50258], False, False) == "<|im_start|><|im_end|>"


def test_numpy_ids_and_unknown_ids_decode():
    ids = np.array([15043, 3186], dtype=np.int32)
    assert vocabularies.llama2().decode(ids) == "Hello world"
    assert vocabularies.llama2().decode([15043, 10**6, -1, 3186]) == "Hello world"
    assert vocabularies.t5().decode([10**6, 8774]) == "Hello"


def test_no_silent_cut_by_limits_in_the_file():
    data = json.loads(vocabularies.gpt2_path().read_text("utf-8"))
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    data["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "!"}  # fmt: skip
    made = Tokenizer.from_hf(vocabularies.save(data))
    assert len(made.encode("one two three four")) == 4
    assert len(made.encode("one")) == 1


def test_lone_surrogates_and_other_types_are_input_errors():
    for tokenizer in (vocabularies.llama2(), vocabularies.gpt2()):
        with pytest.raises(InputError, match="surrogate at character 1"):
            tokenizer.encode("a\ud800b")
        with pytest.raises(InputError, match="must be a string, not int"):
            tokenizer.encode_plain(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[1]", b"null", b"\xff\xfe", b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":4294967295},"merges":[]}}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
        b'{"version":"1.0","model":{"type":"Nonsense","vocab":{"a":0}}}', b"[" * 100_000,
        b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"b":0},"unk_token":"?"}}',
    ],
)  # fmt: skip
def test_broken_files_are_model_errors_in_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.from_hf(path, {})
    assert "tokenizer.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_missing_and_damaged_files_are_model_errors(tmp_path):
    with pytest.raises(ModelError, match=r"cannot read nowhere\.json"):
        Tokenizer.from_hf(tmp_path / "nowhere.json", {})
    # A damaged real file: its merges lost their no-break spaces.
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable tokenizer: Merges"):
        Tokenizer.from_hf(shared("data", "tokenizers", "llama2", "tokenizer.json"), {})
    with pytest.raises(ModelError, match="JSON object"):
        Tokenizer.from_hf(vocabularies.gpt2_path(), [])  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="not a token id"):
        Tokenizer.from_hf(vocabularies.gpt2_path(), {"eos_token_id": ["x"]})


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "0 pieces"), ([(b"a", 0.0)], "the BOS id is 1"), ([(b"a", 0.0)] * 2, "the EOS id is 2"),
        ([(b"a", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), (b"\xff", 0.0)], "piece 3 is not valid UTF-8"),
        ([(b"a", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), (b"x" * 600, 0.0)], "piece 3 has 600 characters"),
        ([(b"a", float("nan")), (b"<s>", 0.0), (b"</s>", 0.0)], "score of piece 0"),
    ],
)  # fmt: skip
def test_broken_tables_are_model_errors(pieces, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_pieces(pieces, 1, 2)


def test_pieces_that_occur_twice_decode_by_id_and_encode_as_the_first():
    pieces = [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), (b" ", 0.0), (b"a", 0.0), (b"a", 0.0)]
    made = Tokenizer.from_pieces(pieces, 1, 2)
    assert made.vocab_size == 6
    assert made.encode("a", add_special_tokens=False) == [3, 4]
    assert made.decode([3, 5, 4]) == "aa"


def test_literals_that_only_normalisation_spells_are_found():
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([AddedToken("<a>", normalized=True, special=True)])
    made = Tokenizer(backend)
    assert made.encode("＜a＞") == [2]
    assert made.hidden_literals("＜a＞") == ["<a>"]
    assert made.hidden_literals("<a> b") == []
    assert vocabularies.llama2_hf().hidden_literals("x <s> y") == []
