"""/v1/batches."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.server.batches.runner import BatchRunner
from penstock.server.routes.files import page
from penstock.server.schema.batches import BatchList, BatchObject, BatchRequest
from penstock.server.schema.decode import read
from penstock.server.transport.sse import as_json


def _runner(request: Request) -> BatchRunner:
    runner: BatchRunner = request.app.state.server.parts["batches"]
    return runner


async def create(request: Request) -> Response:
    wanted = await read(request, BatchRequest, accepted=frozenset({"output_expires_after"}))
    return as_json(await _runner(request).create(request.state.tenant, wanted))


async def list_batches(request: Request) -> Response:
    batches: list[BatchObject] = await _runner(request).list(request.state.tenant)
    shown, more = page(request, batches, 20)
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return as_json(BatchList(data=shown, has_more=more, first_id=first, last_id=last))


async def retrieve(request: Request) -> Response:
    return as_json(await _runner(request).get(request.state.tenant, request.path_params["batch_id"]))


async def cancel(request: Request) -> Response:
    return as_json(await _runner(request).cancel(request.state.tenant, request.path_params["batch_id"]))


ROUTES: list[BaseRoute] = [
    Route("/v1/batches", create, methods=["POST"]),
    Route("/v1/batches", list_batches, methods=["GET"]),
    Route("/v1/batches/{batch_id}", retrieve, methods=["GET"]),
    Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
]
