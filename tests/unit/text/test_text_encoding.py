"""Bounds of a text's tokens that need no encoding of it, and what is done of a text before it is refused."""

from __future__ import annotations

import random
import sys
import unicodedata

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from penstock.base.errors import InputError
from penstock.text.coverage import _SHRINKS, coverage_of
from penstock.text.encoding import (
    MAX_TEXT_BYTES,
    PIECE_CHARS,
    TooManyTokens,
    encode_all_steps,
    encode_steps,
    run,
)
from penstock.text.template import encode_chat, encode_chat_steps
from penstock.text.token_bytes import byte_level_piece
from penstock.text.tokenizer import Tokenizer
from penstock.text.world import byte_tokenizer
from tests.unit.text import text_vocabularies as vocabularies

KNOWN = ["gpt2", "gpt2_pair", "chat", "llama3", "cl100k", "world", "stories512", "llama2", "llama2_hf", "llama2_spm"]
ALL = [*KNOWN, "phi3", "t5", "t5_spm", "mistral1", "mistral3"]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def random_text(rng: random.Random, tokenizer: Tokenizer) -> str:
    """Runs of one character, pieces of the vocabulary, literals of its added tokens, and any characters at all."""
    parts = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(5)
        if kind == 0:
            parts.append(rng.choice(" \n\ta0=-*é日🦙\x00\x7f\u00a0\u3000") * rng.randrange(1, 300))
        elif kind == 1:
            parts.append(tokenizer.decode([rng.randrange(tokenizer.vocab_size)] * rng.randrange(1, 20)))
        elif kind == 2:
            parts.append(rng.choice(list(tokenizer.added_literals) or [""]) * rng.randrange(1, 4))
        elif kind == 3:
            parts.append("".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]))
                                 for _ in range(rng.randrange(1, 60))))  # fmt: skip
        else:
            parts.append(rng.choice(["the cat sat on the mat ", "x = [1, 2, 3]\n", "ﬁ Å K é "]) * rng.randrange(1, 20))
    return "".join(parts)


@pytest.mark.parametrize("vocabulary", ALL)
def test_no_text_has_fewer_tokens_than_its_bound(vocabulary: str) -> None:
    tokenizer = getattr(vocabularies, vocabulary)()
    assert (tokenizer.coverage is not None) == (vocabulary in KNOWN or vocabulary in ("phi3", "mistral3", "mistral1"))
    rng = random.Random(len(vocabulary))
    told = 0
    for _ in range(60):
        text = random_text(rng, tokenizer)
        try:
            num = len(tokenizer.encode(text, add_special_tokens=False))
        except InputError:
            continue
        if tokenizer.coverage is not None:
            bound = tokenizer.coverage.at_least(text, 1)
            assert bound <= num
            told += bound > 0
    assert told > 10 or tokenizer.coverage is None


def test_longest_tokens_reach_their_bound() -> None:
    """Otherwise it would be a loose one."""
    tokenizer = vocabularies.gpt2()
    longest = max((tokenizer.id_to_piece(i) for i in range(tokenizer.vocab_size)), key=len)
    text = tokenizer.decode([tokenizer.piece_to_id(longest)]) * 40
    assert tokenizer.coverage is not None
    assert (
        tokenizer.coverage.at_least(text, 1) <= len(tokenizer.encode(text)) <= 2 * tokenizer.coverage.at_least(text, 1)
    )


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normal_forms_shrink_no_further_than_is_assumed(form: str) -> None:
    """Everything that becomes a character, each part of it written as long as it can be."""
    changing = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.decomposition(c)]
    longest: dict[str, int] = {}
    for c in changing:
        normal = unicodedata.normalize(form, c)
        longest[normal] = max(longest.get(normal, 0), len(c.encode()))
        assert len(c.encode()) <= _SHRINKS[form] * len(normal.encode())
    for c in [*changing, *map(chr, range(0xAC00, 0xD7A4))]:
        parts = unicodedata.normalize("NFKD" if "K" in form else "NFD", c)
        normal = unicodedata.normalize(form, parts)
        assert sum(longest.get(part, len(part.encode())) for part in parts) <= _SHRINKS[form] * len(normal.encode())
        assert len(parts) <= _SHRINKS[form] * len(normal)


