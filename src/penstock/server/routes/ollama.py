"""/api/...: Ollama's API, for the models that are served. Errors have its shape by their path (`server.errors`)."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock import __version__
from penstock.base.errors import InputError
from penstock.base.hashing import digest
from penstock.config.several import seconds_of
from penstock.server.context import Server
from penstock.server.ollama.input import NAMES, chat_messages, sampling, template_kwargs
from penstock.server.ollama.run import OllamaRun, now
from penstock.server.parsing.choose import writes_calls, writes_thoughts
from penstock.server.routes.embeddings import written_vectors
from penstock.server.schema.decode import read
from penstock.server.schema.embeddings import EmbeddingRequest
from penstock.server.schema.ollama import (
    OllamaAnswer,
    OllamaChatRequest,
    OllamaDetails,
    OllamaEmbedding,
    OllamaEmbeddingRequest,
    OllamaEmbeddings,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerating,
    OllamaMessage,
    OllamaModel,
    OllamaModels,
    OllamaName,
    OllamaShown,
    OllamaVersion,
)
from penstock.server.transport.sse import LINES, EventStream, as_json, encoder, unless_gone
from penstock.server.turns.asking import Caller, Conversation, Options, asker_of, caller_of, check_model
from penstock.server.turns.defaults import sampling_defaults
from penstock.server.turns.infill import fill_prompt, marks_of
from penstock.server.turns.times import rfc3339
from penstock.server.turns.turn import begin, begin_text

_YEAR_S = 365 * 86400.0
_TEXT_ONLY: tuple[tuple[Any, ...], str] = (([],), "is not supported: only text is read, no images")
_CONTEXT: tuple[tuple[Any, ...], str] = (
    ([],),
    "is not supported: send the conversation to /api/chat; its beginning is not computed again",
)
REFUSED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "images": _TEXT_ONLY,
    "context": _CONTEXT,
    "template": (("",), "is not supported: this server does not run templates from requests"),
    "prompt": (("",), "belongs to /api/generate; here it is messages"),
    "messages": (([],), "belongs to /api/chat; here it is prompt"),
    "max_tokens": ((), "is OpenAI's name; write options.num_predict"),
    "temperature": ((), "belongs into options"),
    "tools": (([],), "belongs to /api/chat"),
    "truncate": ((True, False), "must be true or false: a prompt that is too long is refused, never cut"),
    "shift": ((True, False), "must be true or false: a context is never shifted"),
}
_CHAT = {name: why for name, why in REFUSED_FIELDS.items() if name != "tools"}


def model_of(server: Server, name: str | None) -> str:
    """As the request calls it. `:latest` is what Ollama's clients add to names. Raises RefusedError (404)."""
    check_model(server, _served(server, name))
    return name or server.model_name


def _served(server: Server, name: str | None) -> str | None:
    short = name.removesuffix(":latest") if name else name
    return short if short in server.names else name


async def chat(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, OllamaChatRequest, refused=_CHAT)
    model = _begin(request, caller, body)
    if not body.messages:
        reason = await _load(caller, body)
        return as_json(OllamaAnswer(model=model, created_at=now(), message=OllamaMessage(), done=True,
                                    done_reason=reason))  # fmt: skip
    return await _answer(request, body, _chat(caller, body, model))


async def generate(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, OllamaGenerateRequest, refused=REFUSED_FIELDS)
    model = _begin(request, caller, body)
    if not body.prompt and not body.suffix:
        reason = await _load(caller, body)
        return as_json(OllamaAnswer(model=model, created_at=now(), response="", done=True, done_reason=reason))
    return await _answer(request, body, _generate(caller, body, model))


def _begin(request: Request, caller: Caller, body: OllamaGenerating) -> str:
    """The model's name. Raises RefusedError, InputError."""
    model = model_of(caller.server, body.model)
    keep(caller.server, body.keep_alive)
    if body.think and not writes_thoughts(caller.server):
        raise InputError(f"{model!r} does not support thinking; leave think out", param="think")
    options = body.options
    if options is not None and (options.num_ctx or 0) > caller.server.service.limits.context[0]:
        request.state.ignored = [*request.state.ignored, "options.num_ctx"]
    return model


def keep(server: Server, keep_alive: str | float | None) -> None:
    """How long the model is to stay after its last request. No effect where there is one that stays. Raises
    InputError."""
    if keep_alive is None or server.models is None:
        return
    try:
        seconds = seconds_of(keep_alive)
    except ValueError as error:
        raise InputError(f"keep_alive {error}", param="keep_alive") from None
    server.models.stay(server.model_name, seconds)


