"""A chat completion: a turn in OpenAI's shapes."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.base.errors import InputError
from penstock.core.kv_hints import read_hints
from penstock.server.context import Server
from penstock.server.errors import told
from penstock.server.openai.completion import CHARS_PER_ID
from penstock.server.parsing.custom import NO_CUSTOM, Tools, as_functions, read_tools
from penstock.server.parsing.events import CallArguments, CallStart, Content, Reasoning
from penstock.server.schema.openai import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    CustomCall,
    FunctionCall,
    ToolCall,
)
from penstock.server.transport.pieces import GAP, NUL, Pieces
from penstock.server.transport.sse import DONE, ChunkWriter, encoder, frame
from penstock.server.turns.asking import (
    Caller,
    Conversation,
    Options,
    check_model,
    check_stream_options,
    means_another,
)
from penstock.server.turns.defaults import sampling_defaults
from penstock.server.turns.hints import bounds_of
from penstock.server.turns.logprobs import LogprobWriter, TokenTexts, prompt_logprobs
from penstock.server.turns.modules import check_modules
from penstock.server.turns.turn import Answer, CallAnswer, Piece, Turn, begin
from penstock.text.custom import input_of


async def start(caller: Caller, body: ChatRequest) -> Chat:
    """Raises InputError, RefusedError, EngineError. The caller must read what it gets, or abort it."""
    server = caller.server
    model = check_model(server, body.model)
    check_stream_options(body.stream, body.stream_options)
    tools = read_tools(body.tools, nested=True)
    turn = await begin(caller, _conversation(server, body, tools), "chat.completions")
    return Chat(server, body, model, turn, tools.custom)


def _conversation(server: Server, body: ChatRequest, tools: Tools) -> Conversation:
    """Raises InputError."""
    form = body.form()
    names = {"logprobs": "top_logprobs", **tools.names, **(form.names if form is not None else {})}
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs: true", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise InputError("prompt_logprobs do not come in a stream; leave stream out", param="prompt_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    kwargs: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in ("reasoning_effort", "documents"):
        if getattr(body, name) is not None:
            kwargs.setdefault(name, getattr(body, name))
    return Conversation(
        messages=body.messages,
        params=body.sampling(sampling_defaults(server, body), max_tokens=max_tokens, logprobs=logprobs),
        options=Options(
            model=body.model,
            stream=bool(body.stream),
            priority=body.priority,
            tier=body.service_tier,
            cache_salt=body.cache_salt,
            timeout_s=body.timeout,
            tpot_slo_ms=body.tpot_slo_ms,
            ttft_slo_ms=body.ttft_slo_ms,
            reader=(body.expected_ttft_s, body.expected_tds),
            cut_max_tokens=means_another(server, body.model, body.truncate_prompt_tokens),
        ),
        tools=tools.listed,
        tool_choice=as_functions(body.tool_choice, tools),
        grammars=tools.grammars,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        chat_template=body.chat_template,
        chat_template_kwargs=kwargs or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        names=names,
        prediction="" if body.prediction is None else body.prediction.text(),
        compression=body.prompt_compression,
        truncate=body.truncate_prompt_tokens,
        bounds=bounds_of(read_hints(body.kv_hints), body.messages),
        modules=check_modules(
            server,
            body.prompt_cache,
            {name: getattr(body, name) for name in ("prompt_compression", "truncate_prompt_tokens")},
            chat=True,
        ),
    )


class Chat:
    """A chat completion under way. Leaving `frames` early, or cancelling `answer`, aborts it.

    `custom`: as in `Tools`. In a stream the input of such a call comes in one piece.
    """

    def __init__(
        self, server: Server, body: ChatRequest, model: str, turn: Turn, custom: Mapping[str, bool] = NO_CUSTOM
    ) -> None:
        self._server = server
        self._body = body
        self._model = model
        self._turn = turn
        self._custom = custom
        self._inputs: dict[int, tuple[int, str, list[str]]] = {}
        """Of a stream: sample -> the custom call that it writes, its tool and its arguments so far."""
        self._created = int(time.time())
        self._reasons = body.include_reasoning is not False
        self._writer = LogprobWriter(TokenTexts.of(server, body.return_tokens_as_token_ids), body.top_logprobs or 0)
        if body.return_token_ids:
            turn.stream.chars_per_token = CHARS_PER_ID

    @property
    def too_slow(self) -> bool:
        return self._turn.stream.unread_chars > self._server.config.max_stream_chars

    def abort(self) -> None:
        self._turn.abort()

    # -- one answer ----------------------------------------------------------------------------------------------

    async def answer(self) -> Pieces:
        """ChatCompletion, as JSON. Raises WireError."""
        written: dict[int, bytearray] = {}

        def look(piece: Piece) -> None:
            if self._body.logprobs and piece.delta.token_ids:
                own = written.setdefault(piece.index, bytearray())
                if own:
                    own += b","
                own += self._writer.chat(piece.delta.token_ids, piece.delta.logprobs or [])

        answers = await self._turn.answers(look)
        parts: list[bytes | bytearray] = []
        choices = [self._choice(answer, written.get(answer.index), parts) for answer in answers]
        if self._body.prompt_logprobs is not None:
            parts.append(await self._prompt_logprobs())
        usage = self._turn.usage()
        whole = ChatCompletion(
            id=self._turn.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage,
            system_fingerprint=usage.weight_version or None,
            prompt_logprobs=GAP if self._body.prompt_logprobs is not None else UNSET,
            prompt_token_ids=self._turn.prompt.ids if self._body.return_token_ids else UNSET,
        )
        return Pieces(whole, parts)

    async def _prompt_logprobs(self) -> bytearray:
        work = self._server.slices.work(self._turn.call.tenant)
        out = bytearray()
        for entry in prompt_logprobs(TokenTexts.of(self._server, as_ids=False), self._turn.stream.prompt_logprobs):
            await work.pause()
            out += (b"," if out else b"[") + entry
        return out + b"]"

    def _choice(self, answer: Answer, logprobs: bytearray | None, parts: list[bytes | bytearray]) -> ChatChoice:
        """`parts` gets what its gap stands for."""
        reasoning = answer.reasoning if answer.reasoning and self._reasons else UNSET
        calls = [self._call(call) for call in answer.calls]
        message = ChatMessage(
            content=answer.content or (None if calls or answer.reasoning else ""),
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=calls or UNSET,
        )
        shown: Any = None
        if self._body.logprobs:
            shown = _content(NUL)
            parts.append(logprobs or b"")
        return ChatChoice(
            index=answer.index, message=message, logprobs=shown, finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason, token_ids=answer.token_ids if self._body.return_token_ids else UNSET,
        )  # fmt: skip

    def _call(self, call: CallAnswer) -> ToolCall:
        if (bound := self._custom.get(call.name)) is None:
            return ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        return ToolCall(
            id=call.id, type="custom", custom=CustomCall(name=call.name, input=input_of(call.arguments, bound))
        )

    # -- a stream ------------------------------------------------------------------------------------------------

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error after the beginning is one of them."""
        options = self._body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        running = options is not None and bool(options.continuous_usage_stats) and with_usage
        head: dict[str, Any] = {
            "id": self._turn.id, "object": "chat.completion.chunk", "created": self._created, "model": self._model,
            "system_fingerprint": self._server.weight_version,
        }  # fmt: skip
        chunks = ChunkWriter(head, with_usage=with_usage)
        opened: set[int] = set()
        try:
            async with aclosing(self._turn.pieces()) as news:
                async for pieces in news:
                    usage = self._turn.usage() if running else None
                    out = []
                    for piece in pieces:
                        if piece.index not in opened:
                            opened.add(piece.index)
                            out.append(chunks.chunk(self._opening(piece.index, len(opened) == 1), usage))
                        out += [chunks.chunk(part, usage) for part in self._parts(piece)]
                    if out:
                        yield b"".join(out)
            if with_usage:
                yield chunks.chunk(b"", self._turn.usage())
        except Exception as error:
            yield frame(told(error).body())
        yield DONE

    def _opening(self, index: int, first: bool) -> bytes:
        choice: dict[str, Any] = {
            "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None,
        }  # fmt: skip
        if first and self._body.return_token_ids:
            choice["prompt_token_ids"] = self._turn.prompt.ids
        return encoder.encode(choice)

    def _parts(self, piece: Piece) -> list[bytes]:
        """The chunks of one piece: usually one. The last has the log-probabilities and the end."""
        deltas = self._deltas(piece)
        extra: dict[str, Any] = {}
        logprobs = None
        if self._body.logprobs and piece.delta.token_ids:
            logprobs = _content(self._writer.chat(piece.delta.token_ids, piece.delta.logprobs or []))
        if self._body.return_token_ids and piece.delta.token_ids:
            extra["token_ids"] = piece.delta.token_ids
        if logprobs is None and not extra and piece.finish_reason is None:
            return [_plain(piece.index, delta) for delta in deltas]
        last = {
            "index": piece.index, "delta": deltas[-1] if deltas else {}, "logprobs": logprobs,
            "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason, **extra,
        }  # fmt: skip
        return [*[_plain(piece.index, delta) for delta in deltas[:-1]], encoder.encode(last)]

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for event in piece.events:
            if not isinstance(event, CallArguments):
                out += self._input(piece.index)
            match event:
                case Content(text):
                    out.append({"content": text})
                case Reasoning(text):
                    if self._reasons:
                        out.append({"reasoning": text, "reasoning_content": text})
                case CallStart(index, call_id, name) if name in self._custom:
                    custom = {"name": name, "input": ""}
                    out.append({"tool_calls": [{"index": index, "id": call_id, "type": "custom", "custom": custom}]})
                    self._inputs[piece.index] = (index, name, [])
                case CallStart(index, call_id, name):
                    function = {"name": name, "arguments": ""}
                    call = {"index": index, "id": call_id, "type": "function", "function": function}
                    out.append({"tool_calls": [call]})
                case CallArguments(_, text) if piece.index in self._inputs:
                    self._inputs[piece.index][2].append(text)
                case CallArguments(index, text):
                    out.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        return out if piece.finish_reason is None else [*out, *self._input(piece.index)]

    def _input(self, sample: int) -> list[dict[str, Any]]:
        """Of the custom call that has ended, if one was open."""
        if (ended := self._inputs.pop(sample, None)) is None:
            return []
        index, name, texts = ended
        custom = {"input": input_of("".join(texts), self._custom[name])}
        return [{"tool_calls": [{"index": index, "type": "custom", "custom": custom}]}]


def _plain(index: int, delta: dict[str, Any]) -> bytes:
    return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, encoder.encode(delta))


def _content(tokens: bytes) -> msgspec.Raw:
    """ChatLogprobs of tokens that are written already."""
    return msgspec.Raw(b'{"content":[%b],"refusal":null}' % tokens)
