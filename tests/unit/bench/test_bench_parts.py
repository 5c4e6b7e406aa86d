"""The parts of `penstock bench`: arrivals, figures, prompts and traces, the client on cut and hostile answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.bench.arrivals import Ramp, arrival_times
from penstock.bench.http import CallError, EventReader, HttpClient
from penstock.bench.metrics import Outcome, parse_goodput, summarize
from penstock.bench.prompts import Dataset, Maker, make_samples
from penstock.bench.serve import Target, one, run
from penstock.core.qoe import Expected
from tests.shared import SHARED

# -- arrivals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("burstiness", "cv"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(burstiness: float, cv: float) -> None:
    gaps = np.diff(arrival_times(40_000, 8.0, burstiness=burstiness, seed=3), prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_equal_seeds_are_equal_times_and_an_infinite_rate_is_at_once() -> None:
    assert (arrival_times(9, 2.0, seed=1) == arrival_times(9, 2.0, seed=1)).all()
    assert (arrival_times(9, 2.0, seed=1) != arrival_times(9, 2.0, seed=2)).all()
    assert not arrival_times(9, float("inf")).any()


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramps_go_from_one_rate_to_the_other(strategy: str) -> None:
    gaps = np.diff(arrival_times(40_000, 1.0, seed=5, ramp=Ramp(strategy, 2.0, 50.0)), prepend=0.0)
    assert 1 / gaps[:500].mean() == pytest.approx(2.0, rel=0.2)
    assert 1 / gaps[-500:].mean() == pytest.approx(50.0, rel=0.2)
    middle = 26.0 if strategy == "linear" else 10.0
    assert 1 / gaps[19_500:20_500].mean() == pytest.approx(middle, rel=0.2)


@pytest.mark.parametrize("wrong", [{"rate": 0.0}, {"rate": -1.0}, {"rate": float("nan")}, {"burstiness": 0.0}])
def test_rates_that_cannot_be_are_errors(wrong: dict[str, float]) -> None:
    rate = wrong.pop("rate", 1.0)
    with pytest.raises(ConfigError):
        arrival_times(3, rate, **wrong)


# -- figures -----------------------------------------------------------------------------------------------------


def test_figures_of_a_run_by_hand() -> None:
    good = Outcome(ok=True, prompt_tokens=10, output_tokens=5, cached_tokens=4, ttft_s=0.1, latency_s=0.5,
                   itls_s=[0.1] * 4)  # fmt: skip
    slow = Outcome(ok=True, prompt_tokens=30, output_tokens=1, cached_tokens=0, ttft_s=0.3, latency_s=0.3,
                   due_s=0.5, ready_s=0.52, sent_s=0.6)  # fmt: skip
    bad = Outcome(kind="http 429", due_s=1.0, ready_s=1.0, sent_s=1.0)
    found = summarize([good, slow, bad], 2.0, percentiles=(50, 99.9), goodput=parse_goodput(["ttft:200", "tpot:150"]))
    assert (found["completed"], found["failed"], found["errors_by_kind"]) == (2, 1, {"http 429": 1})
    assert (found["request_throughput"], found["output_throughput"]) == (1.0, 3.0)
    assert found["total_token_throughput"] == 23.0
    assert (found["request_goodput"], found["goodput_fraction"]) == (0.5, 1 / 3)
    assert found["prefix_cache_hit_rate"] == 0.1
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(100)  # one token has no time per further token
    assert found["p99.9_itl_ms"] == pytest.approx(100)
    assert found["median_e2el_ms"] == pytest.approx(400)
    assert found["max_send_delay_ms"] == pytest.approx(20)
    assert found["mean_slot_wait_ms"] == pytest.approx(80 / 3)
    assert found["max_concurrent_requests"] == 1
    assert (found["mean_qoe"], found["p10_qoe"]) == (1.0, 1.0)
    hasty = summarize([good, slow, bad], 2.0, reader=Expected(0.1, 10.0))
    assert hasty["mean_qoe"] == pytest.approx((1 + 1 / (1 + 0.2 * 10)) / 2), "on time; 0.2 s late by the formula"
    with pytest.raises(ConfigError):
        parse_goodput(["itl:3"])


# -- prompts -----------------------------------------------------------------------------------------------------


def test_random_prompts_have_their_lengths_and_their_common_beginning() -> None:
    data = Dataset(num_prompts=200, random_input_len=100, random_range_ratio=0.5, random_prefix_len=7, seed=4)
    samples = make_samples(data, Maker(list(range(1000))))
    assert samples == make_samples(data, Maker(list(range(1000))))
    assert all(len(s.prompt) == s.prompt_len for s in samples)
    lengths = [s.prompt_len - 7 for s in samples]
    assert 50 <= min(lengths) < 70 < 130 < max(lengths) <= 150
    assert len({tuple(s.prompt[:7]) for s in samples}) == 1
    assert len({tuple(s.prompt[7:15]) for s in samples}) == 200
    words = make_samples(data, Maker(tokens_per_word=2.0))
    assert all(isinstance(s.prompt, str) for s in words)


def test_prefixes_repeat() -> None:
    data = Dataset(name="prefix_repetition", num_prompts=40, prefix_repetition_num_prefixes=4)
    samples = make_samples(data, Maker(list(range(1000))))
    assert len({tuple(s.prompt[:256]) for s in samples}) == 4
    assert {s.prompt_len for s in samples} == {512}


TRACES = {
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:47.1805900,396,109\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,374,44,418,x\n"
    "5.2,GPT-4,9,0,9,x\n5.5,GPT-4,396,109,505,x\n",
    "mooncake.jsonl": '{"timestamp": 1000, "input_length": 374, "output_length": 44, "hash_ids": [1]}\n'
    '{"timestamp": 1500, "input_length": 396, "output_length": 109, "hash_ids": [1]}\n',
}


@pytest.mark.parametrize("name", TRACES)
def test_traces_have_their_times_and_lengths(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(TRACES[name])
    data = Dataset(name="timed_trace", path=str(tmp_path / name), num_prompts=9, trace_speed=2.0, max_input_len=390)
    first, second = make_samples(data, Maker(list(range(5000))))
    assert (first.arrival_s, second.arrival_s) == (0.0, pytest.approx(0.25))
    assert ((first.prompt_len, first.output_len), (second.prompt_len, second.output_len)) == ((374, 44), (390, 109))
    assert (first.prompt == second.prompt[:374]) == (name == "mooncake.jsonl")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "a,b\n1,2\n"), ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n"), ("a.csv", ""),
     ("a.jsonl", '{"timestamp": 1}\n'), ("a.jsonl", "{\n"), ("a.csv", "num_prefill_tokens,num_decode_tokens\n1,2\n")],
)  # fmt: skip
def test_broken_traces_are_errors(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError):
        make_samples(Dataset(name="timed_trace", path=str(tmp_path / name)), Maker([1]))


def test_conversations_and_prompts_of_files(tmp_path: Path) -> None:
    talks = [{"conversations": [{"from": "human", "value": "one two"}, {"value": "a b c"}]}, {"conversations": []}]
    (tmp_path / "s.json").write_text(json.dumps(talks))
    (tmp_path / "c.jsonl").write_text('{"prompt": "one two", "output_tokens": 3}\n')
    for name, file in (("sharegpt", "s.json"), ("custom", "c.jsonl")):
        samples = make_samples(Dataset(name=name, path=str(tmp_path / file), num_prompts=2), Maker())
        assert [(s.prompt, s.prompt_len, s.output_len) for s in samples] == [("one two", 2, 3)] * 2


@pytest.mark.skipif(not (SHARED / "data/traces").is_dir(), reason="the real traces are not beside the project")
@pytest.mark.parametrize("name", ["azure2023_conv.csv", "azure2023_code.csv", "mooncake_conversation.jsonl"])
def test_real_traces_are_read(name: str) -> None:
    data = Dataset(name="timed_trace", path=str(SHARED / "data/traces" / name), num_prompts=300, max_input_len=64)
    times = [s.arrival_s or 0.0 for s in make_samples(data, Maker(list(range(100))))]
    assert times == sorted(times)
    assert times[0] == 0 < times[-1]


# -- the client --------------------------------------------------------------------------------------------------

EVENTS = b': hi\n\ndata: {"a": 1}\n\nevent: x\r\ndata: b\r\n\r\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(EVENTS)), max_size=6))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    reader, edges = EventReader(), [0, *sorted(cuts), len(EVENTS)]
    found = [x for a, b in itertools.pairwise(edges) for x in reader.feed(EVENTS[a:b])]
    assert found == [b'{"a": 1}', b"b", b"1\n2", b"[DONE]"]


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def against(handler: Handler, ask: Callable[[HttpClient], Coroutine[Any, Any, Any]], timeout_s: float = 5.0) -> Any:
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await handler(reader, writer)

    async def go() -> Any:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=timeout_s)
            try:
                return await ask(client)
            finally:
                await client.close()
                for writer in writers:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()

    return asyncio.run(go())


def says(answer: bytes) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    return handle


OK = b"HTTP/1.1 200 OK\r\n"
STREAM = OK + b"content-type: text/event-stream\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "closed"),
        (OK + b"content-length: 9\r\n\r\nabc", "closed"),
        (OK + b"transfer-encoding: chunked\r\n\r\n5\r\nda", "closed"),
        (b"nonsense\r\n\r\n", "protocol"),
        (STREAM + b"data: {x\n\n", "protocol"),
        (STREAM + b'data: {"error": {"message": "the engine died"}}\n\n', "error event"),
        (STREAM, "empty"),
        (b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\nhm", "http 503"),
    ],
)
def test_broken_answers_are_told_apart(answer: bytes, kind: str) -> None:
    outcome = against(says(answer), lambda client: one(client, "/x", b"{}"))
    assert (outcome.ok, outcome.kind) == (False, kind)


def test_a_server_that_says_nothing_is_given_up() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client goes
        writer.close()

    outcome = against(handle, lambda client: one(client, "/x", b"{}"), timeout_s=0.05)
    assert outcome.kind == "timeout"


def test_requests_leave_when_they_are_due_whatever_the_server_does() -> None:
    """Open loop: nobody is answered before everybody has asked; a closed loop would wait here for ever."""
    asked = 0
    everybody = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await reader.readuntil(b"\r\n\r\n")
        asked += 1
        if asked == 20:
            everybody.set()
        await everybody.wait()
        writer.write(STREAM + b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')
        await writer.drain()
        writer.close()

    samples = make_samples(Dataset(num_prompts=20, random_input_len=3), Maker())
    target = Target(backend="openai", endpoint="/v1/completions", model="m")
    due = [0.002 * i for i in range(20)]
    outcomes, _ = against(handle, lambda client: run(client, target, samples, due))
    assert all(o.ok for o in outcomes)
    assert all(o.sent_s >= o.due_s - 1e-3 for o in outcomes)
    assert asked == 20


def test_a_late_client_says_so() -> None:
    samples = make_samples(Dataset(num_prompts=2, random_input_len=3), Maker())
    target = Target(backend="openai", endpoint="/v1/completions", model="m")

    async def ask(client: HttpClient) -> Any:
        asyncio.get_running_loop().call_later(0.01, time.sleep, 0.2)  # what a busy machine does to a client
        return await run(client, target, samples, [0.0, 0.05])

    outcomes, duration_s = against(says(STREAM + b'data: {"choices": [{"text": "x"}]}\n\n'), ask)
    found = summarize(outcomes, duration_s)
    assert found["max_send_delay_ms"] > 100


def test_addresses_and_headers_are_checked() -> None:
    for url in ("localhost:8000", "ftp://x", "http://", "http://x:99999", "http://x?y"):
        with pytest.raises(ConfigError):
            HttpClient(url)
    with pytest.raises(ConfigError):
        HttpClient("http://x", {"a": "b\r\nc: d"})
    assert issubclass(CallError, Exception)