async def _load(caller: Caller, body: OllamaGenerating) -> str:
    """For a request with nothing to answer: why it is done. Raises RefusedError."""
    server = caller.server
    if server.models is None:
        return "load"
    model = server.models.served[server.model_name]
    if model.keep_alive_s == 0 and body.keep_alive is not None:
        return "unload"
    await server.models.awake(model)
    return "load"


async def _answer(request: Request, body: OllamaGenerating, start: Any) -> Response:
    run: OllamaRun = await unless_gone(request, start)
    if body.stream is not False:
        return EventStream(run, LINES)
    return as_json(await unless_gone(request, run.answer()))


def _options(caller: Caller, body: OllamaGenerating) -> Options:
    return Options(model=_served(caller.server, body.model), stream=body.stream is not False, cut_max_tokens=True)


async def _chat(caller: Caller, body: OllamaChatRequest, model: str) -> OllamaRun:
    """Raises InputError, RefusedError, EngineError. The caller must read what it gets, or abort it."""
    asked = Conversation(
        messages=chat_messages(body.messages),
        params=sampling(body, sampling_defaults(caller.server)),
        options=_options(caller, body),
        tools=body.tools or None,
        chat_template_kwargs=template_kwargs(body.think),
        names=NAMES,
    )
    return _run(caller, body, await begin(caller, asked, "ollama.chat", prefix="ollama-"), model, chat=True)


async def _generate(caller: Caller, body: OllamaGenerateRequest, model: str) -> OllamaRun:
    """Raises: as `_chat`, InputError for a suffix where the model cannot fill in."""
    server, asker = caller.server, asker_of(caller)
    ends: list[int] = []
    defaults = sampling_defaults(server)
    if body.suffix:
        prompt, ends = await fill_prompt(server, body.prompt, body.suffix, asker, param="prompt")
    elif body.raw or server.service.chat_template is None:
        if body.system:
            raise InputError("system needs a chat template; write it into the prompt", param="system")
        prompt = await server.service.encode(body.prompt, asker=asker)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        asked = Conversation(
            messages=[*system, {"role": "user", "content": body.prompt}], params=sampling(body, defaults),
            options=_options(caller, body), chat_template_kwargs=template_kwargs(body.think), names=NAMES,
            param="prompt",
        )  # fmt: skip
        return _run(caller, body, await begin(caller, asked, "ollama.generate", prefix="ollama-"), model, chat=False)
    params = sampling(body, defaults, ends)
    turn = await begin_text(
        caller, prompt, params, _options(caller, body), "ollama.generate", prefix="ollama-", names=NAMES
    )
    return _run(caller, body, turn, model, chat=False)


def _run(caller: Caller, body: OllamaGenerating, turn: Any, model: str, *, chat: bool) -> OllamaRun:
    return OllamaRun(caller, turn, model, chat=chat, top_logprobs=(body.top_logprobs or 0) if body.logprobs else None)


# -- embeddings ------------------------------------------------------------------------------------------------------


async def embed(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, OllamaEmbedRequest)
    model = model_of(caller.server, body.model)
    keep(caller.server, body.keep_alive)
    asked = EmbeddingRequest(
        input=[*body.input] if isinstance(body.input, list) else body.input,
        dimensions=body.dimensions,
        truncate_prompt_tokens=-1 if body.truncate else None,
    )
    vectors, num_tokens = await unless_gone(request, written_vectors(caller, asked, keep_first=True))
    return as_json(OllamaEmbeddings(
        model=model, embeddings=_raw(b"[" + b",".join(vectors) + b"]"), prompt_eval_count=num_tokens,
        total_duration=round(1e9 * (caller.server.service.clock.now() - caller.arrival_s)),
    ))  # fmt: skip


async def old_embeddings(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, OllamaEmbeddingRequest)
    model_of(caller.server, body.model)
    keep(caller.server, body.keep_alive)
    vectors, _ = await unless_gone(request, written_vectors(caller, EmbeddingRequest(input=body.prompt)))
    return as_json(OllamaEmbedding(embedding=_raw(bytes(vectors[0]))))


def _raw(written: bytes) -> Any:
    return msgspec.Raw(written)


# -- models ----------------------------------------------------------------------------------------------------------


def _details(server: Server) -> OllamaDetails:
    info = server.client.info
    family = server.parts["front"].family or "unknown"
    formats = dict(info.weight_bytes) if info is not None else {}
    main = max(formats, key=lambda name: formats[name], default="" if info is None else info.dtype)
    return OllamaDetails(
        format="penstock", family=family, families=[family], quantization_level=main,
        parameter_size=f"{(info.num_params if info is not None else 0) / 1e6:.4g}M",
    )  # fmt: skip


