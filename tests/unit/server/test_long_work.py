"""Long work in slices: bodies counted piece by piece, tenants' turns, answers in pieces, what slow readers hold."""

from __future__ import annotations

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.base.errors import InputError
from penstock.core.batch import TokenLogprobs
from penstock.engine.client import Sample
from penstock.engine.frontend import CHARS_PER_LOGPROB, EngineClient
from penstock.engine.stream import Cursor
from penstock.server.call import Tenant
from penstock.server.schema import decode
from penstock.server.transport.pieces import GAP, Pieces
from penstock.server.transport.slices import Slices, whole
from penstock.server.turns.logprobs import Columns, LogprobWriter, TokenTexts


def test_a_body_is_counted_alike_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    letters = ['"', "\\", "{", "[", ",", ":", "a", "1", "\u6f22"]
    for _ in range(300):
        texts = ["".join(draw.choices(letters, k=draw.randrange(12))) for _ in range(6)]
        value = {t + str(i): [t, {t: i}, [[]], 12] for i, t in enumerate(texts)}
        body = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode()
        keys = len(value) + len(texts)
        for size in (1, 2, 3, 7, 64, 1 << 17):
            monkeypatch.setattr(decode, "_PIECE", size)
            brackets, num_keys = whole(decode._skeleton(body))
            assert num_keys == keys
            assert brackets.count(b"[") == brackets.count(b"]") == 1 + 4 * len(texts)
            assert decode.parse(body) == value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"a":[' + b",".join([b"[]"] * (decode.MAX_CONTAINERS + 1)) + b"]}", "lists and objects"),
        (b'{"a":' + b"[" * 101 + b"]" * 101 + b"}", "deeper"),
        (b'{"a":"' + b"\\n" * (decode.MAX_ESCAPES + 1) + b'"}', "backslashes"),
        (b'{"a":' + b"1" * (decode.MAX_DIGITS + 1) + b"}", "digits"),
    ],
)
def test_what_is_too_much_is_found_before_anything_is_made(
    body: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any) -> Any:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(decode.msgspec.json, "decode", made)
    with pytest.raises(InputError, match=said):
        decode.parse(body)


def test_brackets_and_digits_in_texts_do_not_count() -> None:
    value = {"a": "[{" * 200_000, "b": "7" * 6_000_000}
    assert decode.parse(msgspec.json.encode(value)) == value


def test_tenants_take_turns_whatever_each_has_waiting() -> None:
    order: list[str] = []

    async def main() -> None:
        slices = Slices()

        async def slice_of(name: str) -> None:
            await slices.work(Tenant(name=name)).pause()
            order.append(name)

        await asyncio.gather(*(slice_of("many") for _ in range(8)), slice_of("one"))
        assert len(slices) == 0

    asyncio.run(main())
    assert order.index("one") <= 1
    assert len(order) == 9


def test_one_slice_in_a_round_of_the_loop() -> None:
    async def main() -> None:
        slices, rounds, passed = Slices(), 0, []

        def count() -> None:
            nonlocal rounds
            rounds += 1
            asyncio.get_running_loop().call_soon(count)

        async def one() -> None:
            await slices.turn("t")
            passed.append(rounds)

        count()
        await asyncio.gather(*(one() for _ in range(6)))
        assert len(set(passed)) == 6

    asyncio.run(main())


def test_pieces_are_the_whole() -> None:
    parts = [b"[" + b"1," * 100_000 + b"1]", bytearray(b'{"x":2}')]
    pieces = Pieces({"a": GAP, "b": "\0", "c": [GAP]}, parts)
    sent = list(pieces)
    assert max(map(len, sent)) <= 2 * (64 << 10)
    assert sum(map(len, sent)) == len(pieces)
    assert json.loads(b"".join(sent)) == {"a": [1] * 100_001, "b": "\0", "c": [{"x": 2}]}


def test_logprobs_are_written_as_json() -> None:
    writer = LogprobWriter(TokenTexts(None), 2)
    entries = [
        TokenLogprobs(7, -2.5, 3, [1, 2], [-0.5, float("-inf")]),
        TokenLogprobs(1, -0.5, 1, [1, 2], [-0.5, -1.0]),
    ]
    first, second = json.loads(b"[" + writer.chat([7, 1], entries) + b"]")
    assert (first["token"], first["logprob"]) == ("token_id:7", -2.5)
    assert [t["logprob"] for t in first["top_logprobs"]] == [-0.5, -9999.0]
    assert second["token"] == second["top_logprobs"][0]["token"] == "token_id:1"
    out = Columns()
    writer.completion(out, [5, 7], [None, entries[0]], None)
    written = json.loads(Columns.object(*map(bytes, out.parts())))
    assert written["token_logprobs"] == [None, -2.5]
    assert written["text_offset"] == [0, 0], "there is no text"
    assert list(written["top_logprobs"][1]) == ["token_id:1", "token_id:2", "token_id:7"]


def test_a_slow_reader_is_behind_by_all_that_is_held_for_it() -> None:
    sample = Sample(0, None, None)
    sample.text, sample.token_ids = ["ab", "cd"], [1, 2]
    sample.logprobs = [TokenLogprobs(1, -1.0, 1, list(range(20)), [0.0] * 20)] * 2
    client: Any = SimpleNamespace(_processor=SimpleNamespace(live=lambda _: SimpleNamespace(samples=[sample])))
    stream: Any = SimpleNamespace(request_id="r", seen={0: Cursor()}, chars_per_token=8, forgets=True)
    assert EngineClient.unread_chars(client, stream) == 4 + 2 * 8 + 2 * 21 * CHARS_PER_LOGPROB