def byte_level(**more: object) -> tokenizers.Tokenizer:
    vocab = {byte_level_piece(bytes([b])): b for b in range(256)} | {"aaaa": 256, "aa": 257}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "a"), ("aa", "aa")], **more))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def test_nothing_is_said_of_vocabularies_that_may_delete_or_fuse_text() -> None:
    assert coverage_of(byte_level()) is not None
    stripping = byte_level()
    stripping.normalizer = normalizers.Strip()
    deleting = byte_level()
    deleting.normalizer = normalizers.Replace("a", "")
    matching = byte_level()
    matching.normalizer = normalizers.Replace(tokenizers.Regex("a+"), "a")
    dropping = byte_level()
    dropping.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    words = byte_level()
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    fusing = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True))
    words_only = tokenizers.Tokenizer(models.WordLevel(vocab={"a": 0, "?": 1}, unk_token="?"))
    for backend in (stripping, deleting, matching, dropping, words, fusing, words_only):
        assert coverage_of(backend) is None


def test_characters_that_no_token_writes_are_not_counted() -> None:
    vocab = {byte_level_piece(bytes([b])): b for b in range(1, 256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    text = "\x00" * 1_000_000
    assert tokenizer.encode(text) == []
    assert run(encode_steps(tokenizer, text + "a" * 10, 10)) == [97] * 10
    with pytest.raises(TooManyTokens):
        run(encode_steps(tokenizer, text + "a" * 11, 10))


def test_white_space_that_a_token_swallows_is_not_counted() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<end>", lstrip=True, rstrip=True)])
    tokenizer = Tokenizer(backend)
    text = " " * 300_000 + "<end>" + "\n" * 300_000
    assert run(encode_steps(tokenizer, text, 4)) == [tokenizer.added_literals["<end>"]]
    with pytest.raises(TooManyTokens):
        run(encode_steps(tokenizer, text.replace("<end>", "<and>"), 4))


class Counting:
    """A tokenizer whose work is counted."""

    def __init__(self, inner: Tokenizer, coverage: bool = True) -> None:
        self.inner, self.coverage = inner, inner.coverage if coverage else None
        self.counted: list[int] = []
        self.encoded: list[int] = []

    def count(self, text: str) -> int:
        self.counted.append(len(text))
        return self.inner.count(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(len(text))
        return self.inner.encode(text, add_special_tokens)


def test_what_the_vocabulary_refuses_costs_nothing() -> None:
    tokenizer = Counting(vocabularies.stories512())
    with pytest.raises(TooManyTokens, match="at least") as caught:
        next(encode_steps(tokenizer, "\n" * 16_000_000, 2048))
    assert caught.value.at_least > 2048
    assert (tokenizer.counted, tokenizer.encoded) == ([], [])


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("part", ["a", "the cat sat on the mat. ", "🦙", "\n"])
def test_a_text_is_refused_for_the_work_of_one_that_fits(part: str, knows: bool) -> None:
    """Also where the vocabulary knows nothing, or too little."""
    inner = vocabularies.gpt2()
    text, most = part * (800_000 // len(part.encode())), 5_000
    tokenizer = Counting(inner, coverage=knows)
    with pytest.raises(TooManyTokens) as caught:
        run(encode_steps(tokenizer, text, most))
    assert most < caught.value.at_least <= inner.count(text)
    if text.isspace() and not knows:
        return  # it might all vanish beside other text: encoded whole
    assert tokenizer.encoded == []
    assert inner.count(text[: sum(tokenizer.counted)]) <= most * 9 // 8 + PIECE_CHARS * len(part.encode())


@pytest.mark.parametrize("vocabulary", ALL)
def test_a_text_that_just_fits_is_encoded_whole_and_one_token_more_is_refused(vocabulary: str) -> None:
    tokenizer = getattr(vocabularies, vocabulary)()
    rng = random.Random(1)
    size = 20_000 if vocabulary == "t5_spm" else 80_000  # its encoder is written in Python
    for text in (("the cat sat on the mat. " * 4000)[:size], "".join(rng.choices("abcdef \n", k=size)), "x" * size):
        ids = tokenizer.encode(text)
        assert run(encode_steps(tokenizer, text, len(ids))) == ids
        with pytest.raises(TooManyTokens):
            run(encode_steps(tokenizer, text, len(ids) - 1))


def test_texts_that_could_not_be_encoded_at_all_are_refused_unseen() -> None:
    """White space of a vocabulary with long tokens for it, which says that it might fit."""
    tokenizer = Counting(vocabularies.gpt2())
    with pytest.raises(InputError, match=rf"\d+ bytes; at most {MAX_TEXT_BYTES} can be encoded") as caught:
        run(encode_steps(tokenizer, " " * (MAX_TEXT_BYTES + 1), 100_000))
    assert caught.value.code == "context_length_exceeded"
    assert (tokenizer.counted, tokenizer.encoded) == ([], [])


def test_steps_are_small_until_the_whole_is_worth_it() -> None:
    tokenizer = vocabularies.gpt2()
    text = "  the cat sat on the mat. " * 10_000
    text += "internationalisation " * 10_000
    sizes = list(encode_steps(tokenizer, text, len(text) // 4 - 1))
    assert sizes[-1] == len(text)
    assert all(size <= PIECE_CHARS for size in sizes[:-1])


def test_of_several_texts_all_together_are_bounded_and_the_one_too_many_is_named() -> None:
    tokenizer = byte_tokenizer()
    texts = ["a" * 100, "b" * 200_000, "c" * 300, "d" * 50]
    names = [f"prompt[{i}]" for i in range(4)]
    whole = [tokenizer.encode(text) for text in texts]
    assert run(encode_all_steps(tokenizer, texts, names, 200_000, 200_450)) == whole
    with pytest.raises(TooManyTokens) as caught:
        run(encode_all_steps(tokenizer, texts, names, 200_000, 200_449))
    assert (caught.value.param, caught.value.before, caught.value.at_least) == ("prompt[3]", 200_400, 50)
    with pytest.raises(TooManyTokens) as caught:
        run(encode_all_steps(tokenizer, texts, names, 199_999, 1 << 30))
    assert caught.value.param == "prompt[1]"
    with pytest.raises(InputError) as bad:
        run(encode_all_steps(tokenizer, ["a", "\ud800"], names[:2], 10, 10))
    assert bad.value.param == "prompt[1]"


def test_many_short_texts_share_steps_and_no_step_holds_them_all() -> None:
    texts = ["x" * 4095] * 1024
    sizes = list(encode_all_steps(Counting(byte_tokenizer()), texts, ["p"] * 1024, 5000, 1 << 30))
    assert 60 < len(sizes) < 80
    assert sum(sizes) == 1024 * 4095
    assert max(sizes) <= PIECE_CHARS


def test_a_conversation_is_bounded_by_what_the_template_makes_of_it() -> None:
    tokenizer = vocabularies.chat()
    messages = [{"role": "user", "content": "the cat sat on the mat. " * 20_000}]
    ids = encode_chat(tokenizer, CHATML, messages)
    assert run(encode_chat_steps(tokenizer, CHATML, messages, most=len(ids), size=1)) == ids
    for most in (len(ids) - 1, 100):
        with pytest.raises(TooManyTokens):
            run(encode_chat_steps(tokenizer, CHATML, messages, most=most, size=1))
    short = "{{ messages[0].role }}"  # leaves the bulk out
    assert run(encode_chat_steps(tokenizer, short, messages, most=5, size=1)) == encode_chat(tokenizer, short, messages)
