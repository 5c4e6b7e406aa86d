"""One run against a server: requests leave when they are due, whatever became of those before them (open loop)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.base.errors import ConfigError, PenstockError
from penstock.bench.http import CallError, EventReader, HttpClient, Reply
from penstock.bench.metrics import Outcome
from penstock.bench.prompts import WORDS, Maker, Sample

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """How to ask. `extra`: further fields of every body."""

    backend: str
    endpoint: str
    model: str
    ignore_eos: bool = False
    temperature: float | None = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    def body(self, sample: Sample) -> bytes:
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            body["prompt"] = sample.prompt
        if sample.output_len is not None:
            body["max_completion_tokens" if self.is_chat else "max_tokens"] = sample.output_len
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | self.extra)


# -- before the run ----------------------------------------------------------------------------------------------


async def served_model(client: HttpClient) -> str:
    """The first model of /v1/models. Raises PenstockError."""
    reply = await _ask(client, "GET", "/v1/models")
    with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
        name = json.loads(reply.body)["data"][0]["id"]
        if reply.status == 200 and isinstance(name, str):
            return name
    raise PenstockError(f"the server does not say what it serves (status {reply.status}); name it with --model")


async def _ask(client: HttpClient, method: str, path: str, body: Any = None) -> Reply:
    try:
        return await client.call(method, path, b"" if body is None else msgspec.json.encode(body))
    except CallError as error:
        raise PenstockError(f"{path}: {error}") from None


async def make_maker(client: HttpClient, model: str, *, ids: bool) -> Maker:
    """Prompts of exact lengths if the server has /tokenize; otherwise of words, about a token each.

    `ids`: prompts may be token ids (completions).
    """
    text = " ".join(WORDS * 2)
    try:
        reply = await client.call(
            "POST", "/tokenize", msgspec.json.encode({"model": model, "prompt": text, "add_special_tokens": False})
        )
        tokens = json.loads(reply.body)["tokens"]
    except (CallError, ValueError, KeyError, TypeError):
        return Maker()
    if reply.status != 200 or not isinstance(tokens, list) or not all(type(t) is int for t in tokens) or not tokens:
        return Maker()
    return Maker(tokens if ids else None, len(tokens) / (2 * len(WORDS)))


async def wait_ready(client: HttpClient, target: Target, timeout_s: float) -> None:
    """Ask for one token until it comes. The prompt shares nothing with those of the run. Raises PenstockError."""
    body = target.body(Sample("ready?", 1, 1))
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = await one(client, target.endpoint, body)
        if outcome.ok or outcome.kind.startswith("http 4"):
            break
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(min(1.0, max(0.05, timeout_s / 20)))
    if not outcome.ok:
        raise PenstockError(f"the server is not ready: {outcome.error}")


# -- one request -------------------------------------------------------------------------------------------------


class _Stream:
    """Follows one answer as it comes."""

    def __init__(self, outcome: Outcome, began_s: float) -> None:
        self._outcome, self._began_s, self._last_s = outcome, began_s, began_s
        self._events = EventReader()
        self._num_pieces = 0
        self._told_tokens: int | None = None
        self._text: list[str] = []
        self.is_done = False

    def take(self, piece: bytes, now_s: float) -> None:
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self.is_done = True
                continue
            try:
                event = msgspec.json.decode(data)
            except msgspec.DecodeError as error:
                raise CallError("protocol", f"an event is not JSON: {error}") from None
            if not isinstance(event, dict):
                raise CallError("protocol", "an event is not a JSON object")
            if event.get("error"):
                raise CallError("error event", _message(event))
            self._usage(event.get("usage"))
            for choice in event.get("choices") or ():
                self._choice(choice, now_s)

    def _choice(self, choice: dict[str, Any], now_s: float) -> None:
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text") or ""
            is_news = bool(text)
        else:
            text = delta.get("content") or ""
            is_news = bool(text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"))
        if not is_news:
            return  # the role, or the end: no token
        self._text.append(text)
        self._num_pieces += 1
        if self._num_pieces == 1:
            self._outcome.ttft_s = now_s - self._began_s
        else:
            self._outcome.itls_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self._told_tokens = usage.get("completion_tokens")
        self._outcome.prompt_tokens = usage.get("prompt_tokens") or self._outcome.prompt_tokens
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            self._outcome.cached_tokens = details["cached_tokens"]
        times = usage.get("queue_time"), usage.get("prompt_time")
        if all(isinstance(t, int | float) for t in times):
            self._outcome.queue_s, self._outcome.prefill_s = times

    def finish(self) -> None:
        """Raises CallError if nothing came."""
        outcome = self._outcome
        outcome.text = "".join(self._text)
        outcome.output_tokens = self._num_pieces if self._told_tokens is None else self._told_tokens
        if not self.is_done and not self._num_pieces:
            raise CallError("empty", "the stream has no text and no end")
        if not self._num_pieces:  # tokens without text, such as an end at once
            self._last_s = time.perf_counter()
            outcome.ttft_s = self._last_s - self._began_s
        outcome.latency_s = self._last_s - self._began_s


async def one(client: HttpClient, path: str, body: bytes, expected_len: int = 0) -> Outcome:
    """Ask once, and follow the stream. Never raises for what the server does."""
    outcome = Outcome(prompt_tokens=expected_len)
    began_s = time.perf_counter()
    stream = _Stream(outcome, began_s)
    try:
        reply = await client.call("POST", path, body, stream.take)
        if reply.status != 200:
            with contextlib.suppress(ValueError):
                raise CallError(f"http {reply.status}", _message(json.loads(reply.body)))
            raise CallError(f"http {reply.status}", f"status {reply.status}")
        stream.finish()
        outcome.ok = True
    except CallError as error:
        outcome.kind, outcome.error = error.kind, str(error)
        outcome.latency_s = time.perf_counter() - began_s
    return outcome


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error.get("message", error) if isinstance(error, dict) else error
    return str(said)[:500]


# -- the run -----------------------------------------------------------------------------------------------------


async def run(
    client: HttpClient,
    target: Target,
    samples: Sequence[Sample],
    due_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """The outcomes in the order of the samples, and the seconds from the start to the last answer.

    Nothing but time decides when a request is ready to go; with `max_concurrency` it may then wait for a slot, which
    is told apart (`mean_slot_wait_ms`).
    """
    bodies = [target.body(sample) for sample in samples]  # made before: encoding must not delay what is due
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else contextlib.nullcontext()
    began_s = time.perf_counter()

    async def send(number: int, ready_s: float) -> Outcome:
        async with slots:
            sent_s = time.perf_counter() - began_s
            outcome = await one(client, target.endpoint, bodies[number], samples[number].prompt_len)
        outcome.due_s, outcome.ready_s, outcome.sent_s = due_s[number], ready_s, sent_s
        on_done(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    try:
        for number, at_s in enumerate(due_s):
            left_s = began_s + at_s - time.perf_counter()
            if left_s > 0:
                await asyncio.sleep(left_s)
            tasks.append(asyncio.create_task(send(number, time.perf_counter() - began_s)))
        outcomes = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return list(outcomes), time.perf_counter() - began_s


async def verify(
    client: HttpClient, target: Target, samples: Sequence[Sample], outcomes: Sequence[Outcome], num: int
) -> dict[str, Any]:
    """Ask the first `num` answered requests again, alone and one after the other: the texts must be the same."""
    if target.temperature != 0:
        raise ConfigError("verify needs greedy requests: --temperature 0", field="verify")
    chosen = [i for i, outcome in enumerate(outcomes) if outcome.ok][:num]
    different = []
    for i in chosen:
        again = await one(client, target.endpoint, target.body(samples[i]))
        if not again.ok or again.text != outcomes[i].text:
            different.append(i)
    return {"verified": len(chosen), "verify_mismatches": len(different), "verify_mismatched_requests": different}
