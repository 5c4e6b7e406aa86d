"""/internal/replicas: the engines behind this server, for the admin key: which there are, add, drain, remove, restart.

Every call answers when what it asks for is done; one who does not wait does not stop it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from penstock.base.errors import InputError, PenstockError
from penstock.engine.membership import Membership
from penstock.server.context import Server
from penstock.server.errors import WireError
from penstock.server.routes.admin import for_admin

ACTIONS = ("drain", "resume", "remove", "restart")


class ReplicaAction(msgspec.Struct, forbid_unknown_fields=True):
    """`action`: one of ACTIONS. `timeout`: seconds for what the engine has; then the others go on with it. By default
    as long as it takes, and with restart at once."""

    action: str
    timeout: float | None = None


class RollingRestart(msgspec.Struct, forbid_unknown_fields=True):
    """`timeout`: as `ReplicaAction`, for each engine."""

    timeout: float | None = None


async def listed(request: Request, server: Server) -> Any:
    group = _group(server)
    return {"object": "list", "data": group.describe(), "most": group.most, "router": server.config.route_policy}


async def add(request: Request, server: Server) -> Any:
    group = _group(server)
    try:
        number = await group.add()
    except PenstockError as error:
        raise _told("a further engine could not be started", error) from None
    return {"object": "replica", "number": number, "done": True}


async def act(request: Request, server: Server) -> Any:
    group, asked = _group(server), msgspec.json.decode(await request.body() or b"{}", type=ReplicaAction)
    number = _number(request)
    done: dict[str, Any] = {"object": "replica", "number": number, "action": asked.action}
    _check_timeout(asked.timeout)
    match asked.action:
        case "drain":
            await group.drain(number, asked.timeout)
        case "remove":
            await group.remove(number, asked.timeout)
        case "resume":
            group.resume(number)
        case "restart":
            try:
                done["away_s"] = round(await group.restart(number, asked.timeout or 0.0), 3)
            except PenstockError as error:
                raise _told(f"engine {number} could not be started again", error) from None
        case _:
            raise InputError(f"action: {asked.action[:40]!r} is none of {', '.join(ACTIONS)}", param="action")
    return done | {"done": True}


async def restart_all(request: Request, server: Server) -> Any:
    group, asked = _group(server), msgspec.json.decode(await request.body() or b"{}", type=RollingRestart)
    _check_timeout(asked.timeout)
    try:
        away = await group.restart_all(asked.timeout or 0.0)
    except PenstockError as error:
        raise _told("the restart ended there; the engines that had not had their turn serve on", error) from None
    return {"object": "replicas", "away_s": {str(n): round(away_s, 3) for n, away_s in away.items()}, "done": True}


def _group(server: Server) -> Membership:
    group = server.parts.get("replicas")
    if group is None:
        raise WireError(404, "a server of several models has one engine of each, which come and go as they are needed",
                        code="not_found")  # fmt: skip
    assert isinstance(group, Membership)
    return group


def _number(request: Request) -> int:
    number = request.path_params["number"]
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        raise InputError(f"the engine's number is needed, not {number[:20]!r}", param="number")
    return int(number)


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 <= timeout_s < float("inf"):
        raise InputError("timeout must be a number of seconds from 0", param="timeout")


def _told(what: str, error: PenstockError) -> Exception:
    """What kept an engine from starting, for whoever asked for it; refusals are sentences of their own."""
    if getattr(error, "status", None) is not None:
        return error
    return WireError(503, f"{what}: {error}", code="engine_not_started")


ROUTES: list[BaseRoute] = [
    Route("/internal/replicas", for_admin(listed), methods=["GET"]),
    Route("/internal/replicas", for_admin(add), methods=["POST"]),
    Route("/internal/replicas/restart", for_admin(restart_all), methods=["POST"]),
    Route("/internal/replicas/{number}", for_admin(act), methods=["POST"]),
]
