"""Speculation as users see it: usage, metrics, logs, the page, `prediction`; with it and without the same answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from penstock.base.clock import VirtualClock
from penstock.cli.main import main
from penstock.core.acceptance import Acceptance
from penstock.core.messages import EngineInfo, EngineSnapshot, Outputs
from penstock.core.output import RequestMetrics
from penstock.engine.client import Tally
from penstock.engine.stream import Delta
from penstock.server.live import LiveServer
from penstock.server.observation.request_log import Throughput
from penstock.server.observation.stats import Stats
from penstock.server.schema.openai import CompletionTokensDetails
from penstock.server.turns.turn import Meter
from tests.api.watch import CHAT, COMPLETIONS, grown, on_loop, scrape, small

CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "controller": "fixed"}
STORY = "The cat sat on the mat. The dog sat on the mat. The cat sat on the mat. The dog sat"
HELLO = [{"role": "user", "content": "Tell me a story about a cat and a dog."}]


@pytest.fixture(scope="module")
def drafting() -> Iterator[LiveServer]:
    with small(ops="native", speculative_config=CONFIG) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveServer]:
    with small(ops="native") as server:
        yield server


def post(live: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    given = {"messages": HELLO} if path == CHAT else {"prompt": STORY}
    answer = httpx.post(live.url + path, json=given | {"max_tokens": 40, "temperature": 0} | body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(live: LiveServer, path: str, **body: Any) -> list[dict[str, Any]]:
    given = {"messages": HELLO} if path == CHAT else {"prompt": STORY}
    body = given | {"max_tokens": 40, "temperature": 0, "stream": True} | body
    with httpx.stream("POST", live.url + path, json=body, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# -- usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_K12_usage_tells_of_drafts_and_the_answer_is_the_same(
    drafting: LiveServer, plain: LiveServer, path: str
) -> None:
    with_it, without = post(drafting, path, n=2), post(plain, path, n=2)
    assert with_it["choices"] == without["choices"]
    details = with_it["usage"].pop("completion_tokens_details")
    assert with_it["usage"] == without["usage"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert 0 <= details["accepted_prediction_tokens"] <= with_it["usage"]["completion_tokens"]
    assert details["rejected_prediction_tokens"] >= 0
    if path == COMPLETIONS:  # it repeats itself
        assert details["accepted_prediction_tokens"] > 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_ends_with_the_same_usage(drafting: LiveServer, path: str) -> None:
    post(drafting, path)  # what is cached shows in the usage
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(drafting, path, stream_options=options)
    usage = chunks[-1]["usage"]
    assert usage == post(drafting, path)["usage"]
    so_far = [c["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for c in chunks]
    assert so_far == sorted(so_far)


def test_right_drafts_behind_the_end_are_not_accepted() -> None:
    """Three tokens were wanted, five drafts of eight were right: no more can be accepted than the answer has."""
    metrics = RequestMetrics(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=5)
    stream: Any = SimpleNamespace(
        request_id="a", request=SimpleNamespace(prompt_token_ids=[1, 2]), call=None, num_cached_tokens=0,
            weight_versions=None,
        metrics=metrics,
        output=SimpleNamespace(num_cached_tokens=0, metrics=metrics),
    )  # fmt: skip
    meter = Meter([stream], speculates=True)
    meter.count(stream, [Delta(0, "x", [4, 5, 6])])
    details = meter.usage().completion_tokens_details
    assert details == CompletionTokensDetails(accepted_prediction_tokens=3, rejected_prediction_tokens=5)
    metrics.num_draft_tokens, metrics.num_accepted_tokens = 10, 6
    meter.count(stream, [Delta(0, "y", [7, 8, 9, 10])])
    details = meter.usage().completion_tokens_details
    assert details == CompletionTokensDetails(accepted_prediction_tokens=6, rejected_prediction_tokens=4)


def test_row23_penalties_structured_output_and_speculation_together(drafting: LiveServer, plain: LiveServer) -> None:
    """LoRA, the fourth of that row, is in tests/engine/test_adapters.py."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 6}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    body = {
        "structured_outputs": {"json": schema}, "temperature": 0.8, "seed": 5, "presence_penalty": 0.5,
        "frequency_penalty": 0.4, "repetition_penalty": 1.1, "logprobs": 2, "max_tokens": 60,
    }  # fmt: skip
    before = scrape(drafting.url)
    with_it, without = post(drafting, COMPLETIONS, **body), post(plain, COMPLETIONS, **body)
    assert with_it["choices"] == without["choices"]
    assert grown(before, scrape(drafting.url))["vllm:spec_decode_num_draft_tokens_total"] > 0


# -- metrics, log, page ------------------------------------------------------------------------------------------


