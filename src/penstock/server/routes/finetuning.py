"""/v1/fine_tuning/jobs. Where there are keys, the admin's is needed: everybody may use what comes of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.server.call import Tenant
from penstock.server.context import Server
from penstock.server.errors import WireError
from penstock.server.routes.files import page
from penstock.server.schema.decode import read
from penstock.server.schema.finetuning import JobEvent, JobEventList, JobList, JobObject, JobRequest
from penstock.server.transport.sse import as_json

if TYPE_CHECKING:
    from penstock.server.finetuning.jobs import FineTuning


def _part(request: Request) -> FineTuning:
    server: Server = request.app.state.server
    part: FineTuning | None = server.parts.get("finetuning")
    if part is None:
        raise WireError(404, "nothing is trained here; start the server with --finetune-root", code="not_found")
    tenant: Tenant = request.state.tenant
    keys = server.parts.get("keys")
    if keys is not None and not tenant.admin:
        raise WireError(403, "this needs the admin key", code="permission_denied")
    return part


async def create(request: Request) -> Response:
    part = _part(request)
    wanted = await read(request, JobRequest, accepted=frozenset({"integrations"}))
    return as_json(await part.create(request.state.tenant, wanted))


async def list_jobs(request: Request) -> Response:
    found: list[JobObject] = await _part(request).newest()
    shown, more = page(request, found, 20)
    return as_json(JobList(data=shown, has_more=more))


async def retrieve(request: Request) -> Response:
    return as_json(await _part(request).get(request.path_params["job_id"]))


async def cancel(request: Request) -> Response:
    return as_json(await _part(request).cancel(request.path_params["job_id"]))


async def events(request: Request) -> Response:
    found: list[JobEvent] = await _part(request).events(request.path_params["job_id"])
    shown, more = page(request, found, 20)
    return as_json(JobEventList(data=shown, has_more=more))


ROUTES: list[BaseRoute] = [
    Route("/v1/fine_tuning/jobs", create, methods=["POST"]),
    Route("/v1/fine_tuning/jobs", list_jobs, methods=["GET"]),
    Route("/v1/fine_tuning/jobs/{job_id}", retrieve, methods=["GET"]),
    Route("/v1/fine_tuning/jobs/{job_id}/cancel", cancel, methods=["POST"]),
    Route("/v1/fine_tuning/jobs/{job_id}/events", events, methods=["GET"]),
]
DOCS = {
    ("POST", "/v1/fine_tuning/jobs"): ("Train an adapter on an uploaded file", JobRequest, JobObject),
    ("GET", "/v1/fine_tuning/jobs"): ("All jobs, newest first", None, JobList),
    ("GET", "/v1/fine_tuning/jobs/{job_id}"): ("One of them", None, JobObject),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel"): ("End one", None, JobObject),
    ("GET", "/v1/fine_tuning/jobs/{job_id}/events"): ("What has happened, newest first", None, JobEventList),
}
