"""/v1/rerank, /v1/score, /classify and /pooling: what hidden states say of texts, and of pairs of them."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError
from penstock.core.pooler import WHOLE
from penstock.core.vector import cosine, embedding, label_scores
from penstock.server.call import Prompt
from penstock.server.encoding import PromptFit
from penstock.server.routes.embeddings import pooled_all
from penstock.server.schema.decode import read
from penstock.server.schema.embeddings import EmbeddingUsage
from penstock.server.schema.extras import ACCEPTED
from penstock.server.schema.openai import PromptTokensDetails
from penstock.server.schema.pooling import (
    ClassifyList,
    ClassifyObject,
    ClassifyRequest,
    PoolingList,
    PoolingObject,
    PoolingRequest,
    RerankDocument,
    RerankList,
    RerankRequest,
    RerankResult,
    ScoreList,
    ScoreObject,
    ScoreRequest,
)
from penstock.server.transport.sse import as_json, unless_gone
from penstock.server.turns.asking import Caller, asker_of, caller_of, check_model, new_id
from penstock.server.turns.truncation import check_truncation, to_cut
from penstock.text.pooling import encode_pair, pooling_of, scored_label, shortened

T = TypeVar("T", bound=msgspec.Struct)
Body = ScoreRequest | RerankRequest | ClassifyRequest | PoolingRequest
_REFUSED = {
    "messages": ((), "is not supported; send the text as input"),
    "max_tokens_per_doc": ((), "is not supported; truncate_prompt_tokens says how long a pair may be"),
    "max_chunks_per_doc": ((), "is not supported; truncate_prompt_tokens says how long a pair may be"),
    "dimensions": ((), "is not supported here; ask /v1/embeddings"),
}


async def _answered(request: Request, kind: type[T], answer: Callable[[Caller, T], Any]) -> Response:
    caller = caller_of(request)
    body = await read(request, kind, refused=_REFUSED, accepted=ACCEPTED)
    return as_json(await unless_gone(request, answer(caller, body)))


async def score(request: Request) -> Response:
    return await _answered(request, ScoreRequest, _score)


async def rerank(request: Request) -> Response:
    return await _answered(request, RerankRequest, _rerank)


async def classify(request: Request) -> Response:
    return await _answered(request, ClassifyRequest, _classify)


async def pooling(request: Request) -> Response:
    return await _answered(request, PoolingRequest, _pooling)


async def _score(caller: Caller, body: ScoreRequest) -> ScoreList:
    model = check_model(caller.server, body.model)
    first, second = (
        _one_of(body, names) for names in (("text_1", "queries"), ("text_2", "documents"))
    )  # fmt: skip
    if len(first) not in (1, len(second)):
        raise InputError(
            f"{len(first)} texts in text_1 came with {len(second)} in text_2; give one of the first, or one for each",
            param="text_1",
        )
    scores, num_tokens = await pair_scores(caller, body, first, second)
    data = [ScoreObject(index=i, score=found) for i, found in enumerate(scores)]
    return ScoreList(id=new_id("score-"), created=_now(), model=model, data=data, usage=_usage(num_tokens))


async def _rerank(caller: Caller, body: RerankRequest) -> RerankList:
    model = check_model(caller.server, body.model)
    if body.top_n is not None and body.top_n < 0:
        raise InputError(f"top_n must be 0 (all of them) or more, not {body.top_n}", param="top_n")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    _count(caller, texts, "documents")
    scores, num_tokens = await pair_scores(caller, body, [body.query], texts, ("query", "documents"))
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n or None]
    shown = body.return_documents is not False
    results = [
        RerankResult(
            index=i, relevance_score=scores[i], document=RerankDocument(text=texts[i]) if shown else None
        )
        for i in best
    ]  # fmt: skip
    return RerankList(id=new_id("rerank-"), model=model, usage=_usage(num_tokens), results=results)


async def _classify(caller: Caller, body: ClassifyRequest) -> ClassifyList:
    model, limits = check_model(caller.server, body.model), caller.server.service.limits
    how = pooling_of("classify", None, limits)
    assert limits.pooler is not None, "a classifier has a pooler"
    labels, prompts = limits.pooler.labels, await _prompts(caller, body, body.input, "input")
    found = await pooled_all(
        caller, body, prompts, how, partial(label_scores, kind=limits.pooler.scores), "classify"
    )  # fmt: skip
    data = [
        ClassifyObject(index=i, label=labels[probs.index(max(probs))], probs=probs, num_classes=len(probs))
        for i, probs in enumerate(found)
    ]
    return ClassifyList(id=new_id("classify-"), created=_now(), model=model, data=data, usage=_usage_of(prompts))


async def _pooling(caller: Caller, body: PoolingRequest) -> PoolingList:
    model, limits = check_model(caller.server, body.model), caller.server.service.limits
    coded = body.encoding_format or "float"
    if coded not in ("float", "base64"):
        raise InputError(f"encoding_format must be float or base64, not {coded[:40]!r}", param="encoding_format")
    task = body.task or ("classify" if limits.pooler is not None and limits.pooler.labels else "embed")
    how, own = pooling_of(task, None, limits), limits.pooler
    prompts = await _prompts(caller, body, body.input, "input")
    finish: Callable[[bytes], Any] = bytes
    if task == "embed":
        finish = partial(embedding, normalize=own is None or own.normalize)
    elif task == "classify":
        assert own is not None, "a classifier has a pooler"
        finish = partial(label_scores, kind=own.scores)
    found = await pooled_all(caller, body, prompts, how, finish, "pooling")
    data = [
        PoolingObject(index=i, data=_data(one, coded, len(prompt.ids) if how == WHOLE else 0))
        for i, (one, prompt) in enumerate(zip(found, prompts, strict=True))
    ]
    return PoolingList(id=new_id("pool-"), created=_now(), model=model, data=data, usage=_usage_of(prompts))


def _data(found: Any, coded: str, num_rows: int) -> Any:
    """`num_rows`: how many rows the numbers are; 0: they are one."""
    import numpy as np

    numbers = np.frombuffer(found, "<f4") if isinstance(found, bytes) else np.asarray(found, "<f4")
    if coded == "base64":
        return base64.b64encode(numbers.tobytes()).decode("ascii")
    return (numbers.reshape(num_rows, -1) if num_rows else numbers).tolist()


async def pair_scores(
    caller: Caller, body: ScoreRequest | RerankRequest, first: Sequence[str], second: Sequence[str],
    names: tuple[str, str] = ("text_1", "text_2"),
) -> tuple[list[float], int]:  # fmt: skip
    """A score per second text, and the tokens that were read: by a cross-encoder's head, or cosines of vectors.

    Raises InputError, RefusedError, WireError, EngineError; cancelling aborts.
    """
    service = caller.server.service
    limits, own = service.limits, service.limits.pooler
    if own is None or not own.labels:
        pooling = pooling_of("embed", None, limits)
        texts = [
            *await _prompts(caller, body, list(first), names[0]),
            *await _prompts(caller, body, list(second), names[1]),
        ]
        vectors = await pooled_all(caller, body, texts, pooling, embedding, "score")
        ours, theirs = vectors[: len(first)], vectors[len(first) :]
        found = [cosine(ours[i if len(first) > 1 else 0], vector) for i, vector in enumerate(theirs)]
        return found, sum(len(prompt.ids) for prompt in texts)
    label = scored_label(own)
    check_truncation(body.truncate_prompt_tokens, limits)
    firsts = list(first) * (len(second) if len(first) == 1 else 1)
    for name, texts_of in zip(names, (first, second), strict=True):
        _present(texts_of, name)
    tokenizer, asker = service.need_tokenizer(), asker_of(caller, body.timeout)
    size = sum(len(a) + len(b) for a, b in zip(firsts, second, strict=True))

    def encode() -> list[list[int]]:
        most = body.truncate_prompt_tokens
        return [encode_pair(tokenizer, a, b, limits, most) for a, b in zip(firsts, second, strict=True)]

    encoded = await service.encoding.work(size, asker, encode)
    pairs = [Prompt(ids, None, f"{names[1]}[{i}]") for i, ids in enumerate(encoded)]
    how = pooling_of("classify", None, limits)
    scores = await pooled_all(caller, body, pairs, how, partial(label_scores, kind=own.scores), "score")
    return [one[label] for one in scores], sum(len(prompt.ids) for prompt in pairs)


async def _prompts(caller: Caller, body: Body, given: str | list[str], name: str) -> list[Prompt]:
    """Raises InputError, and as `Service.encode_all`."""
    service = caller.server.service
    limits, most = service.limits, body.truncate_prompt_tokens
    check_truncation(most, limits)
    texts = [given] if isinstance(given, str) else given
    _count(caller, texts, name)
    _present(texts, name)
    params = [name] if isinstance(given, str) or len(given) == 1 else [f"{name}[{i}]" for i in range(len(texts))]
    found = await service.encode_all(
        texts, params, fit=to_cut(most, limits) or PromptFit.to_pool(limits), asker=asker_of(caller, body.timeout)
    )
    if most is None:
        return found
    room = limits.context[0] if most == -1 else most
    return [Prompt(shortened(one.ids, room, encoded=True), one.text, one.param) for one in found]


def _one_of(body: ScoreRequest, names: tuple[str, str]) -> list[str]:
    given = [getattr(body, name) for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise InputError(f"give {names[0]} (or {names[1]}, which means the same), once", param=names[0])
    return [given[0]] if isinstance(given[0], str) else list(given[0])


def _count(caller: Caller, texts: Sequence[str], name: str) -> None:
    most = caller.server.config.max_prompts
    if not 1 <= len(texts) <= most:
        raise InputError(f"{name} has {len(texts)} entries; 1 to {most} are possible", param=name)


def _present(texts: Sequence[str], name: str) -> None:
    for i, text in enumerate(texts):
        if not text:
            raise InputError(f"{name} must not be empty" if len(texts) == 1 else f"{name}[{i}] must not be empty",
                             param=name)  # fmt: skip


def _usage_of(prompts: Sequence[Prompt]) -> EmbeddingUsage:
    return _usage(sum(len(prompt.ids) for prompt in prompts))


def _usage(num_tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(
        prompt_tokens=num_tokens, total_tokens=num_tokens, prompt_tokens_details=PromptTokensDetails()
    )


def _now() -> int:
    return int(time.time())


_PATHS: dict[Callable[..., Any], tuple[str, ...]] = {
    score: ("/v1/score", "/score"), rerank: ("/v1/rerank", "/rerank", "/v2/rerank"),
    classify: ("/classify",), pooling: ("/pooling",),
}  # fmt: skip
ROUTES: list[BaseRoute] = [Route(path, made, methods=["POST"]) for made, paths in _PATHS.items() for path in paths]
_SHAPES: dict[Callable[..., Any], tuple[str, type, type]] = {
    score: ("Scores of pairs of texts", ScoreRequest, ScoreList),
    rerank: ("Documents in the order in which they answer a query", RerankRequest, RerankList),
    classify: ("Classes of texts", ClassifyRequest, ClassifyList),
    pooling: ("Hidden states of texts", PoolingRequest, PoolingList),
}
DOCS = {("POST", path): _SHAPES[made] for made, paths in _PATHS.items() for path in paths}
_QUERY, _ANSWER = "Where does the mill stand?", "The mill stands by the river."
_BODIES: dict[Callable[..., Any], dict[str, Any]] = {
    score: {"text_1": _QUERY, "text_2": _ANSWER}, rerank: {"query": _QUERY, "documents": [_ANSWER]},
    classify: {"input": _ANSWER}, pooling: {"input": _ANSWER},
}  # fmt: skip
EXAMPLES = {path: _BODIES[made] for made, paths in _PATHS.items() for path in paths}