def test_K12_metrics_add_up_to_the_requests(drafting: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    before = scrape(drafting.url)
    answers = [post(drafting, path, temperature=t, seed=3) for path in (COMPLETIONS, CHAT) for t in (0, 1)]
    after = scrape(drafting.url)
    more = grown(before, after)
    details = [answer["usage"]["completion_tokens_details"] for answer in answers]
    accepted = sum(d["accepted_prediction_tokens"] for d in details)
    drafted = accepted + sum(d["rejected_prediction_tokens"] for d in details)
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "penstock.request"]
    assert len(lines) == 4
    assert sum(line.get("draft_tokens", 0) for line in lines) == drafted
    for prefix in ("vllm:", "penstock:"):
        name = prefix + "spec_decode_"
        assert more[name + "num_draft_tokens_total"] == drafted > 0
        assert more[name + "num_accepted_tokens_total"] == accepted > 0
        assert more[name + "num_drafts_total"] == sum(line.get("drafts", 0) for line in lines)
        at = [v for k, v in more.items() if k.startswith(name + "num_accepted_tokens_per_pos_total")]
        assert sum(at) == accepted
        assert after[name + "num_accepted_tokens_per_pos_total{position=0}"] <= after[name + "num_drafts_total"]
    assert more["penstock:spec_decode_steps_total"] > 0
    assert more["penstock:spec_decode_draft_seconds_total"] > 0
    assert more["penstock:spec_decode_verify_seconds_total"] > 0
    length = 1 + after["vllm:spec_decode_num_accepted_tokens_total"] / after["vllm:spec_decode_num_drafts_total"]
    assert after["penstock:spec_decode_mean_accepted_length"] == pytest.approx(length)
    assert 0 < after["penstock:spec_decode_draft_share"] < 1
    assert after["penstock:spec_decode_speedup"] > 0
    state = httpx.get(drafting.url + "/internal/state").json()
    assert state["speculation"]["spec_decode_acceptance_length"] == pytest.approx(length)


