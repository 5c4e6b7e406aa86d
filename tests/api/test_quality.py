"""Quality of experience as operators see it: fields of requests, defaults of the server, /metrics, `penstock bench`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.base.clock import VirtualClock
from penstock.bench.metrics import Outcome
from penstock.core.output import EngineOutput
from penstock.core.qoe import Expected, quality
from penstock.core.request import Request
from penstock.core.sampling import SamplingParams, TokenRules
from penstock.engine.client import OutputProcessor
from penstock.server.live import LiveServer
from tests.api.test_bench_serve import bench
from tests.api.watch import CHAT, COMPLETIONS, Endings, grown, scrape, small

HELLO = [{"role": "user", "content": "Hello"}]
PATHS = (COMPLETIONS, CHAT, "/v1/messages", "/v1/responses")


@pytest.fixture(scope="module")
def andes() -> Iterator[LiveServer]:
    with small(scheduling_policy="andes", qoe_ttft_s=60.0, qoe_tds=1.0) as server:
        yield server


def body_of(path: str, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"model": "x", "temperature": 0} | more
    if path == "/v1/responses":
        return given | {"input": "Hello", "max_output_tokens": 6}
    return given | {"max_tokens": 6} | ({"prompt": "Hello"} if path == COMPLETIONS else {"messages": HELLO})


def ask(live: LiveServer, path: str, **more: Any) -> httpx.Response:
    body = body_of(path, **more)
    del body["model"]
    return httpx.post(live.url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", PATHS)
def test_K07_streams_are_counted_by_their_quality_and_what_they_expect_reaches_the_engine(
    andes: LiveServer, path: str
) -> None:
    endings = Endings(andes)
    before = scrape(andes.url)
    assert ask(andes, path).status_code == 200  # all in one piece: nobody reads along
    assert endings.wait().metrics.quality is None
    assert ask(andes, path, stream=True).status_code == 200
    usual = endings.wait().metrics.quality
    assert ask(andes, path, stream=True, expected_ttft_s=0, expected_tds=1e6).status_code == 200
    strict = endings.wait().metrics.quality
    assert usual is not None
    assert strict is not None
    assert usual == 1.0, "within the server's own expectations"
    assert strict < 0.6, "nothing is as fast as that"
    after = grown(before, scrape(andes.url))
    assert after["penstock:qoe_count"] == 2
    assert after["penstock:qoe_sum"] == pytest.approx(usual + strict)
    assert after["penstock:qoe_bucket{le=0.6}"] == 1
    assert "vllm:qoe_count" not in after


@pytest.mark.parametrize(
    ("field", "value"), [("expected_ttft_s", -1), ("expected_ttft_s", 1e9), ("expected_tds", 0), ("expected_tds", -3)]
)
@pytest.mark.parametrize("path", PATHS)
def test_what_no_reader_expects_is_refused(andes: LiveServer, path: str, field: str, value: float) -> None:
    answer = ask(andes, path, stream=True, **{field: value})
    assert answer.status_code == 400, answer.text
    assert field in answer.text


def test_K07_the_bench_tells_the_quality_and_the_server_what_is_expected(andes: LiveServer, tmp_path: Path) -> None:
    before = scrape(andes.url)
    patient = bench(andes, tmp_path, "--num-prompts", "3", "--expected-ttft", "60", "--expected-tds", "1")
    assert (patient["mean_qoe"], patient["p10_qoe"]) == (1.0, 1.0)
    strict = bench(
        andes, tmp_path, "--num-prompts", "3", "--save-detailed", "--expected-ttft", "0", "--expected-tds", "1e6"
    )
    outcomes = [
        Outcome(ttft_s=ttft, itls_s=itls, output_tokens=num)
        for ttft, itls, num in zip(strict["ttfts"], strict["itls"], strict["output_lens"], strict=True)
    ]
    of_each = [outcome.quality(Expected(0.0, 1e6)) for outcome in outcomes]
    assert strict["mean_qoe"] == pytest.approx(sum(of_each) / 3)
    assert strict["p10_qoe"] <= strict["mean_qoe"] < 0.6
    after = grown(before, scrape(andes.url))
    assert after["penstock:qoe_bucket{le=0.6}"] >= 3, "the server was told, too"


def test_K07_the_client_of_an_engine_follows_every_sample() -> None:
    clock = VirtualClock()
    processor = OutputProcessor(None, clock)
    request = Request(
        request_id="r", prompt_token_ids=[1], rules=TokenRules(), n=2, max_tokens=3, expected_ttft_s=1.0,
        expected_tds=1.0,
    )  # fmt: skip
    processor.add(request, SamplingParams(n=2, max_tokens=3), None)
    for at_s, index in ((1.0, 0), (2.0, 0), (3.0, 0), (5.0, 1), (6.0, 1), (7.0, 1)):
        clock.advance_to(at_s)
        last = at_s in (3.0, 7.0)
        processor.process([
            EngineOutput(request_id="r", index=index, token_ids=[5], finish_reason="length" if last else None)
        ])  # fmt: skip
    assert processor.output("r").metrics.quality == pytest.approx(quality([5.0, 6.0, 7.0], Expected(1.0, 1.0)))
