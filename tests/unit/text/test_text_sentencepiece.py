"""`tokenizer.model` files against SentencePiece itself, llama.cpp's and swift-transformers' golden encodings."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.base.errors import ModelError, PenstockError, UnsupportedError
from penstock.formats.sentencepiece import SentencePieceModel, parse_sentencepiece, read_sentencepiece
from penstock.text.charsmap import Charsmap
from penstock.text.score_models import Agenda, bpe
from penstock.text.sentencepiece import ScoredPieces, sentencepiece_tokenizer
from penstock.text.template import encode_chat
from tests.shared import shared
from tests.unit.text import text_vocabularies as vocabularies
from tests.unit.text.text_vocabularies import field, model_proto

ODD = [
    "<h1>", "ab", "abc", "the end", "tab", "\u2581\u2581", "\u2581", "\ufb01", "\u2460", "\uff21", "\uff42", "e\u0301",
    "\u200b", "\u00c5", "\u1100\u1161", "\u1100\u1161\u11a8", "\u3000", "🦙", "中", "ß", "\t", "\n", "\0", "\ufeff",
]  # fmt: skip
TEXT = st.one_of(
    st.lists(st.one_of(st.sampled_from([*ODD, " ", "  ", *"thedacblo,."]), st.characters(exclude_categories=["Cs"])),
             max_size=40).map("".join),
    st.text(st.sampled_from(" ab\u2581\n"), max_size=30),
    st.text(st.sampled_from("01234567899 lLaA."), max_size=40),
)  # fmt: skip
FILES = {
    "stories512_spm": ("models", "stories260K", "tok512.model"),
    "llama2_spm": ("data", "tokenizers", "llama2", "tokenizer.model"),
    "mistral1": ("data", "tokenizers", "mistral", "tokenizer.model.v1"),
    "mistral3": ("data", "tokenizers", "mistral", "mistral_instruct_tokenizer_240323.model.v3"),
}
TRAINED = {
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram nfkc": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "unigram case folded, user symbols": {
        "model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf",
        "user_defined_symbols": ["<h1>", "ab", "the end"],
    },
    "unigram, suffix": {"model_type": "unigram", "treat_whitespace_as_suffix": True, "remove_extra_whitespaces": False},
    "bpe, user symbols": {
        "model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<h1>", "ab", "abc", " x", "\u2581\u2581"]
    },
    "bpe identity, user symbols": {
        "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<h1>", "ab", "abc", " x", "\u2581\u2581", "\n"],
    },
    "bpe, no dummy prefix": {"model_type": "bpe", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "bpe, suffix": {"model_type": "bpe", "treat_whitespace_as_suffix": True, "byte_fallback": True},
}  # fmt: skip


def oracle(model: bytes):
    sentencepiece = pytest.importorskip("sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def made(model: bytes, config=None):
    return sentencepiece_tokenizer(ScoredPieces(**vars(parse_sentencepiece(model))), config)


def book(size: int) -> str:
    return sorted(shared("data", "corpus", "novels").iterdir())[0].read_text("utf-8", errors="replace")[
        2000 : 2000 + size
    ]


@cache
def file_oracle(name: str):
    return oracle(shared(*FILES[name]).read_bytes())


@cache
def trained(name: str):
    sentencepiece = pytest.importorskip("sentencepiece")
    out = io.BytesIO()
    lines = [line for line in book(120_000).split("\n") if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, minloglevel=2, vocab_size=500, hard_vocab_limit=False,
        character_coverage=0.995, **TRAINED[name],
    )  # fmt: skip
    return oracle(out.getvalue()), made(out.getvalue())


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=80, deadline=None)
@given(text=TEXT)
@example(text=" " * 37 + "x" + " " * 5)
@example(text="aaaaaaaaaaaaaaaaaaa----------------------======")
@example(text="[REFERENCE_DOC_3] x [REFERENCE_DOC_11]")
def test_real_models_encode_and_decode_as_sentencepiece(name, text):
    tokenizer, spm = getattr(vocabularies, name)(), file_oracle(name)
    ids = spm.encode(text)
    assert tokenizer.decode(ids) == spm.decode(ids)
    if not any(literal in text for literal in tokenizer.special_literals):
        assert tokenizer.encode(text) == [1, *ids]
    if not any(literal in text for literal in tokenizer.added_literals):
        assert tokenizer.encode_plain(text) == ids


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=80, deadline=None)
@given(text=TEXT)
@example(text="\u2581 a \u2581")
@example(text="   ")
def test_trained_models_encode_and_decode_as_sentencepiece(name, text):
    spm, tokenizer = trained(name)
    if any(literal in text for literal in tokenizer.special_literals):
        return
    assert tokenizer._backend._encode_text.normalize(text) == spm.normalize(text)
    ids = spm.encode(text)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    known = [i for i in ids if i]  # the unknown piece is written U+2047 there
    assert tokenizer.decode(known) == spm.decode(known)


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_spaces_that_are_not_escaped(text):
    for name in ("bpe, no dummy prefix", "unigram, suffix"):
        model = trained(name)[0].serialized_model_proto() + field(3, field(5, 0))
        assert made(model).encode_plain(text) == oracle(model).encode(text)


@pytest.mark.parametrize("name", [*FILES, *TRAINED])
def test_a_book_and_random_ids(name):
    spm, tokenizer = (file_oracle(name), getattr(vocabularies, name)()) if name in FILES else trained(name)
    text = book(50_000)
    assert tokenizer.encode(text, add_special_tokens=False) == spm.encode(text)
    rng = random.Random(name)
    special = tokenizer.special_ids
    for _ in range(400):
        ids = [rng.choice([rng.randrange(spm.vocab_size()), rng.randrange(3, 259)]) for _ in range(rng.randrange(8))]
        ids = [i for i in ids if i not in special]
        assert tokenizer.decode(ids) == spm.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
@example(text="<h1>00444")
@example(text="tl444L aaaa 4x333")
def test_t5_form_encodes_as_sentencepiece(text):
    tokenizer = vocabularies.t5_spm()
    if not any(literal in text for literal in tokenizer.special_literals):
        assert tokenizer.encode(text) == [*t5_oracle().encode(text), 1]


def test_t5_form_takes_the_same_of_two_equal_segmentations():
    """These texts are full of exact ties; adding in double precision loses about 1 in 100 of them."""
    rng, tokenizer, spm = random.Random(3), vocabularies.t5_spm(), t5_oracle()
    for _ in range(2000):
        kinds = ["01234567899", "0044", "abc lmo", "hello world the ", "aAllLL"]
        text = "".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randrange(4, 60)))
        assert tokenizer.encode(text) == [*spm.encode(text), 1]


@cache
def t5_oracle():
    return oracle(vocabularies.t5_proto())


def test_golden_texts_of_llama_cpp():
    cases, tokenizer = vocabularies.golden_texts("llama-spm"), vocabularies.llama2_spm()
    assert len(cases) == 46
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


def golden(file: str):
    return json.loads(shared("data", "tokenizers", "golden", file).read_text("utf-8"))


@pytest.mark.parametrize(
    ("file", "name"), [("swift_llama_encoded.json", "llama2_spm"), ("swift_t5_base_encoded.json", "t5_spm")]
)
def test_golden_text_of_swift_transformers(file, name):
    data, tokenizer = golden(file), getattr(vocabularies, name)()
    assert tokenizer.encode(data["text"]) == data["token_ids"]
    assert [tokenizer.id_to_piece(i) for i in data["token_ids"]][-20:-1] == data["bpe_tokens"][-19:] or name != "t5_spm"


@pytest.mark.parametrize(
    ("key", "name"), [("coreml-projects/Llama-2-7b-chat-coreml", "llama2_spm"), ("t5-base", "t5_spm")]
)
def test_edge_cases_of_swift_transformers(key, name):
    cases, tokenizer = golden("swift_tokenizer_tests.json")[key], getattr(vocabularies, name)()
    assert len(cases) == 18
    for case in cases:
        ids = case["encoded"]["input_ids"]
        assert tokenizer.encode(case["input"]) == ids, case["input"]
        if name == "llama2_spm":
            assert tokenizer.decode(ids) == case["decoded_without_special"]
            assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded_with_special"]


def test_files_and_other_forms_of_one_vocabulary_agree():
    spm, binary = vocabularies.llama2_spm(), vocabularies.llama2()
    assert (
        (spm.vocab_size, spm.bos_id, spm.eos_ids)
        == (binary.vocab_size, binary.bos_id, binary.eos_ids)
        == (32000, 1, (2,))
    )
    assert spm.special_literals == binary.special_literals
    assert [spm.id_to_piece(i) for i in range(32000)] == [binary.id_to_piece(i) for i in range(32000)]
    for text in ("Hello <s> there</s>", "<s>", "a</s>b", "x  y\n"):
        assert spm.encode(text) == binary.encode(text)


def test_special_tokens_of_mistral():
    tokenizer = vocabularies.mistral3()
    assert tokenizer.vocab_size == 32768
    assert tokenizer.encode("[INST] Hi [/INST]")[:2] == [1, 3]
    assert tokenizer.encode("[INST] Hi [/INST]")[-1] == 4
    for literal in ("[INST]", "<s>", "</s>", "[TOOL_CALLS]", "[REFERENCE_DOC_3]"):
        ids = tokenizer.encode_plain("a " + literal + " b")
        assert tokenizer.piece_to_id(literal) not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == f"a {literal} b"
    assert tokenizer.piece_to_id("[INST]") == 3 in tokenizer.special_ids
    assert tokenizer.piece_to_id("[REFERENCE_DOC_3]") not in tokenizer.special_ids


def test_configuration_names_tokens_and_prefixes():
    vocab = read_sentencepiece(shared(*FILES["llama2_spm"]))
    added = {
        "32000": {"content": "<|end|>", "rstrip": True, "special": True},
        "32001": {"content": "<tool>", "lstrip": True},
    }
    config = {"added_tokens_decoder": added, "eos_token": {"content": "<|end|>"}, "add_bos_token": False}

    def build(**more):
        return sentencepiece_tokenizer(ScoredPieces(**vars(vocab)), config | more)

    phi = build()
    assert (phi.vocab_size, phi.eos_ids, phi.bos_id) == (32002, (32000,), 1)
    assert phi.encode("a<|end|>  \n b") == [263, 32000, 289]
    assert phi.encode("a  <tool>b") == [263, 32001, 289]
    assert phi.special_literals == {"<s>", "</s>", "<unk>", "<|end|>"}
    assert set(phi.added_literals) == phi.special_literals | {"<tool>"}
    assert 32000 not in phi.encode_plain("<|end|>")
    assert [phi.id_to_piece(i) for i in build(legacy=False).encode("a<s>b")] == ["▁a", "<s>", "b"]
    assert [phi.id_to_piece(i) for i in phi.encode("a<s>b")] == ["▁a", "<s>", "▁b"]
    assert build(add_eos_token=True).encode("a") == [263, 32000]
    assert [phi.id_to_piece(i) for i in phi.encode_inner("Hello")] == ["Hello"]
    assert build(bos_token=None).bos_id is None
    with pytest.raises(ModelError, match=r"calls token 5 'x', but the vocabulary says '<0x02>'"):
        build(added_tokens_decoder={"5": {"content": "x"}})
    with pytest.raises(UnsupportedError, match="single word"):
        build(added_tokens_decoder={"32000": {"content": "x", "single_word": True}})


def random_bpe(rng: random.Random) -> tuple[list[tuple[str, float, int]], bytes]:
    """A vocabulary as nobody trains it: ties, holes, characters that are no pieces, unused pieces."""
    letters, types = rng.choice(["abc", "abc", "abcd"]), rng.choice([[1], [1, 1, 1, 5]])
    texts = {"a", "b", "c", "\u2581"}
    for _ in range(rng.randrange(25)):
        texts.add("".join(rng.choice(letters) for _ in range(rng.randrange(2, 6))))
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(t, float(-rng.randrange(4)), rng.choice(types)) for t in sorted(texts)]
    return pieces, model_proto(pieces, {3: 2})


def one_line(error: Exception) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 400


def test_vocabularies_that_no_merge_list_expresses():
    rng = random.Random(5)
    slow = 0
    for _ in range(300):
        pieces, model = random_bpe(rng)
        spm, tokenizer = oracle(model), made(model)
        ordinary = {p: i for i, (p, _, t) in enumerate(pieces) if t in (1, 5)}
        slow += isinstance(
            bpe(ordinary, [s for _, s, _ in pieces], {i for i, p in enumerate(pieces) if p[2] == 5}), Agenda
        )
        for _ in range(20):
            text = "".join(rng.choice("abcd ") for _ in range(rng.randrange(16)))
            assert tokenizer.encode(text, add_special_tokens=False) == spm.encode(text), (pieces, text)
    assert 100 < slow < 300


def test_padding_with_unused_pieces_costs_nothing():
    vocab = read_sentencepiece(shared(*FILES["stories512_spm"]))
    for n in range(8):
        vocab.pieces.append(f"[PAD{n}]")
        vocab.scores.append(-1000.0)
        vocab.types.append(5)
    tokenizer = sentencepiece_tokenizer(ScoredPieces(**vars(vocab)))
    assert not isinstance(tokenizer._backend._encode_text._model, Agenda)
    assert tokenizer.encode("[PAD1] x") == vocabularies.stories512_spm().encode("[PAD1] x")


def base():
    return [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("a", -1.0, 1)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no pieces"),
        (b"\x0a" + b"\xff" * 9 + b"\x7f", "bytes, but only 0 are left"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "only 0 are left"),
        (b"\x0a" + b"\x80" * 30, "within a number"),
        (b"\x0a\x05\x0a\x03\xff\xfe\xfd", "piece 0 is not valid UTF-8"),
        (b"\x0b", "unknown kind 3"),
        (b"\x00\x00", "without a number"),
        (b"\x08\x01", "a piece is of the wrong type"),
        (model_proto([("a", float("nan"), 1)]), "score of piece 0 is not finite"),
        (model_proto([("a", float("inf"), 1)]), "score of piece 0 is not finite"),
        (model_proto([("a", 0.0, 9)]), "unknown type 9"),
        (model_proto([("x" * 3000, 0.0, 1)]), "3000 bytes; 2048 are allowed"),
        (model_proto([*base(), ("a", -2.0, 1)], {3: 2}), "piece 4 is the same as piece 3"),
        (model_proto([*base(), ("", -2.0, 1)], {3: 2}), "piece 4 is empty"),
        (model_proto([*base(), ("x" * 600, -2.0, 1)], {3: 2}), "600 characters"),
        (model_proto(base()[1:], {3: 2}), "neither byte pieces"),
        (model_proto(base(), {3: 2, 35: 1}), "only 0 of the 256"),
        (model_proto([*base(), ("<0xZZ>", 0.0, 6)], {3: 2}), "byte piece 4"),
        (model_proto(base()[:3], {3: 1}), "no ordinary pieces"),
        (model_proto(base(), {3: 2}, {2: b"\xff\xff\xff\xff12345"}), "rules are broken"),
        (model_proto(base(), {3: 4}), "'character'"),
        (model_proto(base(), {3: 2}) + field(5, field(2, b"x")), "denormaliser"),
    ],
)  # fmt: skip
def test_broken_models_are_model_errors_in_one_line(tmp_path: Path, data, message):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        sentencepiece_tokenizer(ScoredPieces(**vars(read_sentencepiece(path)))).encode("a")
    assert message in str(caught.value)
    assert "tokenizer.model" in str(caught.value)
    one_line(caught.value)


def test_other_files_that_are_called_tokenizer_model(tmp_path: Path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(UnsupportedError, match=r"rename it to end with \.tiktoken"):
        read_sentencepiece(path)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="at most"):
        read_sentencepiece(path)
    with pytest.raises(ModelError, match="cannot read"):
        read_sentencepiece(tmp_path / "none.model")
    vocab = ScoredPieces(["a"], [0.0, 1.0], [1])
    with pytest.raises(ModelError, match="1 pieces, 2 scores and 1 token types"):
        sentencepiece_tokenizer(vocab)


def test_defaults_of_the_message_and_fields_that_nobody_needs():
    model = parse_sentencepiece(
        field(1, field(1, b"a") + field(9, b"later") + field(8, 3)) + field(77, 5) + b"\x51" + bytes(8)
    )
    assert model == SentencePieceModel(["a"], [0.0], [1])
    model = parse_sentencepiece(model_proto([("a", 1.5, 4)], {3: 2, 24: 1, 35: 1, 46: b"B"}, {3: 0, 4: 0, 5: 0}))
    expected = SentencePieceModel(["a"], [1.5], [4], 2, True, True, "B")
    expected.add_dummy_prefix = expected.remove_extra_whitespaces = expected.escape_whitespaces = False
    assert model == expected


@settings(max_examples=150, deadline=None)
@given(blob=st.binary(min_size=8, max_size=400), size=st.integers(1, 90), text=st.text(max_size=20))
def test_hostile_normalisation_rules(blob, size, text):
    try:
        "".join(Charsmap((4 * size).to_bytes(4, "little") + blob).prefixes(text))
    except PenstockError as error:
        one_line(error)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_mutated_files_raise_nothing_else(data):
    raw = bytearray(shared(*FILES["stories512_spm"]).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=5))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(raw))))
    try:
        tokenizer = made(bytes(raw[:cut]))
        tokenizer.decode(tokenizer.encode("Once upon a time 🦙"))
    except PenstockError as error:
        one_line(error)


PHI_TEXT = st.lists(
    st.sampled_from(["<|user|>", "<|end|>", "</s>", "<s>", "<|assistant|>", "Hi", " ", "\n", "中", "▁", "b ", "<|"]),
    max_size=12,
).map("".join)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(text=PHI_TEXT)
def test_added_tokens_are_found_as_hugging_face_finds_them(text):
    """Llama 2's vocabulary with Phi-3's added tokens, some of which take white space along, against its own file."""
    assert phi3_spm().encode(text) == vocabularies.phi3().encode(text)


@cache
def phi3_spm():
    data = json.loads(shared("data", "tokenizers", "phi-3-mini", "tokenizer.json").read_text("utf-8"))
    vocab = read_sentencepiece(shared(*FILES["llama2_spm"]))
    added = {str(token["id"]): token for token in data["added_tokens"]}
    return sentencepiece_tokenizer(
        ScoredPieces(**vars(vocab)),
        {"added_tokens_decoder": added, "add_bos_token": False, "eos_token": "<|endoftext|>"},
    )


CHAT = "{% for m in messages %}{{ open }}{{ m.content }}{{ close }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "opening", "closing"),
    [
        ("mistral3", "[INST]", "[/INST]"), ("mistral3", "[REFERENCE_DOC_1]", "</s>"), ("llama2_spm", "<s>", "</s>"),
        ("t5_spm", "<pad>", "</s>"), ("llama3", "<|begin_of_text|>", "<|eot_id|>"),
        ("cl100k", "<|fim_prefix|>", "<|endoftext|>"),
    ],
)  # fmt: skip
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_client_writes_a_control_token(name, opening, closing, data):
    tokenizer = getattr(vocabularies, name)()
    pieces = [opening, closing, opening[:-1], opening[-1], closing[:2], closing[2:], "x", " ", "\n"]
    content = data.draw(st.lists(st.sampled_from(pieces), max_size=8).map("".join))
    template = CHAT.replace("{{ open }}", opening).replace("{{ close }}", closing)
    ids = encode_chat(tokenizer, template, [{"role": "user", "content": content}])
    for literal in (opening, closing):
        assert ids.count(tokenizer.piece_to_id(literal)) == 1
    assert ids[-1] == tokenizer.piece_to_id(closing)
