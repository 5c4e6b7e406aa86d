"""/generate, /generate_stream, / and /info: Text Generation Inference's own paths, for Hugging Face's clients."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock import __version__
from penstock.core.batch import TokenLogprobs
from penstock.core.sampling import SamplingParams
from penstock.server.context import Server
from penstock.server.errors import told
from penstock.server.schema.decode import read, renamed
from penstock.server.schema.tgi import (
    DEFAULT_MAX_NEW_TOKENS,
    TGIAnswer,
    TGIDetails,
    TGIEvent,
    TGIInfo,
    TGIParameters,
    TGIRequest,
    TGIToken,
)
from penstock.server.transport.sse import EventStream, as_json, frame, unless_gone
from penstock.server.turns.asking import Caller, Options, asker_of, caller_of, check_model
from penstock.server.turns.logprobs import LOWEST, TokenTexts
from penstock.server.turns.truncation import check_truncation, to_cut, truncated
from penstock.server.turns.turn import Piece, Turn, begin_text

REFUSED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "text": ((), "is SGLang's; write inputs, or use /v1/completions"),
    "input_ids": ((), "is SGLang's; write inputs, or use /v1/completions, which takes token ids"),
    "sampling_params": ((), "is SGLang's; write parameters"),
    "prompt": ((), "belongs to /v1/completions; here it is inputs"),
    "max_tokens": ((), "is OpenAI's name; write parameters.max_new_tokens"),
    "messages": ((), "belongs to /v1/chat/completions; here it is inputs"),
}
_NAMES = {
    "max_tokens": "parameters.max_new_tokens", "logprobs": "parameters.top_n_tokens",
    "max_logprobs": "parameters.top_n_tokens", "prompt_logprobs": "parameters.decoder_input_details",
    "truncate_prompt_tokens": "parameters.truncate", "model": "parameters.adapter_id",
    **{name: f"parameters.{name}" for name in ("temperature", "top_k", "top_p", "seed", "stop", "frequency_penalty",
                                               "repetition_penalty")},
}  # fmt: skip


async def generate(request: Request) -> Response:
    return await _answer(request, streams=False, listed=False)


async def generate_stream(request: Request) -> Response:
    return await _answer(request, streams=True, listed=False)


async def compat_generate(request: Request) -> Response:
    """What clients send to the address of a server itself; a whole answer comes in a list."""
    return await _answer(request, streams=False, listed=True)


async def _answer(request: Request, *, streams: bool, listed: bool) -> Response:
    caller = caller_of(request)
    body = await read(request, TGIRequest, refused=REFUSED_FIELDS)
    streams = streams or bool(body.stream)
    run = await unless_gone(request, start(caller, body, streams=streams))
    if streams:
        return EventStream(run)
    answer = await unless_gone(request, run.answer())
    return as_json([answer] if listed else answer)


async def start(caller: Caller, body: TGIRequest, *, streams: bool) -> TGIRun:
    """Raises InputError, RefusedError, EngineError. The caller must read what it gets, or abort it."""
    server, asked = caller.server, body.parameters or TGIParameters()
    name = asked.adapter_id or body.model
    check_model(server, name)
    params, form, limits = asked.sampling(streams=streams), asked.form(), server.service.limits
    with renamed(_NAMES):
        check_truncation(asked.truncate, limits)
    asker = asker_of(caller)
    prompt, = await server.service.encode_all(
        [body.inputs], ["inputs"], fit=to_cut(asked.truncate, limits), asker=asker
    )  # fmt: skip
    room = limits.context[0] - (params.max_tokens or DEFAULT_MAX_NEW_TOKENS)
    prompt = truncated(prompt, asked.truncate, room)
    options = Options(
        model=name,
        stream=streams,
        default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
        cut_max_tokens=asked.max_new_tokens is None,
    )
    names = {**_NAMES, **({} if form is None else {ours: f"parameters.{own}" for ours, own in form.names.items()})}
    turn = await begin_text(caller, prompt, params, options, "generate", prefix="tgi-", names=names)
    return TGIRun(server, body.inputs, asked, turn, params)


class TGIRun:
    """An answer under way. Leaving `frames` early, or cancelling `answer`, aborts it."""

    def __init__(
        self, server: Server, inputs: str, asked: TGIParameters, turn: Turn, params: SamplingParams
    ) -> None:  # fmt: skip
        self._server, self._inputs, self._asked, self._turn, self._params = server, inputs, asked, turn, params
        self._texts = TokenTexts.of(server, as_ids=False)
        tokenizer = server.service.tokenizer
        self._special = frozenset() if tokenizer is None else tokenizer.special_ids
        self._text: list[str] = []
        self._end: Piece | None = None

    @property
    def too_slow(self) -> bool:
        return self._turn.stream.unread_chars > self._server.config.max_stream_chars

    def abort(self) -> None:
        self._turn.abort()

    async def answer(self) -> TGIAnswer:
        """Raises WireError."""
        tokens: list[TGIToken] = []
        tops: list[list[TGIToken]] = []
        async with aclosing(self._turn.pieces()) as news:
            async for listed in news:
                for piece in listed:
                    for token, top in self._seen(piece):
                        tokens.append(token)
                        tops.append(top)
        answer = TGIAnswer(generated_text=self._whole())
        if self._asked.details or self._asked.decoder_input_details:
            answer.details = details = self._details()
            details.prefill, details.tokens = self._prefill(), tokens
            if self._asked.top_n_tokens:
                details.top_tokens = tops
        usage = self._turn.usage()
        answer.weight_version, answer.weight_versions = usage.weight_version, usage.weight_versions
        return answer

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, one for each token; an error after the beginning is one of them."""
        count = 0
        last: TGIEvent | None = None
        try:
            async with aclosing(self._turn.pieces()) as news:
                async for listed in news:
                    out = []
                    for piece in listed:
                        for token, top in self._seen(piece):
                            out += [] if last is None else [frame(last)]
                            count += 1
                            last = TGIEvent(index=count, token=token)
                            if self._asked.top_n_tokens:
                                last.top_tokens = top
                    if last is not None and self._end is None:
                        out.append(frame(last))
                        last = None
                    if out:
                        yield b"".join(out)
            if last is None:  # it ended without a token of its own
                last = TGIEvent(index=count + 1, token=TGIToken(id=0, text="", logprob=None, special=True))
            last.generated_text, last.details = self._whole(), self._details()
            last.details.input_length = len(self._turn.prompt.ids)
            usage = self._turn.usage()
            last.weight_version, last.weight_versions = usage.weight_version, usage.weight_versions
            yield frame(last)
        except Exception as error:
            yield frame(told(error).body("/generate"))

    def _seen(self, piece: Piece) -> list[tuple[TGIToken, list[TGIToken]]]:
        """The tokens of a piece, whose texts are together what the piece adds to the answer, and the likeliest at each
        of their places."""
        if piece.finish_reason is not None:
            self._end = piece
        delta = piece.delta
        self._text.append(delta.text)
        entries: Sequence[TokenLogprobs | None] = delta.logprobs or [None] * len(delta.token_ids)
        shown = [i for i in delta.token_ids if i not in self._special]
        texts = [self._texts[i].text for i in shown]
        if "".join(texts) != delta.text:  # characters of several tokens: the last one of them has all
            texts = [""] * (len(shown) - 1) + [delta.text]
        own = iter(texts)
        found = []
        for token_id, entry in zip(delta.token_ids, entries, strict=True):
            special = token_id in self._special
            text = self._texts[token_id].text if special else next(own)
            token = TGIToken(
                id=token_id, text=text, logprob=None if entry is None else _number(entry.logprob), special=special
            )
            found.append((token, self._top(entry)))
        return found

    def _top(self, entry: TokenLogprobs | None) -> list[TGIToken]:
        most = self._asked.top_n_tokens or 0
        if entry is None:
            return []
        best = zip(entry.top_ids[:most], entry.top_logprobs, strict=False)
        return [self._named(i, logprob, special=i in self._special) for i, logprob in best]

    def _prefill(self) -> list[TGIToken]:
        if self._params.prompt_logprobs is None:
            return []
        entries = self._turn.stream.prompt_logprobs
        return [
            self._named(i, None if entry is None else entry.logprob)
            for i, entry in zip(self._turn.prompt.ids, entries, strict=False)
        ]

    def _named(self, token_id: int, logprob: float | None, **more: bool) -> TGIToken:
        return TGIToken(
            id=token_id, text=self._texts[token_id].text, logprob=None if logprob is None else _number(logprob), **more
        )

    def _whole(self) -> str:
        return (self._inputs if self._asked.return_full_text else "") + "".join(self._text)

    def _details(self) -> TGIDetails:
        end = self._end
        by_length = end is not None and end.finish_reason in ("length", "repetition")
        by_word = end is not None and isinstance(end.stop_reason, str)
        return TGIDetails(
            finish_reason="length" if by_length else "stop_sequence" if by_word else "eos_token",
            generated_tokens=self._turn.usage().completion_tokens,
            seed=self._asked.seed if self._asked.draws else None,
        )


