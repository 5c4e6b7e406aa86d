"""/v1/models."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock.server.context import Server
from penstock.server.parsing import takes_bare, tool_support
from penstock.server.schema.openai import Model, ModelList
from penstock.server.transport.sse import as_json
from penstock.server.turns.asking import check_model
from penstock.server.turns.defaults import sampling_defaults


async def models(request: Request) -> Response:
    server: Server = request.app.state.server
    listed = ModelList(data=[_model(one, name) for one in server.each for name in one.names])
    return as_json(listed)


async def model(request: Request) -> Response:
    server: Server = request.app.state.server
    asked = request.path_params["model"]
    server = next((one for one in server.each if asked in one.names), server)
    return as_json(_model(server, check_model(server, asked, exact=True)))


def _model(server: Server, name: str) -> Model:
    limits = server.service.limits
    adapted = server.adapters is not None and name in server.adapters.names
    return Model(
        id=name,
        created=server.created,
        root=name if adapted else server.model_name,
        parent=server.model_name if adapted else None,
        max_model_len=limits.context[0],
        weight_version=server.client.weight_version if server.client.tells_weights else UNSET,
        default_sampling_params=sampling_defaults(server),
        capabilities={
            "chat": bool(server.service.chat_template or server.service.named_templates),
            "tools": tool_support(server),
            "bare_tool_calls": takes_bare(server),
        },
    )


ROUTES: list[BaseRoute] = [
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model:path}", model, methods=["GET"]),
]
DOCS = {
    ("GET", "/v1/models"): ("The models that are served, with their limits and defaults", None, ModelList),
    ("GET", "/v1/models/{model}"): ("One of them", None, Model),
    ("GET", "/version"): ("The version of Penstock", None),
}
