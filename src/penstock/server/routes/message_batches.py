"""/v1/messages/batches: Anthropic's batches, over the machinery of OpenAI's (`server.batches`).

The requests are written as the lines of an input file, so restarts, other servers of the folder, quotas and full disks
are what they are for every batch.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError, RefusedError
from penstock.server.batches.files import FileStore
from penstock.server.batches.folder import BATCH_ID, FINAL
from penstock.server.batches.runner import BatchRunner
from penstock.server.call import Tenant
from penstock.server.errors import WireError
from penstock.server.routes.files import part, parts_of
from penstock.server.schema.batches import BatchObject, BatchRequest
from penstock.server.schema.decode import read
from penstock.server.schema.messages import (
    MessageBatch,
    MessageBatchCounts,
    MessageBatchDeleted,
    MessageBatchList,
    MessageBatchRequest,
)
from penstock.server.transport.sse import as_json
from penstock.server.turns.times import rfc3339

PATH = "/v1/messages"
MAX_REQUESTS = 10_000
"""Fewer than the bounds of a body allow (`schema.decode`), so that what is too much is told by its number."""
_LARGER = "larger batches are files of lines: /v1/files, then /v1/batches with the endpoint /v1/messages"
_CUSTOM_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OURS, _THEIRS = "batch_", "msgbatch_"
_WRITE_BYTES = 1 << 20


def _runner(request: Request) -> BatchRunner:
    runner: BatchRunner = request.app.state.server.parts["batches"]
    return runner


async def create(request: Request) -> Response:
    _, tenant, store = parts_of(request)
    body = await read(request, MessageBatchRequest)
    _check(body)
    file_id = await asyncio.to_thread(_write, store, tenant, body)
    try:
        wanted = BatchRequest(input_file_id=file_id, endpoint=PATH)
        batch = await _runner(request).create(tenant, wanted, len(body.requests))
    except BaseException:
        await asyncio.to_thread(store.delete, tenant, file_id)
        raise
    return as_json(await _shown(request, batch))


def _check(body: MessageBatchRequest) -> None:
    """Raises InputError."""
    count = len(body.requests)
    if not 1 <= count <= MAX_REQUESTS:
        more = f"; {_LARGER}" if count else ""
        raise InputError(f"requests has {count} entries; 1 to {MAX_REQUESTS} are possible{more}", param="requests")
    seen: dict[str, int] = {}
    for i, one in enumerate(body.requests):
        where = f"requests[{i}].custom_id"
        if _CUSTOM_ID.fullmatch(one.custom_id) is None:
            said = f"has {len(one.custom_id)} characters" if len(one.custom_id) > 64 else f"is {one.custom_id!r}"
            raise InputError(f"{where} {said}; 1 to 64 letters, digits, _ and - are possible", param=where)
        if (first := seen.setdefault(one.custom_id, i)) != i:
            raise InputError(f"{where} is {one.custom_id!r}, as is that of requests[{first}]; they must differ",
                             param=where)  # fmt: skip
        if one.params.get("stream") not in (None, False):
            raise InputError(f"requests[{i}].params.stream is not possible in a batch", param=f"requests[{i}].params")


def _write(store: FileStore, tenant: Tenant, body: MessageBatchRequest) -> str:
    """The id of a file with the requests as lines. Raises RefusedError, OSError; nothing is left then."""
    upload = store.begin(tenant)
    try:
        waiting = bytearray()
        for one in body.requests:
            line = {"custom_id": one.custom_id, "method": "POST", "url": PATH, "body": one.params}
            waiting += msgspec.json.encode(line) + b"\n"
            if len(waiting) >= _WRITE_BYTES:
                upload.write(bytes(waiting))
                waiting.clear()
        upload.write(bytes(waiting))
        return upload.commit("messages.jsonl", "batch").id
    finally:
        upload.discard()


async def _get(request: Request) -> BatchObject:
    """Raises RefusedError (404), also for batches of other paths."""
    given: str = request.path_params["batch_id"]
    ours = _OURS + given.removeprefix(_THEIRS)
    if given.startswith(_THEIRS) and BATCH_ID.fullmatch(ours):
        batch = await _runner(request).get(request.state.tenant, ours)
        if batch.endpoint == PATH:
            return batch
    raise RefusedError(f"there is no batch {given[:64]!r}", status=404, param="batch_id")


async def retrieve(request: Request) -> Response:
    return as_json(await _shown(request, await _get(request)))


async def list_batches(request: Request) -> Response:
    found = [b for b in await _runner(request).list(request.state.tenant) if b.endpoint == PATH]
    query = dict(request.query_params)
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InputError("after_id and before_id exclude each other; give one of them", param="before_id")
    given = after if before is None else before
    items = [await _shown(request, batch) for batch in (found if before is None else found[::-1])]
    shown, more = part(items, query.get("limit"), 20, given)
    shown = shown if before is None else shown[::-1]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return as_json(MessageBatchList(data=shown, has_more=more, first_id=first, last_id=last))


async def cancel(request: Request) -> Response:
    batch = await _get(request)
    return as_json(await _shown(request, await _runner(request).cancel(request.state.tenant, batch.id)))


async def delete(request: Request) -> Response:
    batch = await _runner(request).delete(request.state.tenant, (await _get(request)).id)
    return as_json(MessageBatchDeleted(id=_name(batch)))


async def results(request: Request) -> Response:
    """JSON Lines, a result for every request, in the order in which they were answered."""
    _, tenant, store = parts_of(request)
    batch = await _get(request)
    if batch.status not in FINAL:
        raise RefusedError(f"{_name(batch)} has not ended; its results are there when it has", status=404)
    return StreamingResponse(_results(store, tenant, batch), media_type="application/x-jsonl")


def _name(batch: BatchObject) -> str:
    return _THEIRS + batch.id.removeprefix(_OURS)


async def _shown(request: Request, batch: BatchObject) -> MessageBatch:
    ended = batch.status in FINAL
    at = next((t for t in (batch.completed_at, batch.cancelled_at, batch.expired_at, batch.failed_at) if t), None)
    return MessageBatch(
        id=_name(batch),
        processing_status="ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        request_counts=await asyncio.to_thread(_counts, request, batch, ended),
        created_at=rfc3339(batch.created_at),
        expires_at=rfc3339(batch.expires_at or batch.created_at),
        ended_at=rfc3339(at) if ended and at is not None else None,
        cancel_initiated_at=None if batch.cancelling_at is None else rfc3339(batch.cancelling_at),
        results_url=f"{request.base_url}v1/messages/batches/{_name(batch)}/results" if ended else None,
    )


def _counts(request: Request, batch: BatchObject, ended: bool) -> MessageBatchCounts:
    counts = batch.request_counts
    if not ended:
        return MessageBatchCounts(processing=counts.total)
    _, tenant, store = parts_of(request)
    expired = 0
    if batch.status == "expired":
        expired = sum(_result(told)["type"] == "expired" for told in _lines(store, tenant, batch.error_file_id))
    missing = max(0, counts.total - counts.completed - counts.failed)
    cancelled = missing if batch.status == "cancelled" else 0
    return MessageBatchCounts(
        succeeded=counts.completed, errored=counts.failed - expired + missing - cancelled, canceled=cancelled,
        expired=expired,
    )  # fmt: skip


class _Response(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Line(msgspec.Struct):
    """Of an output file."""

    custom_id: str | None = None
    response: _Response | None = None
    error: _Error | None = None


def _lines(store: FileStore, tenant: Tenant, file_id: str | None) -> Iterator[_Line]:
    """Nothing if the file is not there (any more)."""
    if file_id is None:
        return
    try:
        path = store.path(tenant, file_id)
    except RefusedError:
        return
    with path.open("rb") as file:
        for line in file:
            yield msgspec.json.decode(line, type=_Line)


def _results(store: FileStore, tenant: Tenant, batch: BatchObject) -> Iterator[bytes]:
    seen: set[str] = set()
    for file_id in (batch.output_file_id, batch.error_file_id):
        for told in _lines(store, tenant, file_id):
            if told.custom_id is not None:
                seen.add(told.custom_id)
                yield _encoded(told.custom_id, _result(told))
    for told in _lines(store, tenant, batch.input_file_id):
        if told.custom_id is not None and told.custom_id not in seen:
            yield _encoded(told.custom_id, _without(batch))


def _encoded(custom_id: str, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"


def _result(told: _Line) -> dict[str, Any]:
    if told.error is None:
        return {"type": "succeeded", "message": told.response.body if told.response is not None else None}
    if told.error.code == "batch_expired":
        return {"type": "expired"}
    if told.response is not None:
        return {"type": "errored", "error": told.response.body}  # in Anthropic's shape already
    return {"type": "errored", "error": WireError(400, told.error.message).body(PATH)}


def _without(batch: BatchObject) -> dict[str, Any]:
    """The result of a request without an answer or an error."""
    if batch.status == "cancelled":
        return {"type": "canceled"}
    reason = (batch.errors or {}).get("data") or [{}]
    said = reason[0].get("message") or "the batch ended before this request was answered"
    return {"type": "errored", "error": WireError(500, said).body(PATH)}


ROUTES: list[BaseRoute] = [
    Route("/v1/messages/batches", create, methods=["POST"]),
    Route("/v1/messages/batches", list_batches, methods=["GET"]),
    Route("/v1/messages/batches/{batch_id}", retrieve, methods=["GET"]),
    Route("/v1/messages/batches/{batch_id}", delete, methods=["DELETE"]),
    Route("/v1/messages/batches/{batch_id}/cancel", cancel, methods=["POST"]),
    Route("/v1/messages/batches/{batch_id}/results", results, methods=["GET"]),
]
_ONE = "/v1/messages/batches/{batch_id}"
DOCS: dict[tuple[str, str], tuple[str, type | None, type | None]] = {
    ("POST", "/v1/messages/batches"): ("Answer many messages when nobody waits", MessageBatchRequest, MessageBatch),
    ("GET", "/v1/messages/batches"): ("Batches of messages, newest first", None, MessageBatchList),
    ("GET", _ONE): ("How far one is", None, MessageBatch),
    ("DELETE", _ONE): ("Forget one that has ended", None, MessageBatchDeleted),
    ("POST", _ONE + "/cancel"): ("End one", None, MessageBatch),
    ("GET", _ONE + "/results"): ("Its results, as JSON Lines", None, None),
}
