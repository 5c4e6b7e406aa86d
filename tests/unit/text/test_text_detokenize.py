"""Streamed text equals text decoded at once, for any split of any ids; and costs are linear."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from penstock.text.detokenize import IncrementalDetokenizer, WindowStream
from penstock.text.tokenizer import Tokenizer
from tests.unit.text import text_vocabularies as vocabularies

NAMES = ["stories512", "llama2", "llama2_hf", "phi3", "gpt2", "chat", "t5"]
OTHERS = ["stories512_spm", "llama2_spm", "mistral1", "mistral3", "t5_spm", "gpt2_pair", "llama3", "cl100k", "world"]
"""Read from their own formats."""
CHARACTERS = st.one_of(
    st.sampled_from("ab 中🦙é𐍈\u2581\u0301\n\ufffd\u200d👩"), st.characters(exclude_categories=["Cs"])
)


def split(ids, cuts):
    bounds = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in pairwise(bounds)]


@cache
def load(path):
    return tokenizers.Tokenizer.from_file(str(path))


@cache
def sentencepiece_llama2():
    sentencepiece = pytest.importorskip("sentencepiece")
    path = vocabularies.shared("data", "tokenizers", "llama2", "tokenizer.model")
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def stream(tokenizer, parts, *args, **kwargs):
    detokenizer = IncrementalDetokenizer(tokenizer, *args, **kwargs)
    deltas = [detokenizer.add(part) for part in parts]
    return deltas, detokenizer.flush()


@st.composite
def ids_of(draw, name):
    """Random ids: special ones, unknown ones, runs of single bytes (good and broken UTF-8), and encoded text."""
    tokenizer = getattr(vocabularies, name)()
    if name in ("gpt2", "chat"):
        byte_ids = [tokenizer.encode_plain(chr(b))[-1] for b in range(128)] + list(range(94, 256))
    elif name == "t5":
        byte_ids = list(range(3, 259))
    else:
        byte_ids = list(range(3, 259))
    one = st.integers(0, tokenizer.vocab_size + 3).map(lambda i: [i])
    special = st.sampled_from(sorted(tokenizer.special_ids)).map(lambda i: [i])
    run = st.lists(st.sampled_from(byte_ids), max_size=6)
    fallback = st.text("中🦙é𐍈\u2581 ", max_size=4).map(tokenizer.encode_plain)
    text = st.text(st.sampled_from("ab 中🦙\n"), max_size=6).map(tokenizer.encode)
    cut = st.tuples(fallback, st.integers(0, 5), st.integers(0, 5)).map(lambda t: t[0][t[1] : len(t[0]) - t[2]])
    parts = draw(st.lists(st.one_of(one, special, run, fallback, text, cut), max_size=8))
    return [i for part in parts for i in part]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(name, data):
    tokenizer = getattr(vocabularies, name)()
    ids = data.draw(ids_of(name))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=10))
    skip, spaces = data.draw(st.booleans()), data.draw(st.booleans())
    deltas, rest = stream(tokenizer, split(ids, cuts), skip, spaces)
    assert "".join(deltas) + rest == tokenizer.decode(ids, skip, spaces)
    single, rest1 = stream(tokenizer, [[i] for i in ids], skip, spaces)
    assert "".join(single) + rest1 == tokenizer.decode(ids, skip, spaces)


@pytest.mark.parametrize("name", ["gpt2", "chat"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_decoding_byte_level_ids_is_what_tokenizers_does(name, data):
    tokenizer = getattr(vocabularies, name)()
    ids = data.draw(ids_of(name))
    backend = load(getattr(vocabularies, f"{name}_path")())
    assert tokenizer.decode(ids, skip_special_tokens=False) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", ["phi3", "t5"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_decoding_other_ids_is_what_tokenizers_does_unless_bytes_are_broken(name, data):
    tokenizer = getattr(vocabularies, name)()
    ids = data.draw(ids_of(name))
    folder = {"phi3": "phi-3-mini", "t5": "t5-small"}[name]
    backend = load(vocabularies.shared("data", "tokenizers", folder, "tokenizer.json"))
    expected = backend.decode([i for i in ids if i not in tokenizer.special_ids], skip_special_tokens=False)
    if "\ufffd" not in expected:
        assert tokenizer.decode(ids) == expected


@settings(max_examples=100, deadline=None)
@given(ids=ids_of("llama2"))
@example(ids=[])
@example(ids=[259, 259, 15043])
@example(ids=[35, 15043])
def test_decoding_llama_ids_is_what_sentencepiece_does(ids):
    oracle = sentencepiece_llama2()
    # Unknown tokens are its own business; a leading byte token that is a space, or U+2581, it does not strip.
    ids = [i for i in ids if 3 <= i < 32000 and i != 35]
    assert vocabularies.llama2().decode(ids) == oracle.decode(ids)


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.sampled_from("ab🦙中é𐍈 "), max_size=12))
def test_no_partial_character_is_ever_shown(text):
    for name in ("stories512", "gpt2", "llama2"):
        tokenizer = getattr(vocabularies, name)()
        deltas, rest = stream(tokenizer, [[i] for i in tokenizer.encode(text)])
        assert rest == ""
        shown = ""
        for delta in deltas:
            shown += delta
            assert text.startswith(shown)
        assert shown == text


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
@settings(max_examples=60, deadline=None)
@given(text=st.text(CHARACTERS, max_size=25), cuts=st.lists(st.integers(0, 200), max_size=12), alone=st.booleans())
def test_any_split_of_any_text_is_the_text_decoded_at_once(name, text, cuts, alone):
    tokenizer = getattr(vocabularies, name)()
    ids = tokenizer.encode_plain(text)
    whole = tokenizer.decode(ids)
    if name not in ("t5", "t5_spm", "stories512_spm"):  # which normalise, or write unknown text as one token
        assert whole == text.replace("\u2581", " ") or (
            whole == text and tokenizer.decode(tokenizer.encode("▁")) == "▁"
        )
    deltas, rest = stream(tokenizer, [[i] for i in ids] if alone else split(ids, cuts))
    shown = ""
    for delta in deltas:
        shown += delta
        assert whole.startswith(shown)
        assert "\ufffd" not in delta or "\ufffd" in text
    assert (shown, rest) == (whole, "")


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_of_other_formats_stream_as_they_decode(name, data):
    """Broken characters, special tokens and ids that nobody knows among them."""
    tokenizer = getattr(vocabularies, name)()
    one = st.integers(0, tokenizer.vocab_size + 3).map(lambda i: [i])
    low = st.lists(st.integers(0, 300), max_size=6)
    special = st.sampled_from(sorted(tokenizer.special_ids)).map(lambda i: [i])
    torn = st.tuples(
        st.text("中🦙é𐍈 \u2581", max_size=4).map(tokenizer.encode_plain), st.integers(0, 5), st.integers(0, 5)
    )
    parts = data.draw(
        st.lists(st.one_of(one, low, special, torn.map(lambda t: t[0][t[1] : len(t[0]) - t[2]])), max_size=8)
    )
    ids = [i for part in parts for i in part]
    skip = data.draw(st.booleans())
    deltas, rest = stream(tokenizer, split(ids, data.draw(st.lists(st.integers(0, 100), max_size=10))), skip)
    assert "".join(deltas) + rest == tokenizer.decode(ids, skip)


def test_characters_of_several_tokens_appear_whole_and_at_once():
    tokenizer = vocabularies.stories512()
    ids = tokenizer.encode("🦙", add_special_tokens=False)
    assert len(ids) == 5
    assert stream(tokenizer, [[i] for i in ids]) == (["", "", "", "", "🦙"], "")
    # The last bytes never come: the flush says so. The next token decides: the replacement appears with it.
    assert stream(tokenizer, [[i] for i in ids[:3]]) == (["", "", ""], "\ufffd\ufffd")
    assert stream(tokenizer, [[i] for i in [*ids[:3], ids[0]]])[0][-1] == "\ufffd\ufffd "
    assert stream(vocabularies.gpt2(), [[8582], [99], [64]])[0] == ["", "", "\ufffda"]


def test_a_continued_prompt_keeps_its_leading_space():
    tokenizer = vocabularies.stories512()
    prompt, all_ids = tokenizer.encode("Once upon"), tokenizer.encode("Once upon a time")
    assert all_ids[: len(prompt)] == prompt
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
    assert detokenizer.add(all_ids[len(prompt) :]) + detokenizer.flush() == " a time"
    alone = IncrementalDetokenizer(tokenizer)
    assert alone.add(all_ids[len(prompt) :]) == "a time"
    after_bos = IncrementalDetokenizer(tokenizer, prompt_ids=[1])  # BOS is no text
    assert after_bos.add(prompt[1:]) == "Once upon"


def test_cost_is_bounded_by_the_number_of_tokens():
    """Counted, not timed: bytes looked up by the table, tokens decoded by the window."""
    tokenizer = vocabularies.gpt2()
    looked_up = []
    real = tokenizer.table.__class__.__getitem__

    class Counting(tokenizer.table.__class__):
        def __getitem__(self, i):
            looked_up.append(i)
            return real(self, i)

    table = Counting(tokenizer.table.piece_of, tokenizer.table.to_bytes)
    text = table.stream()
    for i in range(5000):
        text.feed([i % 50000])
    assert len(looked_up) == 5000

    decoded = []

    def decode(ids):
        decoded.append(len(ids))
        return "\ufffd" * len(ids)  # never decides

    window = WindowStream(decode)
    out = "".join(window.feed([i]) for i in range(5000))
    assert max(decoded) <= 130
    assert len(out + window.finish()) == 5000


@pytest.mark.parametrize(
    ("decoder", "vocab"),
    [
        (decoders.WordPiece(), ["a", "##b", "##c", "don", "'", "##t", ".", ",", "x", "the"]),
        (None, ["a", "bc", "d", "[X]", "e"]),
        (decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]), ["_a", "b", "_", "__", "c_"]),
    ],
)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_other_decoders_stream_through_a_window(decoder, vocab, data):
    backend = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(vocab)}, unk_token=vocab[0]))
    if decoder is not None:
        backend.decoder = decoder
    if "[X]" in vocab:
        backend.add_special_tokens(["[X]"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.table is None
    ids = data.draw(st.lists(st.integers(0, len(vocab) - 1), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=5))
    skip, spaces = data.draw(st.booleans()), data.draw(st.booleans())
    deltas, rest = stream(tokenizer, split(ids, cuts), skip, spaces)
    assert "".join(deltas) + rest == tokenizer.decode(ids, skip, spaces)
