"""An Ollama answer under way: lines of JSON, or one object."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.server.errors import told
from penstock.server.schema.ollama import OllamaAnswer, OllamaFunction, OllamaMessage, OllamaToolCall
from penstock.server.transport.sse import encoder
from penstock.server.turns.asking import Caller
from penstock.server.turns.logprobs import LogprobWriter, TokenTexts
from penstock.server.turns.times import rfc3339, spans_s
from penstock.server.turns.turn import Answer, CallAnswer, Piece, Turn


def now() -> str:
    return rfc3339(time.time(), 6)


class OllamaRun:
    """Leaving `frames` early, or cancelling `answer`, aborts it. `model`: as the request calls it."""

    def __init__(self, caller: Caller, turn: Turn, model: str, *, chat: bool, top_logprobs: int | None) -> None:
        self._server = caller.server
        self._turn = turn
        self._model = model
        self._chat = chat
        self._writer = None
        if top_logprobs is not None:
            self._writer = LogprobWriter(TokenTexts.of(caller.server, as_ids=False), top_logprobs)

    @property
    def too_slow(self) -> bool:
        return self._turn.stream.unread_chars > self._server.config.max_stream_chars

    def abort(self) -> None:
        self._turn.abort()

    async def answer(self) -> OllamaAnswer:
        """Raises WireError."""
        whole, written = Answer(0), []
        async with aclosing(self._turn.pieces()) as news:
            async for pieces in news:
                for piece in pieces:
                    whole.add(piece)
                    written.append(self._logprobs(piece))
        return self._line(
            whole.content, whole.reasoning, whole.calls, b",".join(filter(None, written)), done=whole.finish_reason
        )

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Lines of JSON; an error after the beginning is one of them. Calls come whole, at the end."""
        whole = Answer(0)
        try:
            async with aclosing(self._turn.pieces()) as news:
                async for pieces in news:
                    out = [self._news(whole, piece) for piece in pieces]
                    if any(out):
                        yield b"".join(out)
            if whole.calls:
                yield _encoded(self._line("", "", whole.calls))
            yield _encoded(self._line("", "", (), done=whole.finish_reason))
        except Exception as error:
            yield encoder.encode(told(error).body("/api/")) + b"\n"

    def _news(self, whole: Answer, piece: Piece) -> bytes:
        """What one piece adds to `whole`, as a line; nothing if that is nothing to show yet."""
        new = Answer(0)
        whole.add(piece)
        new.add(Piece(0, [event for event in piece.events if not hasattr(event, "index")], piece.delta))
        written = self._logprobs(piece)
        if not (new.content or new.reasoning or written):
            return b""
        return _encoded(self._line(new.content, new.reasoning, (), written))

    def _logprobs(self, piece: Piece) -> bytes:
        if self._writer is None or not piece.delta.token_ids:
            return b""
        return self._writer.chat(piece.delta.token_ids, piece.delta.logprobs or [])

    def _line(
        self, content: str, thinking: str, calls: Sequence[CallAnswer], logprobs: bytes = b"", *,
        done: str | None = None,
    ) -> OllamaAnswer:  # fmt: skip
        line = OllamaAnswer(model=self._model, created_at=now(), done=done is not None)
        shown = [call for call in map(_call, range(len(calls)), calls) if call is not None]
        if self._chat:
            line.message = OllamaMessage(content=content, thinking=thinking or UNSET, tool_calls=shown or UNSET)
        else:
            line.response, line.thinking = content, thinking or UNSET
        if logprobs:
            line.logprobs = msgspec.Raw(b"[" + logprobs + b"]")  # type: ignore[assignment]
        if done is not None:
            usage, spans = self._turn.usage(), spans_s(self._turn, self._server.service.clock.now())
            line.done_reason = "length" if done in ("length", "repetition") else "stop"
            line.total_duration, line.prompt_eval_duration, line.eval_duration = (round(1e9 * s) for s in spans)
            line.load_duration = 0
            line.prompt_eval_count, line.eval_count = usage.prompt_tokens, usage.completion_tokens
            line.weight_version, line.weight_versions = usage.weight_version, usage.weight_versions
        return line


def _encoded(line: OllamaAnswer) -> bytes:
    return encoder.encode(line) + b"\n"


def _call(index: int, call: CallAnswer) -> OllamaToolCall | None:
    """None for one that was cut off: its arguments are no object, and `done_reason` says that the length ended it."""
    try:
        arguments: Any = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    if not isinstance(arguments, dict):
        return None
    return OllamaToolCall(id=call.id, function=OllamaFunction(index=index, name=call.name, arguments=arguments))