def _number(logprob: float) -> float:
    return max(float(logprob), LOWEST)


async def info(request: Request) -> Response:
    server: Server = request.app.state.server
    limits, facts = server.service.limits, server.client.info
    return as_json(
        TGIInfo(
            model_id=server.model_name,
            model_sha=None,
            model_dtype="" if facts is None else facts.dtype,
            max_concurrent_requests=0 if facts is None else facts.max_num_seqs,
            max_best_of=1,
            max_stop_sequences=limits.max_stops,
            max_input_tokens=limits.context[0] - 1,
            max_total_tokens=limits.context[0],
            max_client_batch_size=1,
            version=__version__,
            router="penstock",
        )
    )


ROUTES: list[BaseRoute] = [
    Route("/generate", generate, methods=["POST"]),
    Route("/generate_stream", generate_stream, methods=["POST"]),
    Route("/", compat_generate, methods=["POST"]),
    Route("/info", info, methods=["GET"]),
]
DOCS = {
    ("POST", "/generate"): ("Continue a text (TGI's API)", TGIRequest, TGIAnswer),
    ("POST", "/generate_stream"): ("The same, token by token", TGIRequest, TGIEvent),
    ("POST", "/"): ("The same, for clients that know the server's address alone", TGIRequest, TGIAnswer),
    ("GET", "/info"): ("The model and its limits (TGI's API)", None, TGIInfo),
}
EXAMPLES = {
    path: {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32}}
    for path in ("/generate", "/generate_stream", "/")
}