def test_without_speculation_nothing_is_said_of_it(plain: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.request")
    for path in (COMPLETIONS, CHAT):
        assert "completion_tokens_details" not in post(plain, path)["usage"]
    assert not [name for name in scrape(plain.url) if "spec_decode" in name]
    assert httpx.get(plain.url + "/internal/state").json()["speculation"] is None
    assert '"drafts"' not in caplog.text


def test_counters_survive_a_new_engine() -> None:
    client: Any = SimpleNamespace(info=EngineInfo(vocab_size=8, max_model_len=64), snapshot=EngineSnapshot(),
                                  on_message=[], on_finish=[])  # fmt: skip
    stats = Stats(client, VirtualClock())
    for epoch, drafts, at in ((0, 4.0, (3.0, 1.0)), (1, 2.0, (1.0,)), (1, 4.0, (2.0, 1.0, 1.0))):
        counters = {"num_drafts": drafts, "num_draft_tokens": 3 * drafts, "num_accepted_tokens": sum(at)}
        counters |= {f"num_accepted_at_{d}": n for d, n in enumerate(at)}
        stats.on_message(Outputs(epoch, [], EngineSnapshot(counters=counters)), Tally())
    a = stats.acceptance
    assert (a.num_drafts, a.num_draft_tokens, a.num_accepted_tokens) == (8, 24, 8)
    assert a.accepted_at == (5, 2, 1)


def test_the_throughput_log_says_what_came_since_its_last_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.throughput")
    clock = VirtualClock()
    stats: Any = SimpleNamespace(
        clock=clock, client=SimpleNamespace(snapshot=EngineSnapshot(num_running=1)), num_generation_tokens=0,
        num_prompt_tokens=0, num_cached_tokens=0, counter=lambda name: 0.0,
        acceptance=Acceptance(4, 12, 6, accepted_at=(4, 2)),
    )  # fmt: skip
    throughput = Throughput(stats, every=1, speculates=True)
    for _ in range(2):
        clock.advance(1.0)
        throughput.tick()
    said = [r.getMessage() for r in caplog.records if "SpecDecoding" in r.getMessage()]
    assert said == [
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted: 6 tokens, Drafted: 12 tokens, "
        "Per-position acceptance rate: 1.000, 0.500, Avg Draft acceptance rate: 50.0%"
    ]


def test_bench_serve_reads_the_figures(
    drafting: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    post(drafting, COMPLETIONS)  # what was before does not count
    flags = ["--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "30", "--ignore-eos"]
    where = ["--result-dir", str(tmp_path), "--result-filename", "r.json"]
    before = scrape(drafting.url)
    assert main(["bench", "serve", "--base-url", drafting.url, *where, *flags]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    more = grown(before, scrape(drafting.url))
    assert found["spec_decode_draft_tokens"] > 0
    assert found["spec_decode_draft_tokens"] <= more["vllm:spec_decode_num_draft_tokens_total"]
    assert found["spec_decode_acceptance_length"] >= 1
    assert "Mean accepted length" in capsys.readouterr().out


def test_bench_serve_says_nothing_of_a_server_that_does_not_draft(plain: LiveServer, tmp_path: Path) -> None:
    flags = ["--num-prompts", "1", "--random-input-len", "9", "--random-output-len", "3"]
    where = ["--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert main(["bench", "serve", "--base-url", plain.url, *where, *flags]) == 0
    assert "spec_decode" not in (tmp_path / "r.json").read_text()


# -- prediction --------------------------------------------------------------------------------------------------

TEXT = "Once upon a time there was a cat."
PARTS = [{"type": "text", "text": "Once upon a time"}, {"type": "text", "text": " there was a cat."}]


class References:
    """What requests carry to the rank."""

    def __init__(self, live: LiveServer) -> None:
        assert live.server is not None
        self._live, self._client = live, live.server.client
        self.seen: list[list[int]] = []

    def __enter__(self) -> References:
        on_loop(self._live, lambda: self._client.on_finish.append(self._note))
        return self

    def __exit__(self, *_: Any) -> None:
        on_loop(self._live, lambda: self._client.on_finish.remove(self._note))

    def _note(self, stream: Any, output: Any) -> None:
        self.seen.append(stream.request.rules.reference)


@pytest.mark.parametrize("content", [TEXT, PARTS], ids=["text", "parts"])
def test_D32_a_prediction_goes_to_the_rank_and_changes_no_answer(drafting: LiveServer, content: Any) -> None:
    server = drafting.server
    assert server is not None
    want = post(drafting, CHAT)
    with References(drafting) as references:
        got = post(drafting, CHAT, prediction={"type": "content", "content": content})
        post(drafting, CHAT)
    assert got["choices"] == want["choices"]
    assert references.seen == [server.service.need_tokenizer().encode(TEXT, False), []]


def test_a_prediction_is_taken_where_nobody_looks_at_it(plain: LiveServer) -> None:
    want = post(plain, CHAT)
    with References(plain) as references:
        assert post(plain, CHAT, prediction={"type": "content", "content": TEXT})["choices"] == want["choices"]
        assert post(plain, CHAT, prediction={"type": "content", "content": ""})["choices"] == want["choices"]
        assert post(plain, CHAT, prediction=None)["choices"] == want["choices"]
    assert references.seen == [[], [], []]


@pytest.mark.parametrize(
    ("prediction", "param", "said"),
    [
        ("Once", "prediction", "object"),
        ({"content": TEXT}, "prediction.type", "missing"),
        ({"type": "content"}, "prediction.content", "missing"),
        ({"type": "text", "content": TEXT}, "prediction.type", "must be content"),
        ({"type": "content", "content": 5}, "prediction.content", "int"),
        ({"type": "content", "content": [5]}, "prediction.content[0]", "int"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text", "missing"),
        ({"type": "content", "content": [{"type": "image", "text": "x"}]}, "prediction.content[0].type", "be text"),
        ({"type": "content", "content": "cat " * 600}, "prediction.content", "the context holds 512"),
    ],
)
@pytest.mark.parametrize("speculates", [True, False])
def test_a_bad_prediction_is_a_400_that_names_it(
    drafting: LiveServer, plain: LiveServer, prediction: Any, param: str, said: str, speculates: bool
) -> None:
    live = drafting if speculates else plain
    answer = httpx.post(live.url + CHAT, json={"messages": HELLO, "prediction": prediction}, timeout=30)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert said in error["message"]


def test_completions_know_no_prediction(drafting: LiveServer) -> None:
    """As at OpenAI; it is named as ignored."""
    body = {"prompt": STORY, "max_tokens": 1, "prediction": {"type": "content", "content": TEXT}}
    answer = httpx.post(drafting.url + COMPLETIONS, json=body, timeout=30)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "prediction"


def test_openais_client_sends_and_reads_them(drafting: LiveServer) -> None:
    client = openai.OpenAI(base_url=drafting.url + "/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="nano",
        messages=HELLO,
        max_tokens=8,
        prediction={"type": "content", "content": TEXT},  # type: ignore[arg-type]
    )
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens is not None
    assert details.accepted_prediction_tokens <= answer.usage.completion_tokens


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_D27_a_promised_pace_reaches_the_engine_and_is_counted(drafting: LiveServer) -> None:
    before = scrape(drafting.url)
    assert post(drafting, COMPLETIONS, tpot_slo_ms=60_000)["choices"][0]["text"]
    assert post(drafting, CHAT, tpot_slo_ms=1e-6)["choices"][0]["message"]["content"]
    after = grown(before, scrape(drafting.url))
    assert after["penstock:request_tpot_slo_total{met=yes}"] == 1, after
    assert after["penstock:request_tpot_slo_total{met=no}"] == 1, after


@pytest.mark.parametrize("value", [0, -5, 60_001, float("inf")])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/v1/messages", "/v1/responses"])
def test_a_pace_that_cannot_be_meant_is_refused(drafting: LiveServer, path: str, value: float) -> None:
    chat = path in (CHAT, "/v1/messages")
    given: dict[str, Any] = {"messages": HELLO, "max_tokens": 4} if chat else {"prompt": STORY}
    given = {"input": STORY} if path == "/v1/responses" else given
    body = json.dumps(given | {"tpot_slo_ms": value}).replace("Infinity", "1e999")
    answer = httpx.post(drafting.url + path, content=body, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "tpot_slo_ms" in answer.text or value == float("inf"), answer.text
