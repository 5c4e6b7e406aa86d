"""/completion and /infill: llama-server's own paths, for the plugins of editors and for programs made for it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError
from penstock.core.sampling import SamplingParams
from penstock.server.call import Prompt
from penstock.server.errors import told
from penstock.server.schema.decode import read
from penstock.server.schema.forms import Form
from penstock.server.schema.llama_server import (
    InfillRequest,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaSampling,
    LlamaTimings,
)
from penstock.server.transport.sse import EventStream, as_json, frame, unless_gone
from penstock.server.turns.asking import Caller, Options, asker_of, caller_of, check_model
from penstock.server.turns.defaults import sampling_defaults
from penstock.server.turns.infill import fill_prompt
from penstock.server.turns.logprobs import LOWEST, TokenTexts
from penstock.server.turns.times import spans_s
from penstock.server.turns.turn import Piece, Turn, begin_text

_OFF = "is not supported: a request that asks for it would get other text than it expects"
REFUSED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "dynatemp_range": ((0,), _OFF),
    "typical_p": ((1,), _OFF),
    "top_n_sigma": ((-1,), _OFF),
    "mirostat": ((0,), _OFF),
    "dry_multiplier": ((0,), _OFF),
    "xtc_probability": ((0,), _OFF),
    "adaptive_target": ((-1,), _OFF),
    "lora": (([],), "is not supported: this server has no adapters"),
    "post_sampling_probs": ((False,), "is not supported: probabilities are those before sampling"),
    "n_cmpl": ((1,), "is not supported here; /v1/completions has n"),
    "n": ((1,), "is not supported here; /v1/completions has n"),
    "max_tokens": ((), "is OpenAI's name; write n_predict"),
    "messages": ((), "belongs to /v1/chat/completions; here it is prompt"),
    "image_data": (([],), "is not supported: only text is read, no images"),
    **dict.fromkeys(("regex", "ebnf"), (("",), "is SGLang's; write grammar or json_schema here")),
    "grammar_lazy": ((False,), "is not supported: a grammar binds the answer from its beginning; leave it out"),
}
ACCEPTED = frozenset(("id_slot", "min_keep", "timings_per_token", "return_progress"))
"""Without meaning here: sequences have no fixed slots, and progress is told by tokens."""
_NAMES = {
    "max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs",
    "max_logprobs": "n_probs",
}  # fmt: skip


async def completion(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, LlamaCompletionRequest, refused=REFUSED_FIELDS, accepted=ACCEPTED)
    return await _answer(request, body, lambda: complete(caller, body))


async def infill(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, InfillRequest, refused=REFUSED_FIELDS, accepted=ACCEPTED)
    return await _answer(request, body, lambda: fill(caller, body))


async def _answer(request: Request, body: LlamaSampling, start: Any) -> Response:
    run: LlamaRun = await unless_gone(request, start())
    if body.stream:
        return EventStream(run)
    return as_json(await unless_gone(request, run.answer()))


async def complete(caller: Caller, body: LlamaCompletionRequest) -> LlamaRun:
    """Raises InputError, RefusedError, EngineError. The caller must read what it gets, or abort it."""
    return await _start(caller, body, await _prompt(caller, body), [])


async def fill(caller: Caller, body: InfillRequest) -> LlamaRun:
    """Raises: as `complete`, InputError where the model cannot fill in."""
    check_model(caller.server, body.model)
    files = [(extra.filename or "tmp", extra.text) for extra in body.input_extra or ()]
    prompt, ends = await fill_prompt(
        caller.server, body.input_prefix, body.input_suffix, asker_of(caller, body.timeout), files=files,
        begun=body.prompt or "",
    )  # fmt: skip
    return await _start(caller, body, prompt, ends)


async def _prompt(caller: Caller, body: LlamaCompletionRequest) -> Prompt:
    """Raises InputError, and as `Service.encode_all`."""
    check_model(caller.server, body.model)
    service, given, asker = caller.server.service, body.prompt, asker_of(caller, body.timeout)
    if isinstance(given, str):
        return await service.encode(given, asker=asker)
    kinds = {type(part) for part in given}
    if kinds == {str} and len(given) > 1:
        raise InputError("prompt has several texts; send one to a request, or use /v1/completions", param="prompt")
    texts = [part for part in given if isinstance(part, str)]
    names = [f"prompt[{i}]" for i, part in enumerate(given) if isinstance(part, str)]
    first = bool(given) and isinstance(given[0], str)
    found = iter([
        (await service.encode(text, param=name, add_special_tokens=first and n == 0, asker=asker)).ids
        for n, (text, name) in enumerate(zip(texts, names, strict=True))
    ])  # fmt: skip
    return Prompt([i for part in given for i in ([part] if isinstance(part, int) else next(found))])


async def _start(caller: Caller, body: LlamaSampling, prompt: Prompt, ends: list[int]) -> LlamaRun:
    server = caller.server
    form = body.form()
    params = _params(body, sampling_defaults(server), form, ends)
    salt = None if body.cache_prompt is not False else secrets.token_hex(8)
    options = Options(
        model=body.model,
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=salt,
        timeout_s=body.timeout,
        cut_max_tokens=True,
    )
    names = {**_NAMES, **({} if form is None else form.names)}
    turn = await begin_text(caller, prompt, params, options, "completion", prefix="cmpl-", names=names)
    return LlamaRun(caller, body, turn, params)


def _params(body: LlamaSampling, defaults: Mapping[str, Any], form: Form | None, ends: list[int]) -> SamplingParams:
    """Raises InputError."""
    if body.n_predict is not None and body.n_predict < -2:
        raise InputError(f"n_predict must be at least -2, not {body.n_predict}", param="n_predict")
    if body.n_predict == 0:
        raise InputError("n_predict must be at least 1, or -1 for all the room there is", param="n_predict")
    return SamplingParams(
        max_tokens=body.n_predict if body.n_predict is not None and body.n_predict > 0 else None,
        logprobs=body.n_probs or None,
        ignore_eos=bool(body.ignore_eos),
        logit_bias=_bias(body.logit_bias),
        stop_token_ids=ends or None,
        structured_outputs=None if form is None else form.asked,
        **body.sampling(defaults),
    )


def _bias(given: Any) -> dict[int, float] | None:
    """`false` forbids a token. Raises InputError for a text, which may be several tokens."""
    if given is None:
        return None
    out: dict[int, float] = {}
    for pair in given.items() if isinstance(given, dict) else given:
        if len(pair) != 2 or isinstance(pair[0], bool | float) or isinstance(pair[1], str):
            raise InputError("logit_bias must be a list of [token id, number or false]", param="logit_bias")
        token, value = pair
        if isinstance(token, str) and not (token.isascii() and token.isdigit() and len(token) < 20):
            raise InputError(f"logit_bias: {token[:40]!r} is no token id; texts are not taken", param="logit_bias")
        out[int(token)] = (-100.0 if value is False else 0.0) if isinstance(value, bool) else float(value)
    return out


class LlamaRun:
    """A completion under way. Leaving `frames` early, or cancelling `answer`, aborts it."""

    def __init__(self, caller: Caller, body: LlamaSampling, turn: Turn, params: SamplingParams) -> None:
        self._server = caller.server
        self._body = body
        self._turn = turn
        self._params = params
        self._texts = TokenTexts.of(caller.server, as_ids=False)
        self._has_new_line = False
        self._end: Piece | None = None

    @property
    def too_slow(self) -> bool:
        return self._turn.stream.unread_chars > self._server.config.max_stream_chars

    def abort(self) -> None:
        self._turn.abort()

    async def answer(self) -> Any:
        """LlamaCompletion, or the fields of it that were asked for. Raises WireError."""
        text: list[str] = []
        tokens: list[int] = []
        written: list[bytes] = []
        async with aclosing(self._turn.pieces()) as news:
            async for listed in news:
                for piece in map(self._seen, listed):
                    text.append(piece.delta.text)
                    tokens += piece.delta.token_ids
                    written += filter(None, (self._probabilities(piece),))
        whole = self._whole("".join(text), tokens if self._body.return_tokens else [])
        if self._params.logprobs:
            whole.completion_probabilities = _list(b",".join(written))
        return self._chosen(whole)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events; an error after the beginning is one of them."""
        count = 0
        try:
            async with aclosing(self._turn.pieces()) as news:
                async for listed in news:
                    out = []
                    for piece in map(self._seen, listed):
                        count += len(piece.delta.token_ids)
                        event: dict[str, Any] = {
                            "index": 0, "content": piece.delta.text, "tokens": piece.delta.token_ids, "stop": False,
                            "id_slot": 0, "tokens_predicted": count, "tokens_evaluated": len(self._turn.prompt.ids),
                        }  # fmt: skip
                        if self._params.logprobs:
                            event["completion_probabilities"] = _list(self._probabilities(piece))
                        out.append(frame(self._chosen(event)))
                    yield b"".join(out)
            yield frame(self._chosen(self._whole("", [])))
        except Exception as error:
            yield frame(told(error).body("/completion"))

    def _seen(self, piece: Piece) -> Piece:
        self._has_new_line = self._has_new_line or "\n" in piece.delta.text
        if piece.finish_reason is not None:
            self._end = piece
        return piece

    def _whole(self, content: str, tokens: list[int]) -> LlamaCompletion:
        turn, end, usage = self._turn, self._end, self._turn.usage()
        word = end.stop_reason if end is not None and isinstance(end.stop_reason, str) else ""
        limit = end is not None and end.finish_reason in ("length", "repetition")
        return LlamaCompletion(
            content=content,
            tokens=tokens,
            model=self._body.model or self._server.model_name,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            generation_settings=self._settings(),
            prompt=turn.prompt.text if turn.prompt.text is not None else self._decoded(turn.prompt.ids),
            has_new_line=self._has_new_line,
            stop_type="limit" if limit else "word" if word else "eos",
            stopping_word=word,
            tokens_cached=usage.prompt_tokens_details.cached_tokens,
            timings=self._timings(),
            weight_version=usage.weight_version,
            weight_versions=usage.weight_versions,
        )

    def _decoded(self, ids: list[int]) -> str:
        tokenizer = self._server.service.tokenizer
        return "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)

    def _settings(self) -> dict[str, Any]:
        p = self._params
        return {
            "n_ctx": self._server.service.limits.context[0], "n_predict": p.max_tokens or -1, "seed": p.seed,
            "temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p,
            "repeat_penalty": p.repetition_penalty, "presence_penalty": p.presence_penalty,
            "frequency_penalty": p.frequency_penalty, "ignore_eos": p.ignore_eos, "stream": bool(self._body.stream),
            "n_probs": p.logprobs or 0, "stop": [p.stop] if isinstance(p.stop, str) else p.stop or [],
        }  # fmt: skip

    def _timings(self) -> LlamaTimings:
        _, prompt_s, generate_s = spans_s(self._turn, self._server.service.clock.now())
        usage = self._turn.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        computed, made = usage.prompt_tokens - cached, usage.completion_tokens
        return LlamaTimings(
            cache_n=cached, prompt_n=computed, prompt_ms=1000 * prompt_s,
            prompt_per_token_ms=1000 * prompt_s / max(1, computed),
            prompt_per_second=computed / prompt_s if prompt_s else 0.0, predicted_n=made,
            predicted_ms=1000 * generate_s, predicted_per_token_ms=1000 * generate_s / max(1, made),
            predicted_per_second=made / generate_s if generate_s else 0.0,
        )  # fmt: skip

    def _probabilities(self, piece: Piece) -> bytes:
        """Elements of `completion_probabilities`, commas between them."""
        most, found = self._params.logprobs or 0, []
        for token_id, entry in zip(piece.delta.token_ids, piece.delta.logprobs or (), strict=False):
            best = zip(entry.top_ids[:most], entry.top_logprobs, strict=False)
            top = b",".join(self._one(i, logprob) + b"}" for i, logprob in best)
            found.append(self._one(token_id, entry.logprob) + b',"top_logprobs":[%b]}' % top)
        return b",".join(found)

    def _one(self, token_id: int, logprob: float) -> bytes:
        """A token's object, without its end."""
        written = self._texts[token_id]
        return b'{"id":%d,%b%b%b' % (
            token_id,
            written.before[1:],
            repr(max(float(logprob), LOWEST)).encode(),
            written.behind,
        )

    def _chosen(self, whole: Any) -> Any:
        """`response_fields`: a path in it is written with slashes, and stays the name of what it leads to."""
        if self._body.response_fields is None:
            return whole
        plain = msgspec.json.decode(msgspec.json.encode(whole))
        out = {}
        for path in self._body.response_fields:
            at: Any = plain
            for name in path.split("/"):
                at = at.get(name) if isinstance(at, dict) else None
            if at is not None:
                out[path] = at
        return out


def _list(elements: bytes) -> Any:
    return msgspec.Raw(b"[" + elements + b"]")


ROUTES: list[BaseRoute] = [
    Route("/completion", completion, methods=["POST"]),
    Route("/infill", infill, methods=["POST"]),
]
DOCS = {
    ("POST", "/completion"): ("Complete a prompt (llama-server's API)", LlamaCompletionRequest, LlamaCompletion),
    ("POST", "/infill"): ("Fill in between two texts (llama-server's API)", InfillRequest, LlamaCompletion),
}
EXAMPLES = {"/completion": {"prompt": "Once upon a time", "n_predict": 32}}
