"""OpenTelemetry traces, received on a real socket; OpenMetrics with exemplars; comments that keep streams alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from penstock.base.errors import ConfigError
from penstock.config.server import ServerConfig
from penstock.server.live import LiveServer
from penstock.server.observation.traces import check_traces
from penstock.server.transport.sse import KEEP_ALIVE, kept_alive
from tests.api.watch import CHAT, COMPLETIONS, small

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "The pass key is 48213."


class Receiver:
    """An OTLP collector: what it was sent, as spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self._news = threading.Semaphore(0)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                asked = ExportTraceServiceRequest.FromString(body)
                for resource in asked.resource_spans:
                    receiver.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            receiver.spans.append(span)
                            receiver._news.release()
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self) -> Any:
        assert self._news.acquire(timeout=30), "no span came"
        return self.spans[-1]


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for a in span.attributes:
        kind = a.value.WhichOneof("value")
        value = getattr(a.value, kind)
        found[a.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="penstock[otel] is not installed")
    with Receiver() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds; OpenTelemetry's own: 5 seconds
        yield receiver


@pytest.fixture(scope="module")
def traced(receiver: Receiver) -> Iterator[LiveServer]:
    with small(otlp_traces_endpoint=receiver.url) as live:
        yield live


def test_a_request_is_a_span_of_its_trace(traced: LiveServer, receiver: Receiver) -> None:
    body = {"prompt": SECRET, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "ignore_eos": True}
    answer = httpx.post(traced.url + COMPLETIONS, json=body, headers={"traceparent": PARENT, "x-request-id": "mine"})
    span = receiver.wait()
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", *PARENT.split("-")[1:3])
    found, usage = attributes(span), answer.json()["usage"]
    assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 10
    assert found["gen_ai.request.temperature"] == 0.5
    assert (found["gen_ai.request.n"], found["gen_ai.request.max_tokens"]) == (2, 5)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert (found["gen_ai.request.id"], found["http.request.id"]) == (answer.json()["id"], "mine")
    took_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert took_s == pytest.approx(found["gen_ai.latency.e2e"], abs=1e-3)
    assert 0 < found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert receiver.resources[-1]["service.name"] == "penstock"


def test_no_text_is_told(traced: LiveServer, receiver: Receiver) -> None:
    messages = [{"role": "user", "content": SECRET}]
    httpx.post(traced.url + CHAT, json={"messages": messages, "max_tokens": 4, "user": SECRET})
    span = receiver.wait()
    assert "48213" not in str(span)
    assert span.trace_id.hex() != PARENT.split("-")[1]
    assert not span.parent_span_id


@pytest.mark.parametrize("header", ["", "00-zz-1-01", "x" * 3000, PARENT.replace("-01", "-00")])
def test_odd_parents_harm_nothing(traced: LiveServer, receiver: Receiver, header: str) -> None:
    ask = {"prompt": "Once", "max_tokens": 1}
    assert httpx.post(traced.url + COMPLETIONS, json=ask, headers={"traceparent": header}).status_code == 200
    if not header.endswith("-00"):  # not sampled: nothing is sent
        receiver.wait()


def test_texts_are_told_where_that_is_asked_for(receiver: Receiver) -> None:
    with small(otlp_traces_endpoint=receiver.url, trace_prompts=True) as live:
        ask = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
        said = httpx.post(live.url + CHAT, json=ask).json()["choices"][0]["message"]["content"]
        found = attributes(receiver.wait())
        assert SECRET in found["gen_ai.prompt"]
        assert found["gen_ai.completion"] == [said]


def test_a_server_that_ends_sends_its_last_span(receiver: Receiver) -> None:
    with small(otlp_traces_endpoint=receiver.url) as live:
        httpx.post(live.url + COMPLETIONS, json={"prompt": "Once", "max_tokens": 1})
        before = len(receiver.spans)
    assert len(receiver.spans) > before or receiver.wait()


