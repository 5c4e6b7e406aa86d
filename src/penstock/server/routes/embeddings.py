"""/v1/embeddings: pooled hidden states of the model that is served."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.base.errors import EngineError, InputError
from penstock.core.sampling import SamplingParams
from penstock.core.vector import check_dimensions, embedding
from penstock.server.call import Prompt
from penstock.server.encoding import PromptFit
from penstock.server.errors import WireError
from penstock.server.schema.decode import read
from penstock.server.schema.embeddings import EmbeddingList, EmbeddingObject, EmbeddingRequest, EmbeddingUsage
from penstock.server.schema.extras import ACCEPTED
from penstock.server.schema.openai import PromptTokensDetails
from penstock.server.transport.pieces import GAP, Pieces, PiecesResponse
from penstock.server.transport.sse import encoder, unless_gone
from penstock.server.turns.asking import Caller, Options, asker_of, caller_of, check_model, make_call, new_id
from penstock.server.turns.truncation import check_truncation, to_cut, truncated
from penstock.text.pooling import pooling_of, prompt_before, shortened
from penstock.text.validate import build_pooling_request

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]

T = TypeVar("T")
AT_ONCE = 16
"""Inputs of one request that are with the engine at a time: a long list must not fill the queue."""
_REFUSED = {
    "messages": ((), "is not supported; send the text as input"),
}


async def embeddings(request: Request) -> Response:
    caller = caller_of(request)
    body = await read(request, EmbeddingRequest, refused=_REFUSED, accepted=ACCEPTED)
    return PiecesResponse(await unless_gone(request, embed(caller, body)))


async def embed(caller: Caller, body: EmbeddingRequest) -> Pieces:
    """EmbeddingList, as JSON. Raises InputError, RefusedError, WireError, EngineError; cancelling aborts."""
    model = check_model(caller.server, body.model)
    coded = body.encoding_format or "float"
    if coded not in ("float", "base64"):
        raise InputError(f"encoding_format must be float or base64, not {coded[:40]!r}", param="encoding_format")
    parts, num_tokens = await written_vectors(caller, body, coded)
    answer = EmbeddingList(
        data=[EmbeddingObject(index=i, embedding=GAP) for i in range(len(parts))],
        model=model,
        usage=EmbeddingUsage(
            prompt_tokens=num_tokens, total_tokens=num_tokens, prompt_tokens_details=PromptTokensDetails()
        ),
    )
    return Pieces(answer, parts)


async def written_vectors(
    caller: Caller, body: EmbeddingRequest, coded: str = "float", *, keep_first: bool = False
) -> tuple[list[bytes | bytearray], int]:
    """The vectors of a request's inputs as JSON, and the tokens of the inputs. `keep_first`: of an input that is cut.

    Raises InputError, RefusedError, WireError, EngineError; cancelling aborts.
    """
    server = caller.server
    info = server.client.info
    assert info is not None
    check_dimensions(body.dimensions, info.embedding_size)
    limits = server.service.limits
    pooling, own = pooling_of("embed", body.pooling, limits), limits.pooler
    most, room = body.truncate_prompt_tokens, limits.context[0]
    check_truncation(most, limits)
    prompts = [
        _cut(prompt, most, room, keep_first=keep_first, ends=not limits.generates)
        for prompt in await _prompts(caller, body)
    ]
    # What is left of a vector that was cut is brought to length 1, whatever the model's files say of whole ones.
    normalize = body.normalize
    if normalize is None:
        normalize = own is None or own.normalize or body.dimensions is not None
    vectors = await pooled_all(
        caller, body, prompts, pooling, partial(embedding, normalize=normalize, dimensions=body.dimensions)
    )
    work = server.slices.work(caller.tenant)
    parts: list[bytes | bytearray] = []
    for vector in vectors:
        await work.pause()
        parts.append(encoder.encode(_written(vector, coded)))
    return parts, sum(len(prompt.ids) for prompt in prompts)


def _cut(prompt: Prompt, most: int | None, room: int, *, keep_first: bool, ends: bool) -> Prompt:
    """`ends`: a text keeps its first tokens, and the one that the tokenizer puts behind it (encoders)."""
    if not ends or most is None:
        return truncated(prompt, most, room, keep_first=keep_first)
    return replace(prompt, ids=shortened(prompt.ids, room if most == -1 else most, encoded=prompt.text is not None))


class VectorOptions(Protocol):
    """Options that every request for hidden states has."""

    model: str | None
    priority: int | None
    cache_salt: str | None
    timeout: float | None


async def pooled_all(
    caller: Caller, body: VectorOptions, prompts: Sequence[Prompt], pooling: str, finish: Callable[[bytes], T],
    endpoint: str = "embeddings",
) -> list[T]:  # fmt: skip
    """What `finish` makes of each prompt's pooled numbers, in their order. All are checked before any runs.

    Raises InputError, RefusedError, WireError, EngineError; cancelling aborts.
    """
    server = caller.server
    work = server.slices.work(caller.tenant)
    for prompt in prompts:
        await work.pause()
        build_pooling_request("", prompt.ids, pooling, limits=server.service.limits, param=prompt.param)
    info = server.client.info
    assert info is not None
    # A step of an encoder takes whole texts, as many as it has room for, and nobody's answer waits between them.
    places = asyncio.Semaphore(AT_ONCE if info.generates else max(AT_ONCE, info.max_num_seqs))
    request_id = new_id("embd-")

    async def one(i: int, prompt: Prompt) -> T:
        async with places:
            pooled = await _pooled(caller, body, prompt, pooling, f"{request_id}-{i}", endpoint)
            # In a thread: the first one imports numpy, for which no other stream should wait.
            return await asyncio.to_thread(finish, pooled)

    tasks = [asyncio.ensure_future(one(i, prompt)) for i, prompt in enumerate(prompts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _written(vector: Vector, coded: str) -> list[float] | str:
    if coded == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    floats: list[float] = vector.tolist()
    return floats


async def _pooled(
    caller: Caller, body: VectorOptions, prompt: Prompt, pooling: str, request_id: str, endpoint: str
) -> bytes:
    options = Options(model=body.model, priority=body.priority, cache_salt=body.cache_salt, timeout_s=body.timeout)
    call = make_call(caller, prompt, SamplingParams(max_tokens=1), options, endpoint, request_id)
    call.pooling = pooling
    stream = await caller.server.service.submit(call)
    try:
        return await stream.pooled()
    except EngineError:
        if stream.aborted == "timeout":
            raise WireError(408, "the request took longer than its time limit", code="timeout") from None
        if stream.aborted:
            raise WireError(503, "the request was aborted", code="aborted") from None
        raise


async def _prompts(caller: Caller, body: EmbeddingRequest) -> list[Prompt]:
    """Raises InputError, and as `Service.encode_all`."""
    given, service = body.input, caller.server.service
    encode = partial(
        service.encode_all, add_special_tokens=body.add_special_tokens is not False,
        fit=to_cut(body.truncate_prompt_tokens, service.limits) or PromptFit.to_pool(service.limits),
        asker=asker_of(caller, body.timeout),
    )  # fmt: skip
    before = prompt_before(body.prompt_name, service.limits.pooler)
    if isinstance(given, str):
        return await encode([before + given if given else ""], ["input"])
    if given and all(isinstance(x, int) for x in given):
        return [Prompt([x for x in given if isinstance(x, int)], None, "input")]
    most = caller.server.config.max_prompts
    if not 1 <= len(given) <= most:
        raise InputError(f"input has {len(given)} entries; 1 to {most} are possible", param="input")
    if any(isinstance(x, int) for x in given):
        raise InputError("input mixes token ids with texts or lists; give one kind", param="input")
    names = [f"input[{i}]" for i in range(len(given))]
    listed = [(one, name) for one, name in zip(given, names, strict=True) if isinstance(one, list)]
    texts = [(one, name) for one, name in zip(given, names, strict=True) if isinstance(one, str)]
    found = (
        await encode([before + one if one else "" for one, _ in texts], [name for _, name in texts]) if texts else []
    )
    by_name = {prompt.param: prompt for prompt in (*found, *(Prompt(one, None, name) for one, name in listed))}
    return [by_name[name] for name in names]


ROUTES: list[BaseRoute] = [Route("/v1/embeddings", embeddings, methods=["POST"])]
DOCS = {("POST", "/v1/embeddings"): ("Vectors of texts", EmbeddingRequest, EmbeddingList)}
EXAMPLES = {"/v1/embeddings": {"input": "The mill stands by the river."}}
