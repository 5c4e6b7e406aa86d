"""OpenTelemetry traces: one span for each request that the engine has had, under vLLM's names where it has one.

The span belongs to the trace that the request's `traceparent` names, or begins one. It holds no text unless
`trace_prompts` asks for it. Nothing of OpenTelemetry is imported while no endpoint is set.

Sources: W3C Trace Context; OpenTelemetry semantic conventions for generative AI.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from typing import TYPE_CHECKING, Any

from penstock import __version__
from penstock.base.errors import ConfigError
from penstock.core.sampling import SamplingParams
from penstock.server.context import Server
from penstock.server.observation.stats import GOOD, Stats, ending, timings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from penstock.config.server import ServerConfig
    from penstock.core.output import RequestOutput
    from penstock.engine.stream import Stream
    from penstock.server.call import Call

FLUSH_MS = 3000
"""What a server that ends waits for its last spans to be taken."""
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_OPERATIONS = {"completions": "text_completion", "completion": "text_completion", "embeddings": "embeddings",
               "classify": "embeddings", "score": "embeddings", "pooling": "embeddings",
               "ollama.generate": "text_completion"}  # fmt: skip


def check_traces(config: ServerConfig) -> None:
    """Raises ConfigError if traces are asked for and cannot be sent."""
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint must be an HTTP address such as http://127.0.0.1:4318/v1/traces, not {endpoint!r}",
            field="otlp_traces_endpoint",
        )
    try:
        found = all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:
        found = False
    if not found:
        raise ConfigError("otlp_traces_endpoint needs OpenTelemetry; pip install 'penstock[otel]'",
                          field="otlp_traces_endpoint")  # fmt: skip


class Traces:
    """Belongs to the event loop's thread; spans are sent by a thread of their own."""

    def __init__(self, provider: TracerProvider, server: Server) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("penstock", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server = server
        self._stats: Stats = server.parts["stats"]
        self._writing: set[asyncio.Task[None]] = set()

    def on_finish(self, stream: Stream, output: RequestOutput) -> None:
        ended_ns = time.time_ns()
        if not self._server.config.trace_prompts:
            self._span(stream, output, ended_ns, {})
            return
        task = asyncio.get_running_loop().create_task(self._with_texts(stream, output, ended_ns))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _with_texts(self, stream: Stream, output: RequestOutput, ended_ns: int) -> None:
        tokenizer, prompt = self._server.service.tokenizer, output.prompt
        if prompt is None and tokenizer is not None:
            prompt = await asyncio.to_thread(tokenizer.decode, output.prompt_token_ids, False)
        texts = {"gen_ai.prompt": prompt or "", "gen_ai.completion": [sample.text for sample in output.outputs]}
        self._span(stream, output, ended_ns, texts)

    def _span(self, stream: Stream, output: RequestOutput, ended_ns: int, texts: dict[str, Any]) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        t, call = timings(output), stream.call
        carrier = {} if call is None else {k: call.facts[k] for k in ("traceparent", "tracestate") if k in call.facts}
        span = self._tracer.start_span(
            "llm_request", self._propagator.extract(carrier), SpanKind.SERVER,
            {**self._attributes(stream, output), **texts}, start_time=ended_ns - round(1e9 * (t["e2e_s"] or 0.0)),
        )  # fmt: skip
        ended = ending(output)
        if ended not in GOOD:
            span.set_status(StatusCode.ERROR, ended)
        span.end(ended_ns)
        context = span.get_span_context()
        if context.trace_flags.sampled:
            for name, distribution in (("ttft_s", self._stats.ttft), ("e2e_s", self._stats.e2e)):
                if (value := t[name]) is not None:
                    distribution.exemplify(value, f"{context.trace_id:032x}", ended_ns / 1e9)

    def _attributes(self, stream: Stream, output: RequestOutput) -> dict[str, Any]:
        call: Call | None = stream.call
        t, model = timings(output), self._server.model_name
        made = sum(len(sample.token_ids) for sample in output.outputs)
        endpoint = call.endpoint if call is not None else ""
        found: dict[str, Any] = {
            "gen_ai.operation.name": _OPERATIONS.get(endpoint, "chat"),
            "gen_ai.request.id": stream.request_id,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": stream.request.max_tokens,
            "gen_ai.request.n": stream.request.n,
            "gen_ai.usage.num_sequences": len(output.outputs),
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": made,
            "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.output_tokens": made,
            "gen_ai.usage.cached_tokens": output.num_cached_tokens,
            "gen_ai.response.finish_reasons": [sample.finish_reason or "abort" for sample in output.outputs],
            "gen_ai.latency.time_in_queue": t["queue_s"],
            "gen_ai.latency.time_to_first_token": t["ttft_s"],
            "gen_ai.latency.e2e": t["e2e_s"],
            "gen_ai.latency.time_in_model_prefill": t["prefill_s"],
            "gen_ai.latency.time_in_model_decode": t["decode_s"],
            "gen_ai.latency.time_in_model_inference": t["inference_s"],
            "http.request.id": str(call.facts.get("http_request_id", "")) if call is not None else "",
            "penstock.endpoint": endpoint,
            "penstock.tenant": call.tenant.name if call is not None else "",
            "penstock.replays": stream.num_replays,
            "penstock.preemptions": output.metrics.num_preemptions,
        }
        if call is not None and isinstance(call.params, SamplingParams):
            found |= {"gen_ai.request.temperature": call.params.temperature, "gen_ai.request.top_p": call.params.top_p}
        return {name: value for name, value in found.items() if value is not None}

    async def close(self) -> None:
        """Send what is left, for as long as `FLUSH_MS`."""
        await asyncio.gather(*self._writing, return_exceptions=True)
        await asyncio.to_thread(self._provider.force_flush, FLUSH_MS)
        await asyncio.to_thread(self._provider.shutdown)


def _provider(endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OpenTelemetry's own variables (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) come last and win.
    named = Resource({"service.name": "penstock", "service.version": __version__})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=FLUSH_MS / 1000)))
    return provider


async def install(server: Server) -> None:
    """Send a span per finished request, if there is somewhere to send it."""
    endpoint = server.config.otlp_traces_endpoint
    if endpoint is None:
        return
    traces = Traces(await asyncio.to_thread(_provider, endpoint), server)
    server.client.on_finish.append(traces.on_finish)
    server.closers.append(traces.close)