def test_a_collector_that_is_not_there_harms_nothing(receiver: Receiver) -> None:
    with small(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as live:
        assert httpx.post(live.url + COMPLETIONS, json={"prompt": "Once", "max_tokens": 1}).status_code == 200


def test_histograms_name_traces(traced: LiveServer, receiver: Receiver) -> None:
    httpx.post(traced.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 1}, headers={"traceparent": PARENT})
    receiver.wait()
    text = httpx.get(traced.url + "/metrics", headers={"accept": "application/openmetrics-text"}).text
    found = [
        sample.exemplar for family in text_string_to_metric_families(text) for sample in family.samples
        if sample.exemplar is not None and family.name == "vllm:time_to_first_token_seconds"
    ]  # fmt: skip
    assert PARENT.split("-")[1] in {exemplar.labels["trace_id"] for exemplar in found}


def test_addresses_that_are_none_are_refused_at_the_start() -> None:
    check_traces(ServerConfig())
    with pytest.raises(ConfigError, match="HTTP address"):
        check_traces(ServerConfig(otlp_traces_endpoint="localhost:4317"))


def test_without_the_extra_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"penstock\[otel\]"):
        check_traces(ServerConfig(otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces"))


def test_nothing_is_imported_while_it_is_off() -> None:
    code = "import sys, penstock.server.build; print(any(m.startswith('opentelemetry') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


# -- OpenMetrics -------------------------------------------------------------------------------------------------------

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.3,*/*;q=0.2"
)


def test_metrics_are_open_metrics_where_that_is_asked_for(live: LiveServer) -> None:
    httpx.post(live.url + COMPLETIONS, json={"prompt": "Once", "max_tokens": 2})
    for accept in ("application/openmetrics-text", PROMETHEUS):
        answer = httpx.get(live.url + "/metrics", headers={"accept": accept})
        assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert answer.text.endswith("# EOF\n")
        assert answer.text.count("# EOF") == 1
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        for name in ("vllm:generation_tokens", "penstock:tenant", "vllm:iteration_tokens_total"):
            assert families[name].samples, name
        assert {sample.name for sample in families["vllm:generation_tokens"].samples} == {
            "vllm:generation_tokens_total"
        }
    plain = httpx.get(live.url + "/metrics", headers={"accept": "*/*"})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# EOF" not in plain.text


# -- comments ----------------------------------------------------------------------------------------------------------


def test_a_comment_comes_whenever_nothing_else_does() -> None:
    closed = []

    async def slow() -> AsyncGenerator[bytes, None]:
        try:
            for n in range(3):
                await asyncio.sleep(0.05 if n == 1 else 0)
                yield b"%d" % n
        finally:
            closed.append(True)

    async def read() -> list[bytes]:
        return [piece async for piece in kept_alive(slow(), 0.02)]

    got = asyncio.run(read())
    assert [piece for piece in got if piece != KEEP_ALIVE] == [b"0", b"1", b"2"]
    assert KEEP_ALIVE in got[got.index(b"0") : got.index(b"1")]
    assert closed == [True]


def test_leaving_early_closes_what_is_waited_for() -> None:
    closed = []

    async def never() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(3600)
            yield b""
        finally:
            closed.append(True)

    async def read() -> None:
        pieces = kept_alive(never(), 0.01)
        assert await anext(pieces) == KEEP_ALIVE
        await pieces.aclose()

    asyncio.run(read())
    assert closed == [True]


def test_streams_that_wait_get_comments_and_clients_do_not_mind() -> None:
    """One place, taken by somebody else for a while: the one who waits is told that the connection lives."""
    import openai

    with small(max_num_seqs=1, sse_keep_alive_interval=0.02) as live:
        hold = {"prompt": "Once", "max_tokens": 450, "ignore_eos": True, "stream": True, "n": 1}
        ask = {"prompt": "Once", "max_tokens": 3, "stream": True}
        with httpx.stream("POST", live.url + COMPLETIONS, json=hold) as held:
            next(held.iter_raw())
            waited = httpx.post(live.url + COMPLETIONS, json=ask).text
            lines = httpx.post(live.url + "/api/generate", json={"prompt": "x", "raw": True,
                                                                  "options": {"num_predict": 2}}).text  # fmt: skip
        assert waited.endswith("data: [DONE]\n\n")
        assert ":" not in {line[:1] for line in lines.splitlines()}
        with openai.OpenAI(base_url=live.url + "/v1", api_key="x") as client:
            assert list(client.completions.create(model="nano", prompt="x", stream=True, max_tokens=2))
