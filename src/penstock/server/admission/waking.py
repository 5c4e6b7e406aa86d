"""Requests wake their model. Only who has models that come and go reads this."""

from __future__ import annotations

from penstock.server.call import Call
from penstock.server.context import Server
from penstock.server.several.models import Models
from penstock.server.several.served import ServedModel


def models_of(server: Server) -> Models:
    """Of a server with one model, too, whose engine stays by itself but can be told to sleep."""
    if server.models is None:
        server.models = Models(server.service.clock, {})
        served = ServedModel(server.model_name, server.client, 0, 0, keep_alive_s=float("inf"))
        follow(server, server.models, served)
        server.closers.append(server.models.close)
    return server.models


def follow(server: Server, models: Models, model: ServedModel) -> None:
    """From now on a request of `server` wakes its model. Mutates: both."""
    models.add(model)
    server.models = models

    async def wake(call: Call) -> None:
        await models.awake(model)

    # Last of all: nothing is waited for between a look at the model and the request's own entry.
    server.service.prepare.append(wake)