def _model(server: Server, name: str) -> OllamaModel:
    details, info = _details(server), server.client.info
    size = sum(info.weight_bytes.values()) if info is not None else 0
    facts = f"{server.model_name} {size} {details.parameter_size} {details.quantization_level}"
    return OllamaModel(
        name=name, model=name, modified_at=rfc3339(server.created, 6), size=size, details=details,
        digest=digest(b"ollama", facts.encode()).hex(),
    )  # fmt: skip


async def tags(request: Request) -> Response:
    server: Server = request.app.state.server
    return as_json(OllamaModels(models=[_model(one, name) for one in server.each for name in one.names]))


async def running(request: Request) -> Response:
    """Those in memory. For one that stays as long as the server does `expires_at` is a year from now."""
    server: Server = request.app.state.server
    found = []
    for one in server.each:
        stays_s = _stays_s(one)
        if stays_s is not None:
            model = _model(one, one.model_name)
            model.size_vram, model.context_length = 0, one.service.limits.context[0]
            model.expires_at = rfc3339(time.time() + stays_s, 6)
            found.append(model)
    return as_json(OllamaModels(models=found))


def _stays_s(server: Server) -> float | None:
    """Seconds from now, if nobody asks for it; None: it is not in memory."""
    if server.models is None:
        return _YEAR_S
    model = server.models.served[server.model_name]
    if model.is_gone:
        return None
    return min(_YEAR_S, max(0.0, model.used_s + model.keep_alive_s - server.service.clock.now()))


async def show(request: Request) -> Response:
    body = await read(request, OllamaName)
    server: Server = request.app.state.server
    model_of(server, body.model or body.name)
    details, info, service = _details(server), server.client.info, server.service
    capabilities = ["completion", "embedding"] if server.service.limits.generates else ["embedding"]
    capabilities += ["tools"] if writes_calls(server) else []
    capabilities += ["thinking"] if writes_thoughts(server) else []
    capabilities += ["insert"] if marks_of(server) is not None else []
    defaults = sampling_defaults(server)
    return as_json(OllamaShown(
        modelfile=f"# served by Penstock {__version__}\nFROM {server.model_name}\n",
        parameters="\n".join(f"{name} {value}" for name, value in defaults.items()),
        template=service.chat_template or "",
        details=details,
        model_info={
            "general.architecture": details.family,
            "general.parameter_count": info.num_params if info is not None else 0,
            f"{details.family}.context_length": service.limits.context[0],
            f"{details.family}.embedding_length": info.embedding_size if info is not None else 0,
        },
        capabilities=capabilities,
        modified_at=rfc3339(server.created, 6),
    ))  # fmt: skip


async def version(request: Request) -> Response:
    return as_json(OllamaVersion(version=__version__))


async def pull(request: Request) -> Response:
    """What is served is there. Raises RefusedError (404) for everything else."""
    body = await read(request, OllamaName)
    model_of(request.app.state.server, body.model or body.name)
    done = encoder.encode({"status": "success"})
    return (
        Response(done + b"\n", media_type=LINES)
        if body.stream is not False
        else Response(done, media_type="application/json")
    )


async def no_library(request: Request) -> Response:
    raise InputError(
        "this server serves what was chosen at its start, and keeps no library of models; use the command line",
        code="no_library",
    )


ROUTES: list[BaseRoute] = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", old_embeddings, methods=["POST"]),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", running, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version, methods=["GET"]),
    Route("/api/pull", pull, methods=["POST"]),
    *(Route(f"/api/{name}", no_library, methods=["POST"]) for name in ("create", "copy", "push")),
    Route("/api/delete", no_library, methods=["DELETE"]),
]
DOCS: dict[tuple[str, str], tuple[str, type | None, type | None]] = {
    ("POST", "/api/chat"): ("Answer a conversation (Ollama's API)", OllamaChatRequest, OllamaAnswer),
    ("POST", "/api/generate"): ("Answer a prompt, or fill in (Ollama's API)", OllamaGenerateRequest, OllamaAnswer),
    ("POST", "/api/embed"): ("Vectors of texts (Ollama's API)", OllamaEmbedRequest, OllamaEmbeddings),
    ("POST", "/api/embeddings"): ("A vector of a text, the older form", OllamaEmbeddingRequest, OllamaEmbedding),
    ("GET", "/api/tags"): ("The names of the models that are served", None, OllamaModels),
    ("GET", "/api/ps"): ("Those of them that are in memory", None, OllamaModels),
    ("POST", "/api/show"): ("What it is and can do", OllamaName, OllamaShown),
    ("GET", "/api/version"): ("The version of Penstock", None, OllamaVersion),
    ("POST", "/api/pull"): ("Succeeds for the model that is served", OllamaName, None),
}
