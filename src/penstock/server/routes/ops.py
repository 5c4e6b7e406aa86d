"""/health /ready /metrics /version /load, and llama-server's /props and /slots."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from penstock import __version__
from penstock.core.messages import AGES_S
from penstock.server.admission.keys import only_tenant
from penstock.server.context import Server
from penstock.server.errors import WireError
from penstock.server.observation.metrics import draining, load_of, memory_of, models_shown, unread
from penstock.server.observation.replicas import replicas_shown
from penstock.server.scaling import autoscale_shown
from penstock.server.turns.defaults import shown_defaults

_MIB = 1 << 20


def json_response(value: Any, status: int = 200) -> Response:
    return Response(
        msgspec.json.encode(value), status, media_type="application/json", headers={"cache-control": "no-store"}
    )


async def health(request: Request) -> Response:
    """Liveness: this process answers. Whether the engine does, /ready says."""
    return json_response({"status": "ok"})


def unready(server: Server) -> WireError | None:
    """Why no token can be finished now; None if one can, of any of its models."""
    reasons = [_unready(one) for one in server.each]
    return None if None in reasons else reasons[0]


def _unready(server: Server) -> WireError | None:
    client = server.client
    if draining(server):
        return WireError(503, "the server is shutting down", code="shutting_down")
    if client.state == "starting":
        done, total = client.loading
        so_far = f" ({done // _MIB} of {total // _MIB} MiB)" if total else ""
        return WireError(503, f"the model is being loaded{so_far}", code="loading", retry_after_s=1.0)
    if client.paused:
        return WireError(503, "generation is paused (/continue_generation)", code="paused")
    ready, reason = client.ready()
    if not ready:
        code = "engine_stalled" if client.state == "ready" else f"engine_{client.state}"
        return WireError(503, reason, code=code)
    return None


async def ready(request: Request) -> Response:
    reason = unready(request.app.state.server)
    if reason is not None:
        request.scope["state"]["error"] = reason
        return json_response(reason.body(), reason.status)
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    server: Server = request.app.state.server
    only, accept = only_tenant(request.scope, server), request.headers.get("accept", "")
    text, content_type = server.parts["metrics"].render(only, accept)
    return Response(text, headers={"content-type": content_type, "vary": "Accept"})


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def load(request: Request) -> Response:
    return json_response(load_of(request.app.state.server))


async def props(request: Request) -> Response:
    """llama-server's: what a request gets by default, and what the server can do at once."""
    server: Server = request.app.state.server
    info = server.client.info
    return json_response({
        "default_generation_settings": {"n_ctx": info.max_model_len if info is not None else 0, "params": {}},
        "total_slots": info.max_num_seqs if info is not None else 0,
        "model_alias": server.model_name,
        "model_path": server.model_name,
        "chat_template": server.service.chat_template or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"penstock {__version__}",
        "is_sleeping": server.models is not None and server.models.served[server.model_name].level > 0,
    })  # fmt: skip


async def slots(request: Request) -> Response:
    """llama-server's: one entry per sequence that may run at once. `?fail_on_no_slot=1`: 503 if all are taken."""
    server: Server = request.app.state.server
    info = server.client.info
    total = info.max_num_seqs if info is not None else 0
    running = min(total, server.client.snapshot.num_running)
    if request.query_params.get("fail_on_no_slot") and running == total:
        raise WireError(503, "no slot is free", code="no_slot")
    n_ctx = info.max_model_len if info is not None else 0
    return json_response([{"id": i, "n_ctx": n_ctx, "is_processing": i < running} for i in range(min(total, 1024))])


async def state(request: Request) -> Response:
    """All that the page shows of the engine; `?points=N`: seconds of history. A key sees its own requests only."""
    server: Server = request.app.state.server
    client, stats = server.client, server.parts["stats"]
    info, snapshot = client.info, client.snapshot
    asked = request.query_params.get("points", "")
    points = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 60
    reason = unready(server)
    only = only_tenant(request.scope, server)
    memory = memory_of(server)
    why = {} if info is None else {name: text for name, _, text in info.decisions}
    return json_response({
        "now_s": stats.clock.now(),
        "unix_s": time.time(),
        "version": __version__,
        "model": server.model_name,
        "models": models_shown(server),
        "replicas": replicas_shown(server),
        "autoscale": autoscale_shown(server),
        "early_rejection": None if (gate := server.parts.get("admission")) is None else gate.early_shown(),
        "chat": server.service.chat_template is not None,
        "sampling": shown_defaults(server),
        "state": client.state,
        "unready": reason.message if reason is not None else None,
        "restarts": client.num_restarts,
        "weights": {"version": client.weight_version, "paused": client.paused,
                    "swaps": stats.counter("num_weight_swaps")},
        "convictions": {
            "convicted": client.convictions.num_convicted, "refused": client.convictions.num_refused,
            "held": len(client.convictions),
        },
        "load": load_of(server),
        "engine": {} if info is None else {
            "max_model_len": info.max_model_len, "block_size": info.block_size, "max_num_seqs": info.max_num_seqs,
            "dtype": info.dtype, "kv_dtype": info.kv_dtype, "num_params": info.num_params,
            "start": [{"part": name, "seconds": took_s} for name, took_s in info.start_parts],
        },
        "kv": {
            "adapters": int(snapshot.counters.get("num_adapter_blocks", 0)),
            "total": snapshot.kv_total, "used": snapshot.kv_used, "cached": snapshot.kv_evictable,
            "held_bytes": memory.get("kv"), "limit_bytes": memory.get("kv_limit"),
            "refusals": stats.counter("num_kv_refusals"), "why": why.get("kv_cache_memory_bytes", "it was given"),
        },
        "ranks": [
            {name: getattr(rank, name) for name in rank.__struct_fields__} for rank in snapshot.rank_blocks
        ],
        "prefix": {
            "tree": snapshot.prefix_tree if only is None else [],  # of everybody's prompts together
            "queries": stats.counter("num_prefix_queries_tokens"), "hits": stats.counter("num_prefix_hit_tokens"),
        },
        "tiers": {
            "tiers": [
                {name: getattr(tier, name) for name in tier.__struct_fields__} for tier in snapshot.tiers
            ],
            "misses": stats.misses() if only is None else {},
            "unread": unread(stats, snapshot.counters) if only is None else {},
            "ages": {which: stats.ages(which) for which in ("found", "left")} if only is None else {},
            "ages_s": AGES_S,
        },
        "preemptions": stats.counter("num_preemptions"),
        "adaptive": {
            "knobs": snapshot.knobs, "frozen": snapshot.frozen, "moves": [
                {"at_s": at_s, "knob": knob, "value": value, "was": was, "why": why}
                for at_s, knob, value, was, why in snapshot.moves
            ],
        } if snapshot.knobs else None,
        "speculation": stats.acceptance.figures() if server.speculates else None,
        "history": stats.history(points),
        "recent": [row for row in stats.recent if only is None or row["tenant"] == only],
    })  # fmt: skip


ROUTES: list[BaseRoute] = [
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/version", version, methods=["GET"]),
    Route("/load", load, methods=["GET"]),
    Route("/props", props, methods=["GET"]),
    Route("/slots", slots, methods=["GET"]),
    Route("/internal/state", state, methods=["GET"]),
]
