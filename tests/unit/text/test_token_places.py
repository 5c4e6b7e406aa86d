"""Tokens by themselves and in their text: no space is lost, no two share a key, offsets are places in the text."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batch import TokenLogprobs
from penstock.server.turns.logprobs import Columns, LogprobWriter, TokenTexts
from penstock.text.detokenize import IncrementalDetokenizer
from penstock.text.places import TokenPlaces
from penstock.text.tokenizer import Tokenizer
from tests.unit.text import text_vocabularies as known

SENTENCEPIECE: list[Callable[[], Tokenizer]] = [
    known.stories512, known.llama2, known.llama2_hf, known.phi3, known.t5, known.stories512_spm, known.llama2_spm,
    known.mistral1, known.mistral3, known.t5_spm,
]  # fmt: skip
BYTEWISE: list[Callable[[], Tokenizer]] = [known.gpt2, known.gpt2_pair, known.llama3, known.cl100k, known.world]
TEXTS = ("Once upon a time", "Zoë 🦊🦊 said: “héllo”\n\n  indented", " led by a space", "日本語 text", "a</s>b<s> c")


def by(make: Callable[[], Tokenizer]) -> str:
    return make.__name__


def columns(tokenizer: Tokenizer, ids: list[int], places: TokenPlaces, as_ids: bool = False) -> dict[str, list]:
    entries = [TokenLogprobs(token_id=i, logprob=-1.0, rank=1, top_ids=[i], top_logprobs=[-1.0]) for i in ids]
    out = Columns()
    LogprobWriter(TokenTexts(tokenizer, as_ids=as_ids), 1).completion(out, ids, entries, places)
    return json.loads(Columns.object(*map(bytes, out.parts())))


def bytes_of(name: str) -> bytes:
    if not name.startswith("bytes:"):
        return name.encode()
    return bytes(int(pair, 16) for pair in name.removeprefix("bytes:").split("\\x")[1:])


def check(text: str, told: dict[str, list], hidden: frozenset[str] = frozenset()) -> None:
    """`hidden`: names of tokens that the text does not have."""
    shown = [name for name in told["tokens"] if name not in hidden]
    whole = b"".join(map(bytes_of, shown))
    assert whole.decode("utf-8", "replace") == text
    at = 0
    for name, offset in zip(told["tokens"], told["text_offset"], strict=True):
        if name in hidden:
            continue
        assert offset == len(whole[:at].decode("utf-8", "ignore")), name
        if not name.startswith("bytes:"):
            assert text[offset:].startswith(name)
        at += len(bytes_of(name))


@pytest.mark.parametrize("make", [*SENTENCEPIECE, *BYTEWISE], ids=by)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_a_prompt_add_up_to_it(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:
        pytest.skip("this vocabulary changes the text, or reads special tokens in it")
    told = columns(tokenizer, ids, TokenPlaces(tokenizer, IncrementalDetokenizer(tokenizer, False), text=text))
    assert told["text_offset"][0] == 0
    if ids[0] == tokenizer.bos_id:
        told = {name: values[1:] for name, values in told.items()}
    check(text, told, frozenset(name for name in tokenizer.special_literals if name not in text))


@pytest.mark.parametrize("make", [*SENTENCEPIECE, *BYTEWISE], ids=by)
@pytest.mark.parametrize("text", TEXTS[:4])
@pytest.mark.parametrize("start", [0, 7])
def test_tokens_that_go_on_from_a_prompt_add_up(make: Callable[[], Tokenizer], text: str, start: int) -> None:
    tokenizer = make()
    prompt, ids = tokenizer.encode("They said"), tokenizer.encode_inner(text)
    stream = IncrementalDetokenizer(tokenizer, prompt_ids=prompt)
    full = stream.add(ids) + stream.flush()
    told = columns(tokenizer, ids, TokenPlaces(tokenizer, IncrementalDetokenizer(tokenizer, prompt_ids=prompt), start))
    told["text_offset"] = [offset - start for offset in told["text_offset"]]
    check(full, told, tokenizer.special_literals)
    named = columns(
        tokenizer, ids, TokenPlaces(tokenizer, IncrementalDetokenizer(tokenizer, prompt_ids=prompt)), as_ids=True
    )
    assert named["text_offset"] == told["text_offset"], "a name that is no text moves nothing"
    assert named["tokens"] == [f"token_id:{i}" for i in ids]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([known.stories512, known.llama2_spm, known.gpt2, known.world]))
def test_offsets_of_any_tokens_never_go_back_and_never_leave_the_text(data: st.DataObject, make: Callable) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    stream = IncrementalDetokenizer(tokenizer)
    text = stream.add(ids) + stream.flush()
    told = columns(tokenizer, ids, TokenPlaces(tokenizer, IncrementalDetokenizer(tokenizer)))
    offsets = told["text_offset"]
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for name, offset, i in zip(told["tokens"], offsets, ids, strict=True):
        if i not in tokenizer.special_ids and not name.startswith("bytes:"):
            assert text[offset:].startswith(name)


@pytest.mark.parametrize("make", [*SENTENCEPIECE, *BYTEWISE], ids=by)
def test_every_token_has_a_key_of_its_own(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    size = tokenizer.vocab_size
    ids = list(range(size))
    chosen = tokenizer.encode(" a", add_special_tokens=False)[-1]
    top = [-i / 1000 for i in ids]
    entry = TokenLogprobs(token_id=chosen, logprob=top[chosen], rank=1, top_ids=ids, top_logprobs=top)
    writer, out = LogprobWriter(TokenTexts(tokenizer), -1), Columns()
    writer.completion(out, [chosen], [entry], TokenPlaces(tokenizer, IncrementalDetokenizer(tokenizer)))
    told = json.loads(Columns.object(*map(bytes, out.parts())))
    (found,) = told["top_logprobs"]
    assert len(found) == size
    assert found[told["tokens"][0]] == top[chosen], "the chosen token's name is its own number"


def test_names_of_tokens() -> None:
    llama, gpt2 = known.llama2_spm(), known.gpt2()
    assert llama.token_text(llama.encode("x upon", add_special_tokens=False)[-1]) == " upon"
    assert {llama.token_text(llama.piece_to_id(piece) or 0) for piece in ("▁a", "a")} == {" a", "a"}
    assert llama.token_text(llama.piece_to_id("<0xE2>") or 0) == "bytes:\\xe2"
    assert llama.token_text(llama.piece_to_id("<0x0A>") or 0) == "\n"
    fox = gpt2.encode("x 🦊", add_special_tokens=False)[1:]
    assert b"".join(bytes_of(gpt2.token_text(i)) for i in fox).decode() == " 🦊"
    assert gpt2.token_text(fox[0]) == "bytes:\\x20\\xf0\\x9f"
    assert gpt2.token_text(10**6) == ""


def test_a_text_that_its_normaliser_changed_is_found_again() -> None:
    tokenizer = known.t5()
    text = "one   two  three \uff21 four"
    ids = tokenizer.encode(text)
    told = columns(tokenizer, ids, TokenPlaces(tokenizer, IncrementalDetokenizer(tokenizer, False), text=text))
    assert all(0 <= offset <= len(text) for offset in told["text_offset"])
    at = {name.strip(): offset for name, offset in zip(told["tokens"], told["text_offset"], strict=True)}
    assert text[at["four"] :].strip() == "four"
